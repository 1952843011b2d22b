"""Curves of a run as arrays: equal to the records, also damaged ones; thinned and smoothed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import EVAL_SECONDS, make_run
from run_samples import RESUMED, a_job, async_run, open_run, resumed_run, sample, sync_run

from crosstrain.records.node_usage import rate_between
from crosstrain.records.store.jsonl import DamagedRunError
from crosstrain.records.store.run_directory import RunReader
from crosstrain.records.store.schema import EvalRecord, EventRecord, StepRecord
from crosstrain.report.pages.export import curves
from crosstrain.report.runs.run import Run
from crosstrain.report.runs.series import pace, pauses, running_median, smoothed, thinned, training_clock
from crosstrain.report.runs.series_arrays import read_steps, read_system


def test_arrays_hold_the_records(tmp_path):
    path = sync_run(tmp_path)
    series = read_steps(path)
    records = list(RunReader(path).steps())
    assert series.step.tolist() == list(range(10))
    assert series.loss.tolist() == [loss for record in records for loss in record.losses]
    assert series.examples.tolist() == [10 * (step + 1) for step in range(10)]
    assert series.first.tolist() == [record.step for record in records]
    assert series.group_time_seconds.tolist() == [record.time_seconds for record in records]
    assert series.worker.tolist() == [-1] * 5
    last = records[-1]
    assert series.time_seconds[-2:] == pytest.approx([last.time_seconds - last.seconds / 2, last.time_seconds])


def test_examples_of_an_uneven_group_are_all_counted(tmp_path):
    writer = open_run(a_job(tmp_path, name="uneven"))
    writer.step(StepRecord(0, 3, 0, 1.0, 0.3, 25, (1.0, 1.0, 1.0), (0.1,)))
    writer.step(StepRecord(3, 2, 0, 2.0, 0.3, 7, (1.0, 1.0), (0.1,)))
    writer.close()
    series = read_steps(writer.path)
    assert series.examples.tolist() == [8, 16, 25, 28, 32]
    assert series.group_examples.tolist() == [25, 7]


def test_async_groups_are_sorted(tmp_path):
    writer = open_run(a_job(tmp_path, name="late", mode="async"))
    writer.step(StepRecord(2, 2, 0, 1.0, 0.5, 20, (3.0, 4.0), (0.1,), worker=1, staleness=(0, 0)))
    writer.step(StepRecord(0, 2, 0, 1.2, 1.0, 20, (1.0, 2.0), (0.1,), worker=0, staleness=(0, 0)))
    writer.close()
    series = read_steps(writer.path)
    assert series.step.tolist() == [0, 1, 2, 3]
    assert series.loss.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert series.time_seconds == pytest.approx([0.7, 1.2, 0.75, 1.0])
    assert series.in_time().tolist() == [0, 2, 3, 1]
    assert series.worker.tolist() == [1, 0]
    assert read_steps(async_run(tmp_path)).worker.tolist() == [0, 0, 0, 1]


def test_non_finite_losses_are_separate(tmp_path):
    writer = open_run(a_job(tmp_path, name="blown"))
    writer.step(StepRecord(0, 4, 0, 1.0, 0.5, 40, (1.5, math.nan, math.inf, -math.inf), (0.1,)))
    writer.close()
    loss = read_steps(writer.path).loss
    assert loss[0] == 1.5
    assert np.isnan(loss[1])
    assert loss[2:].tolist() == [math.inf, -math.inf]


def test_run_without_records_has_empty_arrays(tmp_path):
    writer = open_run(a_job(tmp_path, name="none"))
    writer.close()
    assert len(read_steps(writer.path)) == 0
    assert read_system(writer.path) == []
    (writer.path / "steps.jsonl").unlink()
    assert len(read_steps(writer.path)) == 0


@pytest.mark.parametrize("pieces", [1 << 22, 700])
def test_truncated_last_line_is_skipped_and_damage_named(tmp_path, monkeypatch, pieces):
    """As the reader of whole records does, also where a file is read in pieces."""
    monkeypatch.setattr("crosstrain.report.runs.series_arrays._PIECE_BYTES", pieces)
    path = make_run(tmp_path, "torn", steps=40)
    file = path / "steps.jsonl"
    whole = file.read_bytes()
    assert len(read_steps(path)) == 40
    file.write_bytes(whole[:-20])
    assert len(read_steps(path)) == 36
    lines = whole.splitlines(keepends=True)
    for damaged, words in {
        lines[4][:30] + b"\n": "line 5: not a whole JSON record, and more lines follow",
        b"\n": "line 5: not a whole JSON record, and more lines follow",
        lines[4].replace(b'"schema":1', b'"schema":2'): "line 5: not a StepRecord that this release reads",
        lines[4].replace(b'"count":4', b'"count":5'): "line 5: not a StepRecord .*5 updates with 4 losses",
        lines[4].replace(b'"seconds":', b'"duration":'): "line 5: not a StepRecord .*`seconds`",
    }.items():
        file.write_bytes(b"".join([*lines[:4], damaged, *lines[5:]]))
        with pytest.raises(DamagedRunError, match=words):
            read_steps(path)


def test_rates_equal_the_records(tmp_path):
    writer = open_run(a_job(tmp_path, name="counted"))
    sent = [100, 400, 300, None, 900, 1000]
    records = [
        sample(0, seconds, network_sent_bytes=value, network_received_bytes=None, cpu_cores_used=None, gpus=None)
        for seconds, value in zip([-0.5, 0.0, 0.6, 1.0, 1.5, 1.5], sent, strict=True)
    ]
    for record in records:
        writer.system(record)
    writer.system(sample(2, 0.5, gpus=({"utilization": 0.5}, {"utilization": 0.25}, {"utilization": None})))
    writer.close()
    first, last = read_system(writer.path)
    expected = [rate_between(before, record, "network_sent_bytes") for before, record in zip([None, *records], records, strict=False)]
    assert first.sent_bytes_per_second == pytest.approx([np.nan if rate is None else rate for rate in expected], nan_ok=True)
    assert np.isfinite(first.sent_bytes_per_second).tolist() == [False, True, False, False, False, False]
    assert np.isnan(first.received_bytes_per_second).all()
    assert np.isnan(first.cpu_cores_used).all()
    assert (first.node, first.cores_available, first.network_source) == (0, 2.0, "interface")
    assert (last.node, last.gpu_utilization.tolist()) == (2, [0.375])


def test_delayed_sample_makes_no_peak(tmp_path):
    """The counter rises by 10 a second; the third sample arrives with the fourth."""
    writer = open_run(a_job(tmp_path, name="held-up"))
    for seconds, sent in ((0.0, 0), (0.5, 5), (1.45, 14), (1.5, 20), (2.0, 20), (2.05, 21)):
        interval = 0.05 if seconds == 2.05 else 0.5  # the last one is early on purpose
        writer.system(sample(0, seconds, network_sent_bytes=sent, interval_seconds=interval))
    writer.close()
    (node,) = read_system(writer.path)
    assert node.sent_bytes_per_second[1:] == pytest.approx([10, 9 / 0.95, 15, 0, 20])


@pytest.mark.parametrize("marked", [True, False])
def test_resumed_run_continues_its_curves(tmp_path, marked):
    """The second initialisation, at 1 core and 1 MB/s, overlaps training at 0.2 of both."""
    known, new = read_system(resumed_run(tmp_path, marked))
    for node, began in ((known, 0.0), (new, RESUMED)):
        assert (np.diff(node.time_seconds) > 0).all()
        training = node.time_seconds > began
        assert node.cpu_cores_used[training] == pytest.approx(0.2)
        assert node.sent_bytes_per_second[training] == pytest.approx(0.2e6, rel=0.05)
    assert (known.cpu_cores_used[known.time_seconds < 0] == 1.0).all()
    assert new.time_seconds[0] > RESUMED


def test_node_with_only_initialisation_is_skipped(tmp_path):
    """It joined in the resume, and the run ended before it trained."""
    writer = open_run(a_job(tmp_path, name="ended-early"))
    writer.system(sample(0, 9.0, part_began_seconds=0.0))
    for node in range(2):
        writer.system(sample(node, 8.0, part_began_seconds=RESUMED))
    writer.close()
    assert [(node.node, node.time_seconds.tolist()) for node in read_system(writer.path)] == [(0, [9.0])]


def test_rate_does_not_span_segments(tmp_path):
    writer = open_run(a_job(tmp_path, name="new-monitor"))
    for seconds, sent, began in ((9.0, 0, 0.0), (9.5, 100, 0.0), (9.99, 5000, RESUMED), (10.5, 5051, RESUMED), (11.0, 5101, RESUMED)):
        writer.system(sample(0, seconds, network_sent_bytes=sent, part_began_seconds=began))
    writer.close()
    (node,) = read_system(writer.path)
    assert node.time_seconds.tolist() == [9.0, 9.5, 10.5, 11.0]
    assert node.sent_bytes_per_second[1:] == pytest.approx([200, 100, 100])


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf)), max_size=400), st.integers(4, 60))
def test_thinning_keeps_every_peak_and_gap(values, points):
    array = np.array(values, np.float64)
    picked = thinned(array, points)
    assert picked.tolist() == sorted(set(picked.tolist()))
    assert len(picked) <= (len(values) if len(values) <= points else 1.5 * points + 5)
    kept = array[picked]
    finite = array[np.isfinite(array)]
    if len(finite):
        assert (np.nanmin(kept[np.isfinite(kept)]), np.nanmax(kept[np.isfinite(kept)])) == (finite.min(), finite.max())
    assert np.isfinite(kept).all() == np.isfinite(array).all()
    if values:
        assert (picked[0], picked[-1]) == (0, len(values) - 1)


def test_thinning_a_long_curve_keeps_a_spike():
    values = np.sin(np.arange(1_000_000) / 1e5)
    values[654_321] = 50.0
    picked = thinned(values, 2000)
    assert len(picked) <= 2002
    assert 654_321 in picked


@given(st.lists(st.one_of(st.floats(-1e3, 1e3), st.just(math.nan)), max_size=60), st.floats(0, 0.99))
def test_smoothing_is_the_weighted_mean_of_the_past(values, weight):
    expected = []
    past: list[float] = []
    for value in values:
        if math.isnan(value):
            expected.append(math.nan)
            continue
        past.append(value)
        weights = [weight ** (len(past) - 1 - index) for index in range(len(past))]
        expected.append(sum(w * v for w, v in zip(weights, past, strict=True)) / sum(weights))
    assert smoothed(np.array(values, np.float64), weight) == pytest.approx(expected, nan_ok=True, rel=1e-6, abs=1e-6)


def test_smoothing_refuses_a_weight_of_1():
    with pytest.raises(ValueError, match=r"got 1\.0; allowed: from 0 to below 1"):
        smoothed(np.ones(3), 1.0)


def test_training_clock_stops_in_pauses():
    stops = [(1.0, 2.0), (1.5, 2.5), (4.0, 4.0), (6.0, 7.0)]
    seconds = np.array([0.5, 1.0, 1.2, 2.2, 3.0, 6.5, 8.0])
    assert training_clock(seconds, stops) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.5, 4.5, 5.5])


def test_pauses_are_evaluations_and_checkpoint_copies():
    evaluation = EvalRecord(10, 1.0, 5.0, 0.5, "test", 360, 0.5, {"accuracy": 0.9}, 10)
    saved = EventRecord("checkpoint_saved", 3.0, {"seconds": 0.75, "stall_seconds": 0.25})
    assert pauses([evaluation], [saved, EventRecord("run_ended", 6.0)]) == [(2.0, 2.25), (4.5, 5.0)]


def test_speed_excludes_evaluations_and_adds_up(tmp_path):
    path = make_run(tmp_path, "steady", steps=400)
    reader = RunReader(path)
    speed = pace(read_steps(path), pauses(reader.evals(), reader.events()), windows=20)
    assert len(speed.steps) == 20
    assert speed.steps_per_second == pytest.approx(np.full(20, 100.0))
    assert speed.examples_per_second == pytest.approx(np.full(20, 2000.0))
    assert speed.steps[-1] == 400
    assert speed.seconds[-1] == pytest.approx(4.0 + EVAL_SECONDS)


def profiled_in_between(tmp_path):
    """100 updates and 2,000 examples a second; the traced third group took 3 s for 10 updates."""
    writer = open_run(a_job(tmp_path, name="profiled"))
    for group in range(20):
        now, profiled = 0.1 * (group + 1) + 2.9 * (group >= 2), 3.0 if group == 2 else None
        writer.step(StepRecord(10 * group, 10, 0, now, 0.1, 200, (1.0,) * 10, (0.1,), profiled_seconds=profiled))
    writer.close()
    return writer.path


def test_speed_excludes_profiled_updates(tmp_path):
    series = read_steps(profiled_in_between(tmp_path))
    assert series.profile_pauses() == [(pytest.approx(0.2), pytest.approx(3.2))]
    assert np.flatnonzero(series.profiled).tolist() == list(range(20, 30))
    speed = pace(series, [], windows=19)
    assert speed.steps_per_second == pytest.approx(np.full(19, 100.0))
    assert speed.examples_per_second == pytest.approx(np.full(19, 2000.0))
    assert (speed.steps[-1], speed.seconds[-1]) == (200, pytest.approx(4.9))


@pytest.mark.parametrize("over", ["steps", "examples", "seconds"])
def test_speed_curves_exclude_profiled_updates(tmp_path, over):
    speed_curves = curves([Run(profiled_in_between(tmp_path))], "examples_per_second", over, points=50)
    known = speed_curves.raw["profiled"][speed_curves.inside["profiled"]]
    assert known == pytest.approx(np.full(len(known), 2000.0))
    assert len(known) > 15


def test_speed_of_async_workers_adds_up(tmp_path):
    """Two workers with groups of 10 updates a second, half a second apart: 20 updates a second."""
    writer = open_run(a_job(tmp_path, name="two-workers", mode="async"))
    for group in range(20):
        writer.step(StepRecord(10 * group, 10, 0, 1.0 + 0.5 * group, 1.0, 100, (1.0,) * 10, (0.1,), worker=group % 2, staleness=(1,) * 10))
    writer.close()
    speed = pace(read_steps(writer.path), [], windows=10)
    assert speed.steps_per_second[1:-1] == pytest.approx(np.full(8, 20.0), rel=0.05)
    assert speed.steps[-1] == 200


def test_run_without_updates_has_no_speed(tmp_path):
    writer = open_run(a_job(tmp_path, name="nothing"))
    writer.close()
    assert len(pace(read_steps(writer.path), []).steps) == 0


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), max_size=40), st.integers(0, 5))
def test_running_median_is_the_median_of_neighbours(values, half):
    medians = running_median(np.array(values, np.float64), 2 * half + 1)
    for place, value in enumerate(values):
        width = min(2 * half + 1, len(values))
        first = min(max(0, place - width // 2), len(values) - width)
        near = [neighbour for neighbour in values[first : first + width] if math.isfinite(neighbour)]
        assert medians[place] == pytest.approx(np.median(near)) if math.isfinite(value) else math.isnan(medians[place])
