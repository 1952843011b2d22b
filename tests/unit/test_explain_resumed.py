"""Verdicts on resumed runs: they cover the last segment, the only one calibrated."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from run_samples import CLOCK, a_job, open_run, sample

from crosstrain.records.store.run_directory import RunReader
from crosstrain.records.store.schema import EvalRecord, EventRecord, StepRecord
from crosstrain.records.summary import summarise
from crosstrain.report.analysis.diagnosis import diagnose
from crosstrain.report.analysis.diagnosis_text import headline, notes, page
from crosstrain.report.compare.caveats import changed_on_resume
from crosstrain.report.compare.run_tables import one_run, to_text
from crosstrain.report.pages.resource_charts import _clock
from crosstrain.report.runs.run import Run

TURN, END = 4.0, 10.0
FIRST, SECOND = 40, 60
"""Updates of the two segments. In the first an update took a fifth of a second less 0.1, in the second 0.1 s."""

CLOCK_OF_10 = replace(
    CLOCK,
    run_seconds=END,
    train_seconds=9.5,
    eval_seconds=0.3,
    earlier={"run_seconds": TURN, "train_seconds": 3.9, "eval_seconds": 0.1, "checkpoint_seconds": 0.0},
)


def resumed_run(out, *, nodes=(2, 1), changed=None, calibrated=True, compute=0.09, mode=("sync", "sync")):
    """Write a run of 10 s that was resumed after 4 s; its first segment had steps of 1000 s.

    A node sends a megabyte per second and uses 0.5 cores in the first segment, ten times as much and 0.9 cores in the second.
    """
    job = a_job(out, name="resumed", nodes=nodes[1], batch_size=5, mode=mode[1])
    writer = open_run(job)
    changed = {"nodes": list(nodes)} if changed is None and nodes[0] != nodes[1] else changed or {}
    segments = [{"run_seconds": 0.0, "step": 0}, {"run_seconds": TURN, "step": FIRST, "changed": changed}]
    writer.write_job({**job.model_dump(mode="json"), "segments": segments, "cluster": {"addresses": ["10.77.0.1", "10.77.0.2"]}})

    def group(step, count, time_seconds, seconds, workers):
        for worker in [None] if workers is None else range(workers):
            number = step + (worker or 0)
            writer.step(StepRecord(number, count, 0, time_seconds, seconds, 5 * count, (1.0,) * count, (0.1,), worker=worker))

    group(0, FIRST, TURN - 0.5, 1000.0 * FIRST, None if mode[0] == "sync" else nodes[0])
    writer.evaluation(EvalRecord(FIRST, 1.0, TURN - 0.1, 0.1, "test", 360, 0.9, {"accuracy": 0.5}, FIRST))
    for number in range(6):
        group(FIRST + 10 * number, 10, TURN + 0.9 * (number + 1), 0.9, None if mode[1] == "sync" else nodes[1])
    writer.evaluation(EvalRecord(FIRST + SECOND, 2.0, END - 0.1, 0.2, "test", 360, 0.6, {"accuracy": 0.9}, FIRST + SECOND))
    for seconds in (1.0, 9.0):
        writer.event(EventRecord("checkpoint_saved", seconds, {"step": 1, "stall_seconds": 0.01, "bytes": 1}))
    for began, until, count, rate, cores in ((0.0, TURN, nodes[0], 1e6, 0.5), (TURN, END, nodes[1], 1e7, 0.9)):
        for tick in range(-1, 2 * int(until - began) + 1):
            for node in range(count):
                counters = {"cpu_seconds": 9 + cores * tick / 2, "network_sent_bytes": round(1e8 + rate * tick / 2)}
                counters |= {"cpu_cores_used": cores, "cpu_fraction": cores / 2, "network_received_bytes": 0, "part_began_seconds": began}
                writer.system(sample(node, began + tick / 2, **counters))
    if calibrated:
        figures = {"data_seconds": 0.0, "compute_seconds": compute, "half_compute_seconds": compute / 2, "spread": 0.01}
        is_single = nodes[1] == 1
        exchange = (
            {"communicate_seconds": None, "message_seconds": None} if is_single else {"communicate_seconds": 0.05, "message_seconds": 0.01}
        )
        workers = [{"worker": node, "node": node, **figures, **exchange} for node in range(nodes[1])]
        sizes = {"seconds": 1.0, "payload_bytes": 1000, "batch_size": 5, "half_batch_size": 2}
        writer.write_calibration({**sizes, "workers": workers, "native": {}})
    made = FIRST + SECOND
    writer.write_summary(summarise(writer.path, CLOCK_OF_10, state="succeeded", updates_scheduled=made, updates_applied=made))
    writer.write_status("succeeded", exit_code=0)
    writer.close()
    return writer.path


@pytest.mark.parametrize("nodes", [(2, 1), (1, 2), (2, 2)])
def test_verdict_follows_calibrated_segment(tmp_path, nodes):
    """With the first segment's steps of 1000 s, all time would be exchange."""
    explanation = diagnose(Run(resumed_run(tmp_path, nodes=nodes)))
    assert (explanation.verdict, explanation.slow_node) == ("compute", None)
    assert explanation.step_fractions["compute"] == pytest.approx(1.0)
    assert explanation.run_fractions == pytest.approx(
        {"compute": 5.6 / 6, "data": 0.0, "peers": 0.0, "network": 0.0, "evaluating": 0.2 / 6, "saving": 0.0, "other": 0.2 / 6}
        | {"idle": 0.0, "translating": 0.0, "profiling": 0.0}
    )
    assert (explanation.evidence.evaluations, explanation.evidence.saved) == (1, 1)


