"""Run directories as the driver writes them, with known figures; for tests of reports."""

import math

from crosstrain.core.job import Job
from crosstrain.records.store.run_directory import RunWriter
from crosstrain.records.store.schema import Clock, EvalRecord, EventRecord, StepRecord, SystemRecord
from crosstrain.records.summary import summarise

GROUP = 4
STEP_SECONDS = 0.01
EVAL_SECONDS = 0.5
ENVIRONMENT = {
    "hostname": "host-a",
    "cpu_model": "A <b>processor</b>",
    "cores_available": 2.0,
    "memory_total_bytes": 8_000_000_000,
    "memory_limit_bytes": None,
    "operating_system": "Linux",
    "kernel": "6.1",
    "python": "3.11.7",
    "packages": {"torch": "2.5.0", "tensorflow": None},
    "interfaces": {},
    "gpus": None,
}
SHARES = {
    "method": "calibration",
    "overlap_fraction": 0.25,
    "run": {"train_seconds": 2.0, "eval_seconds": 1.0, "checkpoint_seconds": 0.25, "other_seconds": 0.25},
    "nodes": [
        {
            "node": node,
            "step_seconds": 0.01,
            "data_seconds": 0.001,
            "compute_seconds": 0.005,
            "peers_seconds": 0.001,
            "communicate_seconds": 0.003,
            "spread": 0.05,
        }
        for node in range(2)
    ],
    "workers": [],
    "native": {},
}


def loss_at(step):
    return 2.0 * math.exp(-step / 80) + 0.1 * math.sin(step)


def make_run(
    out, name, *, steps=200, bad=(), state="succeeded", summary=True, calibrated=False, gpus=False, rate=lambda _step: 0.05, **fields
):
    """A run of two nodes: groups of 4 updates of 10 ms and 20 examples each.

    After each half is an evaluation of 0.5 s, and each half second a sample. Updates in `bad` have a loss that is NaN; `rate` gives the
    learning rate of each.
    """
    job = Job.model_validate(
        {"backend": "torch", "out": out, "name": name, "nodes": 2, "batch_size": 10, "until": "accuracy>=0.95", **fields}
    )
    writer = RunWriter.create(job)
    command = ["trainer", "run", "--backend", "torch", "--name", name]
    described = {**job.model_dump(mode="json"), "global_batch_size_resolved": 20, "command": command}
    writer.write_job({**described, "segments": [{"started_at": "2026-05-01T10:00:00.000+00:00", "command": command, "run_seconds": 0.0}]})
    writer.write_env([ENVIRONMENT, ENVIRONMENT])
    writer.event(EventRecord("run_started", 0.0))
    clock = 0.0
    for first in range(0, steps, GROUP):
        clock += GROUP * STEP_SECONDS
        losses = tuple(math.nan if step in bad else loss_at(step) for step in range(first, first + GROUP))
        worker = (first // GROUP) % 2 if job.mode == "async" else None
        staleness = (1,) * GROUP if job.mode == "async" else None
        rates = tuple(rate(step) for step in range(first, first + GROUP))
        writer.step(StepRecord(first, GROUP, 0, clock, GROUP * STEP_SECONDS, GROUP * 20, losses, rates, None, None, worker, staleness))
        done = first + GROUP
        if done in (steps // 2, steps):
            clock += EVAL_SECONDS
            writer.evaluation(
                EvalRecord(
                    done, done / 100, clock, EVAL_SECONDS, "test", 360, 1 - done / (2 * steps), {"accuracy": 0.4 + done / (2 * steps)}, done
                )
            )
            writer.event(EventRecord("epoch_ended", clock, {"epoch": done * 2 // steps}))
    for tick in range(-1, int(clock / 0.5) + 2):
        for node in range(2):
            writer.system(_sample(node, 0.5 * tick, gpus))
    if state == "succeeded":
        writer.event(EventRecord("run_ended", clock))
    else:
        writer.event(EventRecord("run_failed", clock, {"cause": "worker-1 was killed by signal 9"}))
    if summary:
        spent = Clock(3.0, clock, clock - 2 * EVAL_SECONDS, 2 * EVAL_SECONDS, 0.0, clock + 4, (clock - 1.0,) * 2)
        figures = summarise(writer.path, spent, state=state, updates_scheduled=steps, updates_applied=steps, examples_per_epoch=1000)
        writer.write_summary({**figures, "time_shares": SHARES if calibrated else None})
    writer.write_status(state, cause=None if state == "succeeded" else "worker-1 was killed by signal 9", exit_code=0)
    writer.close()
    return writer.path


def _sample(node, seconds, gpus):
    ticks = round(seconds / 0.5) + 1
    return SystemRecord(
        node=node,
        time_seconds=seconds,
        interval_seconds=0.5,
        cpu_seconds=ticks * 0.5 * (node + 1),
        cpu_cores_used=1.0 + node,
        cpu_fraction=0.5,
        cores_available=2.0,
        memory_rss_bytes=300_000_000 + 1000 * ticks,
        memory_pss_bytes=None,
        network_source="interface",
        network_sent_bytes=500_000 * ticks * (node + 1),
        network_received_bytes=250_000 * ticks,
        interfaces=None,
        disk_read_bytes=0,
        disk_written_bytes=0,
        gpus=({"name": "A GPU", "utilization": 0.25, "memory_bytes": 1, "power_watts": 1.0},) if gpus else None,
        monitor_cpu_seconds=0.01,
    )
