"""Shares of the time of a step, against cases worked out by hand."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from run_samples import CLOCK, async_run, summary_of, sync_run

from crosstrain.records.store.run_directory import RunReader, RunWriter
from crosstrain.records.store.schema import StepRecord
from crosstrain.records.summary import summarise
from crosstrain.records.time_shares import COMPONENTS, StepTimes, time_shares


def calibration(*workers, **more):
    """Each worker is (node, data, compute, communicate)."""
    names = ("node", "data_seconds", "compute_seconds", "communicate_seconds")
    return {"workers": [{"worker": i, **dict(zip(names, worker, strict=True)), "spread": 0.1} for i, worker in enumerate(workers)], **more}


def times(*groups):
    """Each group is (worker, updates, seconds)."""
    step_times = StepTimes()
    for worker, count, seconds in groups:
        step_times.add(StepRecord(0, count, 0, 0.0, seconds, count, (1.0,) * count, (0.1,), worker=worker))
    return step_times


def parts(shares, index=0, level="workers"):
    return [shares[level][index][name] for name in COMPONENTS]


def sync(calibrated, step):
    return time_shares(calibrated, "sync", times((None, 4, 99.0), (None, 10, 10 * step)), CLOCK)


def test_fast_worker_waits_for_the_slow_one():
    shares = sync(calibration((0, 1.0, 2.0, 5.0), (1, 1.0, 6.0, 3.0)), 10.0)
    assert parts(shares, 0) == [1.0, 2.0, 4.0, 3.0]
    assert parts(shares, 1) == [1.0, 6.0, 0.0, 3.0]
    assert [worker["step_seconds"] for worker in shares["workers"]] == [10.0, 10.0]
    assert shares["overlap_fraction"] == 0.25  # 4 seconds alone, of which 3 are visible
    assert shares["run"] == pytest.approx({**RUN, "train_seconds": 1.6, "eval_seconds": 0.3, "other_seconds": 0.1})


@given(st.floats(0, 5), st.floats(0.01, 5), st.floats(0.01, 5), st.sampled_from(["sync", "async"]))
def test_data_time_is_at_most_the_measured_wait(waited, first, second, mode):
    groups = times(*((worker, 10, 200.0) for worker in ((None,) if mode == "sync" else (0, 1)) for _ in range(2)))
    worker = None if mode == "sync" else 0
    groups.add(StepRecord(0, 10, 0, 0.0, 200.0, 10, (1.0,) * 10, (0.1,), data_wait_seconds=waited * 10, worker=worker))
    known = groups.waits()["data_wait_seconds"]
    shares = time_shares(calibration((0, first, 2.0, 5.0), (1, second, 2.0, 5.0)), mode, groups, CLOCK)
    data = [worker["data_seconds"] for worker in shares["workers"]]
    calibrated, taken = (first, data[0]) if mode == "sync" else ((first + second) / 2, sum(data) / 2)
    assert taken == pytest.approx(min(known, calibrated))
    assert data[0] / data[1] == pytest.approx(first / second) if known else data == [0.0, 0.0]


def test_contradicted_compute_time_uses_half_the_batch():
    """Others used the second core in its calibration; a slow node is slow in its steps too."""
    sizes = {"batch_size": 16, "half_batch_size": 8}
    workers = calibration((0, 1.0, 2.0, 5.0), (1, 1.0, 50.0, 3.0), **sizes)
    for worker, half in zip(workers["workers"], (1.2, 1.5), strict=True):
        worker["half_compute_seconds"] = half
    shares = sync(workers, 10.0)
    assert parts(shares, 0) == [1.0, 2.0, 1.0, 6.0]
    assert parts(shares, 1) == [1.0, 3.0, 0.0, 6.0]
    assert parts(sync(workers, 60.0), 1) == [1.0, 50.0, 0.0, 9.0]
    workers["workers"][1]["half_compute_seconds"] = 25.0
    assert parts(sync(workers, 10.0), 1) == pytest.approx([10 / 51, 500 / 51, 0.0, 0.0])


def test_overlapped_exchange_takes_nothing():
    shares = sync(calibration((0, 1.0, 6.0, 5.0), (1, 1.0, 9.0, 5.0)), 10.0)
    assert parts(shares, 0) == [1.0, 6.0, 3.0, 0.0]
    assert shares["overlap_fraction"] == 1.0


def test_exchange_slower_than_alone_is_not_overlapped():
    assert sync(calibration((0, 1.0, 1.0, 3.0), (1, 1.0, 1.0, 3.0)), 10.0)["overlap_fraction"] == 0.0


def test_compute_beyond_the_step_is_scaled_down():
    shares = sync(calibration((0, 5.0, 15.0, 1.0), (1, 1.0, 3.0, 1.0)), 10.0)
    assert parts(shares, 0) == [2.5, 7.5, 0.0, 0.0]
    assert parts(shares, 1) == [1.0, 3.0, 6.0, 0.0]


def test_rest_of_a_single_worker_s_step_is_compute():
    shares = sync(calibration((0, 1.0, 6.0, None)), 10.0)
    assert parts(shares) == [1.0, 9.0, 0.0, 0.0]
    assert shares["overlap_fraction"] is None


SECONDS = st.floats(0.0, 1e3)


@given(
    own_times=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=4),
    step=st.floats(1e-6, 1e3),
    mode=st.sampled_from(["sync", "async"]),
)
@example(own_times=[(0.0, 0.0), (3.0, 22.0)], step=6.5, mode="sync")
def test_parts_are_positive_and_sum_to_the_step(own_times, step, mode):
    """Also after scaling and rounding, as readers refuse a summary with negative parts."""
    workers = [(node, data, compute, 0.1) for node, (data, compute) in enumerate(own_times)]
    made = times(*[(None if mode == "sync" else worker, 7, 7 * step) for worker in range(1 if mode == "sync" else len(own_times))])
    shares = time_shares(calibration(*workers), mode, made, CLOCK)
    for row in (*shares["workers"], *shares["nodes"]):
        assert min(row[name] for name in COMPONENTS) >= 0.0
        assert sum(row[name] for name in COMPONENTS) == pytest.approx(row["step_seconds"])


def test_async_workers_have_separate_steps_and_do_not_wait():
    step_times = times((0, 1, 50.0), (1, 1, 50.0), (0, 30, 120.0), (1, 10, 100.0))
    shares = time_shares(calibration((0, 1.0, 2.0, 0.5), (0, 1.0, 3.0, 0.5)), "async", step_times, CLOCK)
    assert [worker["step_seconds"] for worker in shares["workers"]] == [4.0, 10.0]
    assert parts(shares, 0) == [1.0, 2.0, 0.0, 1.0]
    assert parts(shares, 1) == [1.0, 3.0, 0.0, 6.0]
    assert shares["overlap_fraction"] is None
    # A node's figures are means over its workers' updates, 31 and 11.
    assert shares["nodes"][0]["step_seconds"] == pytest.approx((31 * 4.0 + 11 * 10.0) / 42)
    assert parts(shares, 0, "nodes") == pytest.approx([1.0, (62 + 33) / 42, 0.0, (31 + 66) / 42])


def test_worker_without_updates_has_no_shares():
    shares = time_shares(calibration((0, 1.0, 2.0, 0.5), (1, 1.0, 3.0, 0.5)), "async", times((0, 5, 20.0)), CLOCK)
    assert parts(shares, 0) == [1.0, 2.0, 0.0, 1.0]
    assert parts(shares, 1) == parts(shares, 1, "nodes") == [None] * 4
    assert shares["workers"][1]["step_seconds"] is None


def test_native_measurements_are_added():
    step_times = StepTimes()
    for waited in (1.0, None, 0.25):
        step_times.add(StepRecord(0, 5, 0, 0.0, 20.0, 5, (1.0,), (0.1,), data_wait_seconds=waited, worker=0))
    shares = time_shares(calibration((0, 1.0, 2.0, 0.5), native={"ps_busy_fraction": 0.5}), "async", step_times, CLOCK)
    assert shares["native"] == {"data_wait_seconds": pytest.approx(1.25 / 15), "network_wait_seconds": None, "ps_busy_fraction": 0.5}


@pytest.mark.parametrize(("make", "step"), [(sync_run, 0.15), (async_run, 0.05)])
def test_calibrated_run_has_shares_in_its_summary(tmp_path, make, step):
    path = make(tmp_path)
    assert summary_of(path)["time_shares"] is None
    writer = RunWriter.reopen(path)
    sizes = {"payload_bytes": 4 * 650, "batch_size": 16, "half_batch_size": 8}
    writer.write_calibration(calibration((0, 0.01, 0.02, 0.01), (1, 0.01, 0.03, 0.01), **sizes))
    writer.close()
    shares = summarise(RunReader(path), CLOCK, state="succeeded", updates_scheduled=10, updates_applied=10)["time_shares"]
    assert shares["workers"][0]["step_seconds"] == pytest.approx(step)
    for worker in shares["workers"]:
        assert sum(worker[name] for name in COMPONENTS) == pytest.approx(worker["step_seconds"])


# A run that was resumed ------------------------------------------------------------------------------------------------

RUN = {"checkpoint_seconds": 0.0, "translate_seconds": 0.0, "profile_seconds": 0.0}
EARLIER = {"run_seconds": 0.75, "train_seconds": 0.5, "eval_seconds": 0.25, "checkpoint_seconds": 0.0}


def resume_summary(path, first_step):
    """Return the summary of a run whose last segment began at this step and was calibrated."""
    job = json.loads((path / "job.json").read_text())
    segments = [{"run_seconds": 0.0, "step": 0}, {"run_seconds": 0.75, "step": first_step}]
    (path / "job.json").write_text(json.dumps({**job, "segments": segments}))
    writer = RunWriter.reopen(path)
    sizes = {"payload_bytes": 4 * 650, "batch_size": 16, "half_batch_size": 8}
    writer.write_calibration(calibration((0, 0.01, 0.02, 0.01), (1, 0.01, 0.03, 0.01), **sizes))
    writer.close()
    clock = replace(CLOCK, earlier=EARLIER)
    return summarise(RunReader(path), clock, state="succeeded", updates_scheduled=10, updates_applied=10)


@given(groups=st.lists(st.tuples(st.integers(1, 9), st.floats(0.01, 10.0)), min_size=2, max_size=8), data=st.data())
def test_steps_and_clock_are_of_the_calibrated_segment(groups, data):
    """Earlier segments have no effect, however fast or slow they were."""
    turn = data.draw(st.integers(1, len(groups) - 1))
    before = sum(count for count, _ in groups[:turn])
    with tempfile.TemporaryDirectory() as folder:
        path = sync_run(Path(folder))
        (path / "steps.jsonl").unlink()
        writer, step = RunWriter.reopen(path), 0
        for count, seconds in groups:
            writer.step(StepRecord(step, count, 0, 1.0, seconds, count, (1.0,) * count, (0.05,)))
            step += count
        writer.close()
        shares = resume_summary(path, before)["time_shares"]
    counted = groups[turn + 1 :] or groups[turn:]
    expected = sum(seconds for _, seconds in counted) / sum(count for count, _ in counted)
    assert [worker["step_seconds"] for worker in shares["workers"]] == pytest.approx([expected] * 2)
    assert [worker["updates"] for worker in shares["workers"]] == [step - before] * 2
    assert shares["part_began_seconds"] == 0.75
    assert shares["run"] == pytest.approx({**RUN, "train_seconds": 1.1, "eval_seconds": 0.05, "other_seconds": 0.1})


def test_async_worker_counts_updates_of_the_segment(tmp_path):
    """Three of four groups were the first worker's, the last is the second's."""
    summary = resume_summary(async_run(tmp_path), 8)
    assert summary["updates_by_worker"] == [12, 4]
    assert [worker["updates"] for worker in summary["time_shares"]["workers"]] == [4, 4]
