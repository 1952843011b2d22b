"""Records and small runs that several tests use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from crosstrain.core.job import Job
from crosstrain.records.store.run_directory import RunReader, RunWriter
from crosstrain.records.store.schema import Clock, EvalRecord, EventRecord, StepRecord, SystemRecord, TaskSample
from crosstrain.records.summary import summarise

STEP = StepRecord(0, 2, 0, 0.5, 0.25, 20, (0.5, 0.25), (0.05,))
EVALUATION = EvalRecord(10, 1.0, 1.5, 0.125, "test", 360, 0.75, {"accuracy": 0.875}, 10)
EVENT = EventRecord("task_ended", 2.5, {"task": "worker-1", "signal": 9})
SYSTEM = SystemRecord(
    node=0,
    time_seconds=0.5,
    interval_seconds=0.5,
    cpu_seconds=1.0,
    cpu_cores_used=1.5,
    cpu_fraction=0.75,
    cores_available=2.0,
    memory_rss_bytes=200_000_000,
    memory_pss_bytes=None,
    network_source="interface",
    network_sent_bytes=1000,
    network_received_bytes=2000,
    interfaces={"node0": (1000, 2000)},
    disk_read_bytes=0,
    disk_written_bytes=4096,
    gpus=None,
    monitor_cpu_seconds=0.01,
    tasks=(TaskSample("worker-0", 4711, 1.0, 200_000_000, None, None, None),),
    problems=("pss: permission denied",),
)

CLOCK = Clock(
    init_seconds=3.0,
    run_seconds=2.0,
    train_seconds=1.6,
    eval_seconds=0.3,
    checkpoint_seconds=0.0,
    total_seconds=5.5,
    train_seconds_by_node=(1.6, 1.5),
)


def sample(node: int, time_seconds: float, **figures: Any) -> SystemRecord:
    return replace(SYSTEM, node=node, time_seconds=time_seconds, **figures)


RESUMED = 10.0
"""When the run of `resumed_samples` resumed, on the run clock in seconds."""


def _segment(nodes: int, began: float, until: float, init: float, interval: float, **fields: Any) -> Iterator[SystemRecord]:
    """Yield samples of a segment of a run, as the driver writes them.

    Initialisation uses 1 core and 1 MB/s, training 0.2 of both. One sample is taken just before the clock starts,
    and one at its end. Those of the nodes are a millisecond apart.
    """
    moments = [began - init + interval * (number + 0.5) for number in range(int((until - began + init) / interval))]
    for time_seconds in sorted([*moments, began - 0.002, until]):
        used = min(time_seconds - began + init, init) + 0.2 * max(0.0, time_seconds - began)
        figures = {
            "interval_seconds": interval,
            "cpu_seconds": used,
            "cpu_cores_used": 1.0 if time_seconds <= began else 0.2,
            "network_sent_bytes": round(1e6 * used),
            "network_received_bytes": None,
        }
        for node in range(nodes):
            yield sample(node, time_seconds + 0.001 * node, **figures, **fields)


def resumed_samples(marked: bool, init: float = 15.0, interval: float = 0.5) -> list[SystemRecord]:
    """Return samples of a run of 20 s, resumed after 10 s on two nodes.

    With `marked`, samples name their segments, others do not, as in older releases. Each initialisation took `init` seconds.
    """
    first, second = ({"part_began_seconds": began} if marked else {} for began in (0.0, RESUMED))
    before = (record for record in _segment(1, 0.0, RESUMED, init, interval, **first) if record.time_seconds < RESUMED)
    return [*before, *_segment(2, RESUMED, 20.0, init, interval, **second)]


def resumed_run(out: Path, marked: bool) -> Path:
    """Make the directory of a run with `resumed_samples`, and nothing else."""
    job = a_job(out, name="resumed", nodes=2)
    writer = open_run(job)
    writer.write_job({**job.model_dump(mode="json"), "segments": [{"run_seconds": seconds} for seconds in (0.0, RESUMED)]})
    for record in resumed_samples(marked):
        writer.system(record)
    writer.close()
    return writer.path


def a_job(out: Path, **fields: Any) -> Job:
    return Job.model_validate({"backend": "tf", "out": out, **fields})


def open_run(job: Job) -> RunWriter:
    writer = RunWriter.create(job)
    writer.write_job(job.model_dump(mode="json"))
    writer.write_status("running")
    return writer


def sync_run(out: Path, **fields: Any) -> Path:
    """Make a finished sync run of two nodes with a summary.
    | 10 steps in groups of 2, two evaluations, samples every half second.
    """
    job = a_job(out, **{"name": "one", "nodes": 2, "batch_size": 5, "until": "accuracy>=0.85", **fields})
    writer = open_run(job)
    for group in range(5):
        losses = (1.0 - 0.1 * group, 0.95 - 0.1 * group)
        writer.step(StepRecord(2 * group, 2, 0, 0.3 * (group + 1), 0.3 if group else 0.5, 20, losses, (0.05,)))
    for step, loss, accuracy in ((4, 0.9, 0.5), (10, 0.6, 0.9)):
        writer.evaluation(EvalRecord(step, step / 10, step / 6, 0.15, "test", 360, loss, {"accuracy": accuracy}, step))
    for tick in range(-2, 5):
        for node in range(2):
            cumulative = {
                "cpu_seconds": 10.0 + tick * 0.5 * (node + 1),
                "cpu_cores_used": 1.0 * (node + 1),
                "network_sent_bytes": 1_000_000 * (tick + 2),
                "network_received_bytes": 2_000_000 * (tick + 2),
            }
            writer.system(sample(node, 0.5 * tick, memory_rss_bytes=100_000_000 * (node + 1) + tick, **cumulative))
    writer.write_summary(summarise(writer.path, CLOCK, state="succeeded", updates_scheduled=10, updates_applied=10, examples_per_epoch=100))
    writer.write_status("succeeded", exit_code=0)
    writer.close()
    return writer.path


def async_run(out: Path, **fields: Any) -> Path:
    """Make a finished async run of two nodes on torch, with a summary and without samples."""
    job = a_job(out, **{"name": "two", "backend": "torch", "mode": "async", "nodes": 2, "batch_size": 5, **fields})
    writer = open_run(job)
    for group in range(4):
        staleness = (0, 1, 1, 2) if group % 2 else (0, 0, 1, 7)
        record = StepRecord(
            4 * group, 4, 0, 0.25 * (group + 1), 0.2, 20, (0.5, 0.5, 0.5, 0.25), (0.05,), worker=group // 3, staleness=staleness
        )
        writer.step(record)
    writer.evaluation(EvalRecord(16, 0.8, 1.9, 0.1, "test", 360, 0.7, {"accuracy": 0.8}, 16))
    writer.write_summary(summarise(writer.path, CLOCK, state="succeeded", updates_scheduled=17, updates_applied=16))
    writer.write_status("succeeded", exit_code=0)
    writer.close()
    return writer.path


def summary_of(path: Path) -> dict[str, Any]:
    summary = RunReader(path).summary()
    assert summary is not None
    return summary
