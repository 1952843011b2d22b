"""Many nodes: figures are summarised, and the driver may open as many files as it needs."""

import resource
import subprocess
import sys
from statistics import median_low

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import make_run

from crosstrain.core.job import Job
from crosstrain.launch.launchers.environments import Membership
from crosstrain.launch.launchers.registry import LaunchRequest, choose_launcher
from crosstrain.records.store.schema import SystemRecord
from crosstrain.records.text import MAX_NODES_SHOWN, NodeSamples, ends_of, lines_of, statistic
from crosstrain.report.pages.resource_charts import resources
from crosstrain.report.runs.run import Run, started_runs
from crosstrain.report.runs.series import bands
from crosstrain.report.runs.series_arrays import NodeSeries


def sample(node, time_seconds, cores, sent):
    figures = dict.fromkeys(
        (
            "cpu_seconds",
            "cpu_fraction",
            "memory_pss_bytes",
            "disk_read_bytes",
            "disk_written_bytes",
            "gpus",
            "monitor_cpu_seconds",
            "interfaces",
        )
    )
    return SystemRecord(
        node=node, time_seconds=time_seconds, interval_seconds=1.0, cpu_cores_used=cores, cores_available=4.0, memory_rss_bytes=1000,
        network_source="interface", network_sent_bytes=sent, network_received_bytes=0, **figures,
    )  # fmt: skip


def test_few_nodes_have_rows_and_many_are_summarised():
    few, many = NodeSamples(), NodeSamples()
    for nodes, samples in ((MAX_NODES_SHOWN, few), (1000, many)):
        for node in range(nodes):
            for second in (1, 2):
                samples.add(sample(node, float(second), node / 1000, node * 10**6 * second))
    assert [row["node"] for row in few.rows()] == [str(node) for node in range(MAX_NODES_SHOWN)]
    rows = many.rows()
    assert [row["node"] for row in rows] == ["lowest of 1,000", "median of 1,000", "highest of 1,000"]
    assert [row["CPU"] for row in rows] == ["0.00 of 4 cores", "0.50 of 4 cores", "1.00 of 4 cores"]
    assert [row["sent"] for row in rows] == ["0 B/s", "499 MB/s", "999 MB/s"]
    assert [row["node"] for row in many.rows(5)] == ["0", "1", "2", "3", "4"]  # the run has fewer now


@given(st.lists(st.none() | st.floats(0, 9), max_size=60))
def test_extreme_nodes_are_shown(figures):
    items = list(enumerate(figures))
    shown, some = ends_of(items, lambda item: item[1])
    assert shown == sorted(shown)
    assert some == (len(items) > MAX_NODES_SHOWN)
    assert len(shown) <= MAX_NODES_SHOWN
    known = [value for value in figures if value is not None]
    if known and some:
        values = [value for _, value in shown]
        assert (min(values), max(values)) == (min(known), max(known))
    elif not some:
        assert shown == items
    assert statistic("median", figures) == (median_low(known) if known else None)
    assert len(lines_of(len(items))) <= MAX_NODES_SHOWN


@given(st.integers(1, 40), st.integers(2, 30), st.integers(0, 2**32 - 1))
def test_band_equals_the_samples_at_each_time(nodes, samples, seed):
    generator = np.random.default_rng(seed)
    series = []
    for node in range(nodes):
        times = np.cumsum(generator.uniform(0.5, 3.0, samples))
        values, nothing = generator.uniform(0, 1, samples), np.full(samples, np.nan)
        series.append(NodeSeries(node, times, values, nothing, nothing, nothing, nothing, None, None))
    band = bands(series, lambda node: node.cpu_cores_used, 0.0, 40.0, 50)
    while_there = [
        [
            node.cpu_cores_used[np.searchsorted(node.time_seconds, at)]
            for at in band.time_seconds
            if node.time_seconds[0] <= at <= node.time_seconds[-1]
        ]
        for node in series
    ]
    means = [np.mean(values) for values in while_there if values]
    ends = (0, 100) if len(means) > 1 and max(means) >= 4 * min(means) else (10, 90)
    assert band.percentiles == ends
    for at, low, middle, high in zip(band.time_seconds, band.low, band.median, band.high, strict=True):
        running = [node for node in series if node.time_seconds[0] <= at <= node.time_seconds[-1]]
        now = [next(value for time, value in zip(node.time_seconds, node.cpu_cores_used, strict=True) if time >= at) for node in running]
        if now:
            assert (low, middle, high) == pytest.approx(np.percentile(now, [ends[0], 50, ends[1]]))
        else:
            assert np.isnan([low, middle, high]).all()


@pytest.mark.parametrize(("factor", "names"), [(2.0, ["10th percentile", "90th percentile"]), (9.0, ["lowest node", "highest node"])])
def test_chart_of_many_nodes_shows_extremes(tmp_path, factor, names):
    """One of twenty nodes uses more cores; percentiles alone would hide it."""
    (run,) = started_runs([Run(make_run(tmp_path, "one", steps=40))])
    times, nothing = np.linspace(0.1, 1.0, 10), np.full(10, np.nan)
    nodes = [
        NodeSeries(node, times, np.full(10, factor if node == 7 else 1.0), nothing, nothing, nothing, nothing, None, None)
        for node in range(20)
    ]
    (picture,) = resources([run], [nodes])
    (panel,) = picture.panels
    assert [drawn.name for drawn in panel.curves] == [*names, "median of 20 nodes"]
    assert np.nanmax(panel.curves[1].y) == (9.0 if factor == 9.0 else 1.0)
    assert panel.top == pytest.approx(1.05 * np.nanmax(panel.curves[1].y))
    assert "or the lowest and the highest node where nodes differ by a factor of 4 or more" in picture.note


@pytest.mark.parametrize(("nodes", "hard", "joins"), [(1000, 4096, True), (1000, 4096, False), (3, 1024, True)])
def test_open_file_limit_is_raised_or_the_run_refused(nodes, hard, joins):
    code = f"""
import resource
from crosstrain.core.errors import UsageError
from crosstrain.launch.launchers.machine_checks import allow_files_of_nodes
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, {hard}))
try:
    allow_files_of_nodes({nodes}, joining={joins})
except UsageError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    *messages, allowed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    if nodes == 3:
        assert (messages, allowed) == ([], "1024")
    elif joins:
        assert messages == []
        assert 2 * nodes <= int(allowed) <= hard
    else:
        assert allowed == "1024"
        assert "nodes: got 1,000, for which this process may have to open 8,512 files, and the system allows it 4,096" in messages[0]


def test_open_file_limit_is_checked_before_nodes_start():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        place = Membership("--rendezvous", 0, 0, ("127.0.0.1", (29500,)), {})
        choose_launcher(LaunchRequest(Job(nodes=300), print, place, b"secret"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2 * 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
