"""Merged samples keep means, maxima and totals, and lines stay within their budget."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crosstrain.records.node_usage import Lines, per_node
from crosstrain.records.store.jsonl import decode, encode
from crosstrain.records.store.sample_thinning import SampleThinner, merge_samples
from crosstrain.records.store.schema import Clock, SystemRecord, TaskSample

CLOCK = Clock(init_seconds=1.0, run_seconds=1e6, train_seconds=1.0, eval_seconds=0.0, checkpoint_seconds=0.0, total_seconds=2.0)


def sample(node, time_seconds, interval_seconds=2.0, cpu=None, rss=None, pss=None, sent=None, gpu=None, **more):
    return SystemRecord(
        node=node,
        time_seconds=time_seconds,
        interval_seconds=interval_seconds,
        cpu_seconds=None,
        cpu_cores_used=cpu,
        cpu_fraction=None if cpu is None else cpu / 4,
        cores_available=4.0,
        memory_rss_bytes=rss,
        memory_pss_bytes=pss,
        network_source="interface",
        network_sent_bytes=sent,
        network_received_bytes=sent,
        interfaces=None,
        disk_read_bytes=None,
        disk_written_bytes=None,
        gpus=None if gpu is None else ({"name": "G", "utilization": gpu, "memory_bytes": 7, "power_watts": None},),
        monitor_cpu_seconds=None,
        tasks=(TaskSample(f"worker-{node}", 1, None, rss, None, None, None),),
        part_began_seconds=0.0,
        **more,
    )


FIGURES = st.fixed_dictionaries(
    {
        "cpu": st.none() | st.floats(0, 4),
        "rss": st.none() | st.integers(0, 10**12),
        "pss": st.none() | st.integers(0, 10**12),
        "sent": st.none() | st.integers(0, 10**9),
        "gpu": st.none() | st.floats(0, 1),
    }
)


def thinner_of(samples_per_line):
    """Return a thinner at that level, for samples of less than its first ten seconds."""
    thinner = SampleThinner()
    thinner.samples_per_line = samples_per_line
    return thinner


def close(ours, truth, name):
    """Whether two figures, or all figures of two tables, agree; means of bytes are rounded."""
    if isinstance(truth, dict):
        named = {key: name if key in ("mean", "max") else key for key in truth}
        return ours.keys() == truth.keys() and all(close(ours[key], truth[key], named[key]) for key in truth)
    if isinstance(truth, list):
        return len(ours) == len(truth) and all(close(*pair, name) for pair in zip(ours, truth, strict=True))
    if isinstance(truth, float) and isinstance(ours, (int, float)):
        return math.isclose(ours, truth, rel_tol=1e-9, abs_tol=0.5 + 1e-9 if name.endswith("_bytes") else 1e-9)
    return ours == truth


@settings(max_examples=80)
@example(figures=[{"cpu": 0.0, "rss": 0, "pss": pss, "sent": None, "gpu": None} for pss in (0, 1)], per_line=2, nodes=1)
@example(
    figures=[{"cpu": None, "rss": rss, "pss": None, "sent": None, "gpu": None} for rss in (*[None] * 6, 1, 184, None, None, None, 0)],
    per_line=12,
    nodes=1,
)
@given(
    figures=st.lists(FIGURES, min_size=2, max_size=40),
    per_line=st.integers(1, 16),
    nodes=st.integers(1, 3),
)
def test_summary_of_thinned_samples_is_that_of_all(figures, per_line, nodes):
    """Also where counters fall and values are missing; each line is read back as written."""
    thinner = thinner_of(per_line)
    samples = [sample(number % nodes, 0.2 * (number + 1), 0.2, **figure) for number, figure in enumerate(figures)]
    samples = [replace(per_line, gpus=per_line.gpus or ({"name": "G"},)) for per_line in samples]
    lines = [line for per_line in samples for line in thinner.add(per_line)] + thinner.flush()
    lines = [decode(SystemRecord, json.loads(encode(line))) for line in lines]
    counted = Lines()
    thinned = per_node(counted.counted(lines), nodes, CLOCK)
    truth = per_node(samples, nodes, CLOCK)
    for ours, theirs in zip(thinned, truth, strict=True):
        for name in ("samples", "memory_rss_bytes", "memory_pss_bytes", "gpus"):
            assert close(ours[name], theirs[name], name), name
        for name in ("cpu_cores_used", "cpu_fraction"):
            assert (ours[name] and ours[name]["max"]) == (theirs[name] and theirs[name]["max"])
    expected = len(lines) < len(samples)
    assert (counted.thinned is not None) == expected
    if expected:
        assert (counted.thinned["samples"], counted.thinned["lines"]) == (len(samples), len(lines))


@given(
    rises=st.lists(st.integers(0, 1000), min_size=2, max_size=60),
    per_line=st.integers(1, 16),
    falls=st.sets(st.integers(1, 59), max_size=3),
)
def test_counter_rises_are_kept_in_any_line(rises, per_line, falls):
    value, values = 0, []
    for number, rise in enumerate(rises):
        value = rise if number in falls else value + rise
        values.append(value)
    thinner = thinner_of(per_line)
    samples = [sample(0, 0.1 * (number + 1), 0.1, sent=value) for number, value in enumerate(values)]
    lines = [line for item in samples for line in thinner.add(item)] + thinner.flush()
    ours, truth = (per_node(records, 1, CLOCK)[0]["network_sent_bytes"] for records in (lines, samples))
    lost_before_the_first_line = values[lines[0].samples - 1] - values[0]
    assert (ours or 0) == (truth or 0) - lost_before_the_first_line  # the driver ends each node's line when the clock starts


@settings(max_examples=40)
@given(figures=st.lists(FIGURES, min_size=1, max_size=20), cut=st.integers(1, 19))
def test_merging_is_associative(figures, cut):
    samples = [sample(0, 2.0 * (number + 1), **{**figure, "sent": number}) for number, figure in enumerate(figures)]
    at_once = merge_samples(samples)
    in_two = merge_samples([merge_samples(part) for part in (samples[:cut], samples[cut:]) if part])
    assert (at_once.samples, at_once.interval_seconds, at_once.time_seconds) == (len(samples), 2.0 * len(samples), samples[-1].time_seconds)
    assert in_two.samples == at_once.samples
    assert (in_two.merged or {}).keys() == (at_once.merged or {}).keys()
    for name in ("memory_rss_bytes", "memory_pss_bytes", "network_sent_bytes"):
        assert (getattr(in_two, name) or 0) == pytest.approx(getattr(at_once, name) or 0, rel=1e-12)
    assert at_once.tasks == samples[-1].tasks


def test_merged_rate_is_weighted_by_time():
    merged = merge_samples([sample(0, 1.0, 1.0, cpu=4.0), sample(0, 4.0, 3.0, cpu=0.0)])
    assert (merged.cpu_cores_used, merged.interval_seconds, merged.merged["cpu_cores_used"]) == (1.0, 4.0, (2, 4.0))


def flow(thinner, nodes, interval_seconds, seconds, line_bytes=1200):
    """Let nodes send samples in turn; return the bytes written, and the samples per line."""
    written, levels = 0, [thinner.samples_per_line]
    for number in range(int(nodes * seconds / interval_seconds)):
        for _ in thinner.add(sample(number % nodes, number * interval_seconds / nodes)):
            written += line_bytes
            thinner.wrote(line_bytes)
        if thinner.samples_per_line != levels[-1]:
            levels.append(thinner.samples_per_line)
    return written, levels


@pytest.mark.quick_cases("200-20.0", "20-0.2")
@pytest.mark.parametrize(("nodes", "interval_seconds"), [(100, 0.2), (20, 0.2), (200, 20.0)])
def test_lines_stay_within_the_budget(nodes, interval_seconds):
    """As 1,000 nodes that sample every 2 s, and less, at a sixth of the time and of the burst."""
    burst, rate, seconds = 2e6, 8000.0, 100.0
    demand = 1200 * nodes / interval_seconds
    written, levels = flow(SampleThinner(burst, rate), nodes, interval_seconds, seconds)
    assert written <= burst + rate * seconds + 1200 * nodes + 10 * demand  # may come before the first check
    if demand * seconds < burst:
        assert levels == [1]
    else:
        assert len(levels) == 2
        assert demand / rate <= levels[1] < 2 * demand / rate
    assert flow(SampleThinner(burst, rate), nodes, interval_seconds, seconds) == (written, levels)


def test_few_nodes_keep_every_sample_for_hours():
    assert flow(SampleThinner(), 3, 0.5, 2000.0, 1100) == (3 * 4000 * 1100, [1])


def test_nodes_take_turns_with_equal_delays():
    thinner = thinner_of(8)
    seen = {}
    for number in range(50 * 64):
        for line in thinner.add(sample(number % 50, number / 1000)):
            seen.setdefault(line.node, []).append(line.samples)
    assert set(seen) == set(range(50))
    assert all(count == 8 for counts in seen.values() for count in counts[1:])


def test_clock_start_and_end_close_the_lines():
    thinner = thinner_of(64)
    for number in range(30):
        assert not [line for line in thinner.add(sample(number % 3, number / 10)) if line.samples > 1]
    thinner.want_each()
    lines = [line for node in range(3) for line in thinner.add(sample(node, 3.0))]
    assert [line.node for line in lines] == [0, 1, 2]
    assert all(line.time_seconds == 3.0 for line in lines)
    assert thinner.add(sample(0, 3.1)) == []
    assert [line.samples for line in thinner.flush()] == [1]


def test_slower_samples_are_thinned_less():
    thinner = SampleThinner(0.0, 1000.0)
    assert flow(thinner, 100, 1.0, 60.0, 1000)[1] == [1, 128]
    for number in range(60):
        thinner.add(sample(0, 60.0 + number))
    assert thinner.samples_per_line == 1