@pytest.mark.parametrize("nodes", [(2, 1), (1, 2), (2, 2)])
def test_node_and_link_figures_are_of_last_segment(tmp_path, nodes):
    explanation = diagnose(Run(resumed_run(tmp_path, nodes=nodes)))
    assert [view.cpu_cores_used for view in explanation.nodes] == pytest.approx([0.9] * nodes[1])
    assert [view.sent_bytes_per_second for view in explanation.nodes] == pytest.approx([1e7] * nodes[1])
    assert [view.link.sent_bytes_per_second for view in explanation.nodes] == pytest.approx([6e7 / 5.6] * nodes[1])
    text = " ".join(to_text(page(explanation, [])).split())
    assert "of the time since the run was resumed at 4.00 s: training 93%" in text
    assert "means over the run since it was resumed" in text
    assert explanation.to_json()["part_began_seconds"] == TURN


def test_async_segment_after_sync_one_has_no_idle_time_of_it(tmp_path):
    path = resumed_run(tmp_path, nodes=(2, 2), mode=("sync", "async"), changed={"mode": ["sync", "async"]})
    explanation = diagnose(Run(path))
    assert explanation.run_fractions["idle"] == pytest.approx(0.2 / 6)
    assert explanation.training_fraction == pytest.approx(5.6 / 6)
    summary = RunReader(path).summary()
    clock = _clock(summary)
    assert clock["train_seconds"] == pytest.approx(9.5 - 0.2)  # of 5.6 s the workers had steps for 5.4
    assert sum(clock.values()) == pytest.approx(END)


@pytest.mark.parametrize("calibrated", [True, False])
def test_changed_run_has_the_note_of_its_table(tmp_path, calibrated):
    path = resumed_run(tmp_path, calibrated=calibrated)
    explanation = diagnose(Run(path))
    beginning = "The run changed when it was resumed (nodes): "
    (note,) = [text for text in notes(explanation) if text.startswith(beginning)]
    table = " ".join(to_text(one_run(RunReader(path).summary(), RunReader(path).job())).split())
    assert beginning in table
    assert ("of its last part" in note) == calibrated
    assert note in table or calibrated
    assert changed_on_resume(explanation.evidence) == ["nodes"]


def test_unchanged_run_has_no_note(tmp_path):
    assert not [text for text in notes(diagnose(Run(resumed_run(tmp_path, nodes=(2, 2))))) if "resumed" in text]


def test_old_summary_of_changed_run_has_no_verdict(tmp_path):
    """As written by older releases; without a change, steps of all segments are equal."""
    for nodes, verdict in (((2, 1), "unknown"), ((2, 2), "compute")):
        path = resumed_run(tmp_path / str(nodes), nodes=nodes)
        summary = json.loads((path / "summary.json").read_text())
        del summary["time_shares"]["part_began_seconds"]
        (path / "summary.json").write_text(json.dumps(summary))
        explanation = diagnose(Run(path))
        assert explanation.verdict == verdict
        assert ("only its last part was calibrated" in headline(explanation)) == (verdict == "unknown")
