"""Correlation of traffic between nodes and with step time, on synthetic traffic."""

from __future__ import annotations

import numpy as np
import pytest
from explained_runs import explained_run
from questioned_runs import asked, trained
from run_samples import a_job, open_run, sample

from crosstrain.records.store.schema import Clock, StepRecord
from crosstrain.records.summary import summarise
from crosstrain.report.analysis.utilisation import correlation, make_grid, pair_correlations, rates_on_grid
from crosstrain.report.runs.series_arrays import NodeSeries


def node(number, sent, received, phase=0.0):
    count = len(sent)
    times = phase + 0.5 * np.arange(1, count + 1)
    nothing = np.full(count, np.nan)
    return NodeSeries(number, times, nothing, nothing, np.asarray(sent, float), np.asarray(received, float), nothing, None, "interface")


def waves(seed, count=60):
    return 1e6 * (2 + np.random.default_rng(seed).normal(size=count).cumsum() / 5)


def pairs_of(*nodes):
    return {(pair["sender"], pair["receiver"]): pair for pair in pair_correlations(nodes, 0.0, 100.0)}


def test_received_traffic_correlates_with_sent():
    first, second = waves(1), waves(2)
    correlations = pairs_of(node(0, first, second), node(1, second, 0.9 * first))
    assert correlations[0, 1]["correlation"] == pytest.approx(1.0)
    assert correlations[1, 0]["correlation"] == pytest.approx(1.0)
    assert correlations[0, 1]["samples"] in (59, 60)
    unrelated = pairs_of(node(0, first, first), node(1, first, np.random.default_rng(3).uniform(1, 2, 60)))
    assert abs(unrelated[0, 1]["correlation"]) < 0.5


def test_samples_are_aligned_in_time():
    """Both nodes see the same traffic; the second samples it 0.25 s later."""
    fine = waves(1, 120)  # one value per quarter of a second
    early, late = fine[:118].reshape(-1, 2).mean(axis=1), fine[1:119].reshape(-1, 2).mean(axis=1)
    assert pairs_of(node(0, early, early), node(1, late, late, phase=0.25))[0, 1]["correlation"] > 0.95


def test_constant_rates_have_no_correlation():
    steady = 1e6 * (1 + 0.001 * np.random.default_rng(0).normal(size=60))
    pair = pairs_of(node(0, steady, steady), node(1, steady, steady))[0, 1]
    assert (pair["correlation"], pair["why"]) == (None, "a rate that does not vary")


def test_few_samples_have_no_correlation():
    pair = pairs_of(node(0, waves(1, 8), waves(1, 8)), node(1, waves(1, 8), waves(1, 8)))[0, 1]
    assert (pair["correlation"], pair["why"]) == (None, "fewer than 10 samples")


def test_pairs_of_many_nodes_are_limited():
    assert len(pairs_of(*(node(n, waves(n), waves(n)) for n in range(40)))) == 16 * 15


def test_no_samples_give_no_correlations():
    assert pair_correlations([], 0.0, 10.0) == []
    assert make_grid([node(0, [], [])], 0.0, 10.0) is None


def test_unknown_samples_have_no_rate():
    sampled_node = node(0, [1.0, np.nan, np.nan, 1.0, 1.0], [1.0] * 5)
    rates = rates_on_grid(make_grid([sampled_node], 0.0, 2.5), sampled_node.time_seconds, sampled_node.sent_bytes_per_second)
    assert rates.tolist() == pytest.approx([np.nan, np.nan, 1.0, 1.0], nan_ok=True)


def test_correlation_equals_numpy():
    first, second = waves(1), waves(1) + waves(2)
    assert correlation(first, second) == (pytest.approx(np.corrcoef(first, second)[0, 1]), 60)


def exchanging(out, bytes_of, mode="async"):
    """Make a run of two nodes for 40 s, the second half at half speed.

    `bytes_of` gives the bytes that a node sends in a second at a pace.
    """
    samples, total = [], 0.0
    for tick in range(81):
        pace = 1.0 if tick <= 40 else 0.5
        total += bytes_of(pace) / 2
        for number in range(2):
            samples.append(sample(number, 0.5 * tick, network_sent_bytes=round(total), network_received_bytes=round(total)))
    job = a_job(out, name="run", mode=mode, nodes=2, batch_size=10, steps=6000)
    writer = open_run(job)
    time_seconds, step = 0.0, 0
    while time_seconds < 39.99:
        seconds = 0.1 if time_seconds < 19.99 else 0.2
        time_seconds += seconds
        writer.step(StepRecord(step, 10, 0, time_seconds, seconds, 200, (1.0,) * 10, (0.1,), worker=None if mode == "sync" else 0))
        step += 10
    for record in samples:
        writer.system(record)
    clock = Clock(2.0, 40.0, 40.0, 0.0, 0.0, 42.0)
    writer.write_summary(summarise(writer.path, clock, state="succeeded", updates_scheduled=step, updates_applied=step))
    writer.write_status("succeeded", exit_code=0)
    writer.close()
    return writer.path


def test_slow_and_fast_steps_are_compared_with_traffic(tmp_path):
    step_time = asked(exchanging(tmp_path, lambda pace: 1e6 * pace))["step_time_and_network"]
    assert step_time["fastest_tenth"]["step_seconds"] == pytest.approx(0.01)
    assert step_time["slowest_tenth"]["step_seconds"] == pytest.approx(0.02)
    for tenth in ("fastest_tenth", "slowest_tenth"):
        assert step_time[tenth]["bytes_per_step"] == pytest.approx(20_000, rel=0.05)
    assert step_time["correlation"] < -0.95
    assert step_time["text"].endswith("a step moves 20.0 kB in both, so the sent rate follows the speed")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_averages_are_weighted_and_sync_has_no_step_bytes(tmp_path, mode):
    """3,000 updates in 40 s; the mean of the intervals' step times would be 15 ms."""
    step_time = asked(exchanging(tmp_path, lambda pace: 1.5e6 if pace == 1.0 else 0.5e6, mode))["step_time_and_network"]
    assert step_time["step_seconds"] == pytest.approx(40 / 3000, rel=0.01)
    assert step_time["sent_bytes_per_second"] == pytest.approx(2e6, rel=0.01)
    assert ("of a fast one" in step_time["text"], "per update of all workers" in step_time["text"]) == (mode == "async", mode == "async")
    assert step_time["slowest_tenth"]["bytes_per_step"] == pytest.approx(20_000, rel=0.05)


def test_equally_busy_network_has_no_correlation(tmp_path):
    step_time = asked(exchanging(tmp_path, lambda _pace: 1e6))["step_time_and_network"]
    assert step_time["correlation"] is None
    assert step_time["text"].endswith("the sent rate is the same in slow steps, so they move more bytes")


def test_small_share_of_run_is_not_a_small_share_of_step(tmp_path):
    figures = {"run_seconds": 4.0, "train_seconds": 0.6, "eval_seconds": 3.0}
    network = asked(explained_run(tmp_path, [{"compute": 0.004, "communicate": 0.006}] * 2, figures=figures))["network"]
    assert network["text"].startswith("not the bottleneck: communication is 60% of a worker's step and 9% of the run time")


def test_single_process_has_no_network(tmp_path):
    samples = [sample(0, 0.1 * tick) for tick in range(20)]
    assert not {"network", "step_time_and_network"} & set(asked(trained(tmp_path, samples=samples)))
