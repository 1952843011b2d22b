"""Truncation of a run's records to a checkpoint, and figures over segments of a run."""

import json

import pytest
from run_samples import CLOCK, sample, sync_run

from crosstrain.records.node_usage import per_node
from crosstrain.records.store.jsonl import DamagedRunError
from crosstrain.records.store.run_directory import RunReader, RunWriter, cut_records
from crosstrain.records.store.schema import EventRecord
from crosstrain.records.time_shares import resumed_seconds


def test_later_records_are_removed_and_the_rest_is_kept(tmp_path):
    path = sync_run(tmp_path)
    before = (path / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (path / "calibration.json").write_text("{}")
    cut_records(path, 4, 0.7)
    reader = RunReader(path)
    assert reader.calibration() is None
    assert (path / "steps.jsonl").read_bytes() == b"".join(before[:2])
    assert [record.step for record in reader.evals()] == [4]
    assert all(record.time_seconds <= 0.7 for record in reader.system())
    assert reader.summary() is None
    assert not list(path.glob(".*"))


def test_event_of_the_checkpoint_is_kept(tmp_path):
    path = sync_run(tmp_path)
    writer = RunWriter.reopen(path)
    for step, seconds in ((2, 0.8), (4, 0.9), (6, 1.2)):
        writer.event(EventRecord("checkpoint_saved", seconds, {"step": step}))
    writer.cut(4, 0.7)
    writer.event(EventRecord("run_resumed", 0.7, {}))
    writer.close()
    assert [(record.event, record.detail.get("step")) for record in RunReader(path).events()][-3:] == [
        ("checkpoint_saved", 2),
        ("checkpoint_saved", 4),
        ("run_resumed", None),
    ]


def test_truncated_last_line_is_removed_and_damage_named(tmp_path):
    path = sync_run(tmp_path)
    with (path / "steps.jsonl").open("ab") as file:
        file.write(b'{"schema":1,"st')
    cut_records(path, 100, 100.0)
    assert len(list(RunReader(path).steps())) == 5
    lines = (path / "steps.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = b"nonsense\n"
    (path / "steps.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(DamagedRunError, match="line 2"):
        cut_records(path, 4, 0.7)
    assert (path / "steps.jsonl").read_bytes() == b"".join(lines)
    assert not list(path.glob(".steps*"))


def test_reset_counters_are_added_up():
    """Two segments of a second: 4 CPU seconds, then 3 after a counter that began at 7."""
    first = [sample(0, seconds, cpu_seconds=2.0 + 4.0 * seconds) for seconds in (-0.5, 0.0, 0.5, 1.0)]
    second = [sample(0, 1.0 + seconds, cpu_seconds=7.0 + 3.0 * seconds) for seconds in (-0.5, 0.0, 0.5, 1.0)]
    (node,) = per_node([*first, *second], 1, CLOCK, [1.0])
    assert node["cpu_seconds"] == pytest.approx(7.0)
    assert node["cpu_cores_used"]["mean"] == pytest.approx(3.5)


def test_undone_segment_is_no_border(tmp_path):
    path = sync_run(tmp_path)
    job = json.loads((path / "job.json").read_text())
    assert resumed_seconds(job) == []
    segments = [{"run_seconds": seconds} for seconds in (0.0, 5.0, 9.0, 7.0)]
    assert resumed_seconds({**job, "segments": segments}) == [5.0, 7.0]
