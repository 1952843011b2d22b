"""Segments of resource samples of resumed runs, as in summary, TensorBoard and MLflow."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from run_samples import CLOCK, RESUMED, a_job, resumed_run, resumed_samples, sample

from crosstrain.engine import progress as plain
from crosstrain.engine.progress import PlainProgress, QuietProgress
from crosstrain.engine.protocol.messages import Message, MessageParser
from crosstrain.engine.protocol.node_messages import Sample
from crosstrain.launch.driver.recorder import RunRecorder
from crosstrain.records.loggers.base import RunLogger, replay
from crosstrain.records.loggers.mlflow import NodeFigures
from crosstrain.records.node_usage import per_node, rate_between
from crosstrain.records.store.run_directory import RunReader
from crosstrain.records.time_shares import with_segments


def segments_of(samples, resumed):
    return [record.part_began_seconds for record in with_segments(samples, resumed)]


# Which segment ---------------------------------------------------------------------------------------------------------


def test_unmarked_samples_get_segments_by_order():
    marked, unmarked = resumed_samples(marked=True), resumed_samples(marked=False)
    assert {record.part_began_seconds for record in unmarked} == {None}
    assert list(with_segments(unmarked, [RESUMED])) == marked


def test_marked_segment_is_used_in_any_order():
    """Samples are further apart than the initialisation takes: time does not fall there."""
    samples = resumed_samples(marked=True, init=2.0, interval=6.0)
    times = [record.time_seconds for record in samples]
    assert times == sorted(times)
    assert list(with_segments(samples, [RESUMED])) == list(with_segments(samples, [])) == samples


def test_restarted_segment_counts_once():
    """The run was killed before saving again: the first try is initialisation only."""
    tried = [sample(0, seconds) for seconds in (7.0, 9.0)]
    samples = [sample(0, 9.5), *tried, *tried, sample(0, 11.0), *(sample(0, seconds) for seconds in (10.5, 11.5, 12.5))]
    assert segments_of(samples, [RESUMED, 12.0]) == [0.0, 10.0, 10.0, 10.0, 10.0, 10.0, 12.0, 12.0, 12.0]


def test_unmarked_samples_before_marked_ones_use_order():
    samples = [sample(0, 9.5), sample(0, 8.0), sample(0, 11.0), sample(0, 11.5, part_began_seconds=12.0), sample(0, 12.5)]
    assert segments_of(samples, [RESUMED, 12.0]) == [0.0, 10.0, 10.0, 12.0, 12.0]


def test_run_without_resume_has_one_segment():
    assert segments_of([sample(0, 1.0), sample(1, 0.5), sample(0, 2.0)], []) == [0.0] * 3


def test_sample_is_initialisation_until_its_segment_begins():
    assert [sample(0, seconds).initialising for seconds in (-0.5, 0.5)] == [True, False]
    assert [sample(0, seconds, part_began_seconds=3.0).initialising for seconds in (0.5, 3.0, 3.5)] == [True, True, False]


def test_rate_never_spans_two_segments():
    before, after = sample(0, 9.0, part_began_seconds=0.0), sample(0, 9.5, network_sent_bytes=2000, part_began_seconds=RESUMED)
    assert rate_between(before, after, "network_sent_bytes") is None
    assert rate_between(replace(before, part_began_seconds=RESUMED), after, "network_sent_bytes") == 2000


# The summary -----------------------------------------------------------------------------------------------------------


CLOCK_OF_20 = replace(CLOCK, run_seconds=20.0)


@pytest.mark.parametrize("marked", [True, False])
def test_node_new_since_a_resume_is_measured_from_there(marked):
    known, new = per_node(resumed_samples(marked), 2, CLOCK_OF_20, [RESUMED])
    assert known["cpu_seconds"] == pytest.approx(4.0, abs=0.15)
    assert new["cpu_seconds"] == pytest.approx(2.0, abs=0.1)
    assert [node["cpu_cores_used"] for node in (known, new)] == [{"mean": pytest.approx(0.2, abs=0.01), "max": 0.2}] * 2
    assert new["network_sent_bytes"] == pytest.approx(2e6, abs=1e5)
    assert (known["samples"], new["samples"]) == (41, 21)


def test_short_segment_is_measured_from_its_beginning():
    """Its samples are later than the first segment's last, and its counters higher."""
    first = [sample(0, seconds, cpu_seconds=value, part_began_seconds=0.0) for seconds, value in ((-0.01, 1.0), (6.0, 2.0))]
    second = [sample(0, seconds, cpu_seconds=value, part_began_seconds=RESUMED) for seconds, value in ((9.99, 5.0), (20.0, 7.0))]
    (node,) = per_node([*first, *second], 1, CLOCK_OF_20, [RESUMED])
    assert node["cpu_seconds"] == 1.0 + 2.0
    assert node["samples"] == 2


# Followers -------------------------------------------------------------------------------------------------------------


class Listener(RunLogger):
    def __init__(self):
        self.heard = []

    def system(self, record):
        self.heard.append(record)


@pytest.mark.parametrize("marked", [True, False])
def test_replayed_samples_have_their_segment(tmp_path, marked):
    listener = Listener()
    replay(RunReader(resumed_run(tmp_path, marked)), listener)
    assert listener.heard == resumed_samples(marked=True)


def mlflow_points(samples):
    """Return MLflow's points of a node's traffic: seconds and megabytes."""
    figures = NodeFigures()
    points = [(record.time_seconds, figures.values(record)) for record in samples]
    return [(seconds, values.get("network_transmit_megabytes")) for seconds, values in points if values is not None]


def test_mlflow_counts_traffic_of_all_segments():
    points = mlflow_points([record for record in resumed_samples(marked=True) if record.node == 0])
    seconds, megabytes = zip(*points, strict=True)
    assert list(seconds) == sorted(set(seconds))
    assert list(megabytes) == sorted(megabytes)
    assert megabytes[0] == 0
    nothing_lost = [0.2 * (second - seconds[0]) for second in seconds]
    assert list(megabytes) == pytest.approx(nothing_lost, abs=0.05)  # except for traffic after the first segment's last sample


def test_mlflow_counts_new_nodes_from_training_only():
    points = mlflow_points([record for record in resumed_samples(marked=True) if record.node == 1])
    assert points[0] == (pytest.approx(10.251), 0)
    assert points[-1][1] == pytest.approx(0.2 * (points[-1][0] - points[0][0]))


def test_mlflow_skips_falls_and_missing_values():
    values = [100, None, 150, 10, 30]
    points = mlflow_points([sample(0, 1.0 + tick, network_sent_bytes=value and value * 10**6) for tick, value in enumerate(values)])
    assert [mb for _, mb in points] == pytest.approx([0, None, 50, 50, 70])


# The records -----------------------------------------------------------------------------------------------------------


def travelled(record):
    """Return a sample as the driver receives it from an agent."""
    message = MessageParser(Sample).parse(Message.from_typed(Sample(record)))
    return message.as_record(record.node)


def test_delayed_samples_have_their_segment_s_beginning(tmp_path):
    job = a_job(tmp_path, name="one", tensorboard=False)
    recording = RunRecorder(job, QuietProgress())
    recording.writer.write_status("running")
    recording.sample(travelled(sample(0, 0.5)))
    recording.start_clock(RESUMED)
    recording.sample(travelled(sample(0, 1.0)))
    recording.close()
    records = list(RunReader(tmp_path / "one").system())
    assert [record.part_began_seconds for record in records] == [RESUMED] * 2
    assert [record.initialising for record in records] == [True, False]


def test_samples_after_the_clock_are_not_training(tmp_path, monkeypatch):
    """The calibration follows, which communicates as fast as possible."""
    monkeypatch.setattr(plain, "NODES_SECONDS", 0.0)
    job, output = a_job(tmp_path, name="one", tensorboard=False), io.StringIO()
    recording = RunRecorder(job, PlainProgress(output))
    recording.writer.write_status("running")
    recording.sample(travelled(sample(0, 0.0, network_sent_bytes=10**9)))
    recording.start_clock()
    recording.progress.start(job, (), None)
    for _ in range(2):
        recording.sample(travelled(sample(0, 0.0, network_sent_bytes=10**9)))
    recording.stop_clock()
    recording.sample(travelled(sample(0, 0.0, network_sent_bytes=10**12)))
    recording.close()
    assert [record.network_sent_bytes for record in RunReader(tmp_path / "one").system()] == [*[10**9] * 3, 10**12]
    nodes = [line for line in output.getvalue().splitlines() if line.startswith("node")]
    assert [line.partition("sent ")[2].split("  ")[0] for line in nodes] == ["-", "0 B/s"]
