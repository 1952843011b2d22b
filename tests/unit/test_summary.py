"""The summary, against figures worked out by hand."""

from __future__ import annotations

import json
import math
import re
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_samples import CLOCK, STEP, a_job, async_run, open_run, sample, summary_of, sync_run

from crosstrain.records.node_usage import per_node, rate_between
from crosstrain.records.store.run_directory import RunReader
from crosstrain.records.store.schema import Clock, EvalRecord, EventRecord, StepRecord, SystemRecord, TaskSample
from crosstrain.records.store.summary_schema import training_rates
from crosstrain.records.summary import quantile, summarise

PROMISED = re.findall(
    r"\w+",
    """state backend mode model data nodes workers batch_size global_batch_size seed precision network_source steps updates_scheduled
updates_applied examples epochs init_seconds train_seconds eval_seconds checkpoint_seconds translate_seconds run_seconds total_seconds
steps_per_second examples_per_second step_seconds final_train_loss eval best_eval time_to_target_seconds staleness
updates_by_worker per_node""",
)

PROMISED_PER_NODE = re.findall(
    r"\w+",
    """train_seconds cpu_cores_used cpu_fraction memory_rss_bytes memory_pss_bytes network_sent_bytes network_received_bytes
network_sent_bytes_per_second network_received_bytes_per_second network_sent_bytes_per_train_second
network_received_bytes_per_train_second gpus""",
)


@pytest.mark.parametrize("make", [sync_run, async_run])
def test_promised_fields_are_present(tmp_path, make):
    summary = summary_of(make(tmp_path))
    assert set(PROMISED) <= set(summary)
    assert len(summary["per_node"]) == 2
    assert all(set(PROMISED_PER_NODE) <= set(node) for node in summary["per_node"])


def test_sync_run_has_its_figures(tmp_path):
    summary = summary_of(sync_run(tmp_path))
    settings = {"run": "one", "backend": "tf", "mode": "sync", "nodes": 2, "workers": 2, "batch_size": 5, "global_batch_size": 10}
    assert settings.items() <= summary.items()
    assert (summary["steps"], summary["examples"], summary["epochs"]) == (10, 100, 1.0)
    assert (summary["updates_scheduled"], summary["updates_applied"]) == (10, 10)
    assert summary["steps_per_second"] == pytest.approx(10 / 1.6)
    assert summary["examples_per_second"] == pytest.approx(100 / 1.6)
    assert summary["step_seconds"] == {"p50": 0.15, "p95": 0.25, "max": 0.25, "group_size": 2}
    assert summary["final_train_loss"] == pytest.approx((1.0 + 0.95 + 0.9 + 0.85 + 0.8 + 0.75 + 0.7 + 0.65 + 0.6 + 0.55) / 10)
    assert (summary["eval"]["accuracy"], summary["eval"]["loss"], summary["eval"]["step"]) == (0.9, 0.6, 10)
    assert (summary["staleness"], summary["updates_by_worker"], summary["parameter_servers"]) == (None, None, None)
    assert (summary["target"], summary["target_reached"]) == ("accuracy>=0.85", True)
    assert summary["time_to_target_seconds"] == pytest.approx(10 / 6)
    assert summary["network_source"] == "interface"


def test_async_run_has_its_figures(tmp_path):
    summary = summary_of(async_run(tmp_path))
    assert summary["staleness"] == {"mean": pytest.approx((2 * (0 + 1 + 1 + 2) + 2 * (0 + 0 + 1 + 7)) / 16), "p95": 7, "max": 7}
    assert summary["updates_by_worker"] == [12, 4]
    assert (summary["updates_scheduled"], summary["updates_applied"], summary["steps"]) == (17, 16, 16)
    assert (summary["target_reached"], summary["time_to_target_seconds"], summary["epochs"]) == (None, None, None)


def test_nodes_are_measured_from_the_sample_before_the_clock(tmp_path):
    first, second = summary_of(sync_run(tmp_path))["per_node"]
    # Samples at -1.0, -0.5, 0.0 … 2.0 s cover the clock's 2.0 s exactly, in four intervals.
    assert first["samples"] == second["samples"] == 4
    assert (first["cpu_seconds"], second["cpu_seconds"]) == (pytest.approx(2.0), pytest.approx(4.0))
    assert first["cpu_cores_used"] == {"mean": pytest.approx(1.0), "max": 1.0}
    assert second["cpu_fraction"] == {"mean": pytest.approx(1.0), "max": 0.75}
    assert (first["network_sent_bytes"], first["network_received_bytes"]) == (4_000_000, 8_000_000)
    assert (first["network_sent_bytes_per_second"], first["network_received_bytes_per_second"]) == (2e6, 4e6)
    rates = (first["network_sent_bytes_per_train_second"], first["network_received_bytes_per_train_second"])
    assert rates == pytest.approx((4e6 / 1.6, 8e6 / 1.6))
    assert first["memory_rss_bytes"] == {"mean": 100_000_002.5, "max": 100_000_004}
    assert (first["memory_pss_bytes"], first["gpus"]) == (None, None)
    assert (first["train_seconds"], second["train_seconds"]) == (1.6, 1.5)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(evaluating=st.floats(0, 0.9), bytes_per_train_second=st.integers(1, 10**9))
def test_training_rates_are_independent_of_evaluation(tmp_path, evaluating, bytes_per_train_second):
    """Bytes flow during training only, so the mean over the whole run is lower."""
    writer = open_run(a_job(tmp_path / str(len(list(tmp_path.iterdir())))))
    trained = 10.0 * (1 - evaluating)
    for seconds in range(11):
        sent = round(bytes_per_train_second * min(float(seconds), trained))
        writer.system(sample(0, float(seconds), network_sent_bytes=sent, network_received_bytes=None))
    clock = Clock(1.0, 10.0, trained, 10.0 - trained, 0.0, 11.0)
    node = summarise(writer.path, clock, state="succeeded", updates_scheduled=1, updates_applied=1)["per_node"][0]
    assert node["network_sent_bytes_per_train_second"] == pytest.approx(bytes_per_train_second, rel=0.01, abs=1)
    assert node["network_sent_bytes_per_second"] == pytest.approx(bytes_per_train_second * (1 - evaluating), rel=0.01, abs=1)
    assert node["network_received_bytes_per_train_second"] is None


@given(
    st.lists(st.tuples(st.floats(0.1, 1e4), st.integers(1, 6)), min_size=1, max_size=5),
    st.lists(st.integers(1, 10**9), min_size=6, max_size=6),
)
def test_node_of_some_segments_has_their_rate(segments, rates):
    whole, count = sum(seconds for seconds, _ in segments), max(nodes for _, nodes in segments)
    seconds_present = [sum(seconds for seconds, nodes in segments if nodes > node) for node in range(count)]
    nodes = [
        {"train_seconds": seconds_of_node, "network_sent_bytes": rate * seconds_of_node}
        for seconds_of_node, rate in zip(seconds_present, rates, strict=False)
    ]
    rated = training_rates({"train_seconds": whole, "resumed": len(segments) - 1}, nodes)
    assert [node["network_sent_bytes_per_train_second"] for node in rated] == pytest.approx(rates[:count])


@pytest.mark.parametrize("lost", [0.0, 0.5])
def test_old_summary_gets_training_rates_unless_work_repeats(tmp_path, lost):
    path = sync_run(tmp_path)
    summary = summary_of(path) | {"restart_seconds_lost": lost}
    written = [{key: value for key, value in node.items() if not key.endswith("_per_train_second")} for node in summary["per_node"]]
    (path / "summary.json").write_text(json.dumps({"schema": 1, **summary, "per_node": written}))
    (node, _) = RunReader(path).summary()["per_node"]
    assert node["network_sent_bytes_per_train_second"] == (None if lost else pytest.approx(4e6 / 1.6))


def test_missing_observations_are_null_and_not_zero(tmp_path):
    for node in summary_of(async_run(tmp_path))["per_node"]:
        observed = {name: value for name, value in node.items() if name not in ("node", "samples", "train_seconds")}
        assert set(observed.values()) == {None}
        assert node["samples"] == 0


def test_run_without_steps_has_a_summary(tmp_path):
    writer = open_run(a_job(tmp_path, until="accuracy>=0.9"))
    clock = Clock(3.0, 0.0, 0.0, 0.0, 0.0, 3.0)
    summary = summarise(writer.path, clock, state="failed", updates_scheduled=0, updates_applied=None)
    writer.close()
    nothing = (
        "steps_per_second",
        "examples_per_second",
        "step_seconds",
        "final_train_loss",
        "eval",
        "best_eval",
        "updates_applied",
        "network_source",
    )
    assert {summary[name] for name in nothing} == {None}
    assert (summary["steps"], summary["target_reached"], summary["time_to_target_seconds"]) == (0, False, None)


def test_diverged_loss_is_noticed(tmp_path):
    writer = open_run(a_job(tmp_path))
    writer.step(replace(STEP, count=3, losses=(0.5, math.inf, math.nan)))
    summary = summarise(writer.path, CLOCK, state="failed", updates_scheduled=3, updates_applied=3)
    writer.write_summary(summary)
    writer.close()
    assert summary["non_finite_losses"] == 2
    assert json.loads((writer.path / "summary.json").read_text())["final_train_loss"] == "NaN"


NAN = math.nan
ENDS = [
    ([(0, (0.5, 0.25)), (2, (0.5,))], None),
    ([(0, (0.5, NAN)), (2, (0.5,))], None),  # a recovered loss
    ([(0, (0.5, NAN)), (2, (math.inf, NAN))], 1),
    ([(0, (NAN, NAN))], 0),
    ([(2, (NAN, NAN)), (0, (0.5, 0.5)), (4, (NAN,))], 2),  # workers of an async run report in any order
    ([(2, (0.5, 0.5)), (0, (NAN, NAN))], None),
    ([(0, (3e38, 3e38))], None),  # finite, though their sum overflows float32
    ([], None),
]


@pytest.mark.parametrize(("groups", "expected"), ENDS)
def test_non_finite_start_is_found(tmp_path, groups, expected):
    writer = open_run(a_job(tmp_path))
    for step, losses in groups:
        writer.step(replace(STEP, step=step, count=len(losses), losses=losses))
    summary = summarise(writer.path, CLOCK, state="succeeded", updates_scheduled=5, updates_applied=5)
    writer.write_summary(summary)
    writer.close()
    assert RunReader(writer.path).summary()["non_finite_from_step"] == expected


def test_final_loss_is_the_mean_of_the_last_20_updates(tmp_path):
    writer = open_run(a_job(tmp_path))
    for group in range(3):
        writer.step(replace(STEP, step=15 * group, count=15, losses=(float(group),) * 15))
    summary = summarise(writer.path, CLOCK, state="succeeded", updates_scheduled=45, updates_applied=45)
    writer.close()
    assert summary["final_train_loss"] == (5 * 1.0 + 15 * 2.0) / 20


def test_waits_are_summed_where_measured(tmp_path):
    writer = open_run(a_job(tmp_path))
    for wait in (0.25, None, 0.5):
        writer.step(replace(STEP, data_wait_seconds=wait))
    summary = summarise(writer.path, CLOCK, state="succeeded", updates_scheduled=6, updates_applied=6)
    writer.close()
    assert (summary["data_wait_seconds"], summary["network_wait_seconds"]) == (0.75, None)


def profiled_run(path, groups, *, train_seconds, **job):
    """Return the summary of groups (count, seconds, seconds of profiling or None, worker)."""
    writer, step = open_run(a_job(path, **job)), 0
    for count, seconds, profiled, worker in groups:
        staleness = None if worker is None else (0,) * count
        record = replace(STEP, step=step, count=count, seconds=seconds, examples=10 * count, losses=(0.5,) * count, data_wait_seconds=0.01)
        writer.step(replace(record, profiled_seconds=profiled, worker=worker, staleness=staleness))
        step += count
    clock = replace(CLOCK, train_seconds=train_seconds, run_seconds=train_seconds + 0.5)
    summary = summarise(writer.path, clock, state="succeeded", updates_scheduled=step, updates_applied=step)
    writer.close()
    return summary


def test_profiled_updates_do_not_count_for_speed(tmp_path):
    groups = [(4, 2.0, 2.5, None), (1, 0.5, 7.0, None), (7, 0.7, None, None), (8, 0.8, None, None)]
    summary = profiled_run(tmp_path, groups, train_seconds=11.0)
    assert (summary["profiled_updates"], summary["profile_seconds"], summary["train_seconds"]) == (5, 9.5, 1.5)
    assert (summary["steps"], summary["examples"]) == (20, 200)
    assert (summary["steps_per_second"], summary["examples_per_second"]) == (pytest.approx(10.0), pytest.approx(100.0))
    assert summary["step_seconds"] == pytest.approx({"p50": 0.1, "p95": 0.1, "max": 0.1, "group_size": 8})
    assert summary["data_wait_seconds"] == pytest.approx(0.02)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.01, 9.0), st.none() | st.floats(0.01, 99.0)), min_size=1, max_size=30),
)
def test_profiled_run_has_the_speed_of_other_updates(groups):
    plain = [(count, seconds, None, None) for count, seconds, profiled in groups if profiled is None]
    training = sum(seconds for _, seconds, _, _ in plain)
    profiling = sum(profiled for _, _, profiled in groups if profiled is not None)
    with tempfile.TemporaryDirectory() as folder:
        profiled_summary = profiled_run(Path(folder), [(*group, None) for group in groups], train_seconds=training + profiling)
    with tempfile.TemporaryDirectory() as folder:
        expected = profiled_run(Path(folder), plain, train_seconds=training)
    for name in ("steps_per_second", "examples_per_second", "step_seconds"):
        assert profiled_summary[name] == (None if not plain else pytest.approx(expected[name]))
    assert profiled_summary["profiled_updates"] == sum(count for count, _, profiled in groups if profiled is not None)
    assert profiled_summary["train_seconds"] == pytest.approx(training)


@pytest.mark.parametrize("other_groups", [0, 19, 20])
def test_async_speed_needs_mostly_unprofiled_groups(tmp_path, other_groups):
    groups = [(2, 0.5, 0.5, 0), (2, 0.5, 3.5, 1), *[(2, 0.2, None, 1)] * other_groups]
    summary = profiled_run(tmp_path, groups, train_seconds=4.0 + 0.1 * other_groups, mode="async", nodes=2)
    known = [summary["steps_per_second"], summary["examples_per_second"]]
    assert known == ([pytest.approx(20.0), pytest.approx(200.0)] if other_groups == 20 else [None, None])
    assert summary["profiled_updates"] == 4


def test_best_evaluation_is_earliest_at_equal_figures(tmp_path):
    writer = open_run(a_job(tmp_path, until="loss<=0.45"))
    for step, loss, accuracy in ((1, 0.5, 0.9), (2, 0.4, 0.9), (3, 0.4, 0.9), (4, 0.1, 0.8), (5, math.nan, math.nan)):
        writer.evaluation(EvalRecord(step, step / 10, float(step), 0.1, "test", 360, loss, {"accuracy": accuracy}, step))
    writer.evaluation(EvalRecord(6, 0.6, 6.0, 0.1, "train", 1437, 0.0, {"accuracy": 1.0}, 6))
    summary = summarise(writer.path, CLOCK, state="succeeded", updates_scheduled=6, updates_applied=6)
    writer.close()
    assert summary["best_eval"]["step"] == 2
    assert summary["eval"]["step"] == 5
    assert (summary["time_to_target_seconds"], summary["target_reached"]) == (2.0, True)


def test_extra_keys_of_the_job_file_are_ignored(tmp_path):
    writer = open_run(a_job(tmp_path))
    writer.write_job(
        {**a_job(tmp_path, global_batch_size=7, nodes=3).model_dump(mode="json"), "addresses": ["10.0.0.1"], "versions": {"tf": "2"}}
    )
    summary = summarise(writer.path, CLOCK, state="succeeded", updates_scheduled=0, updates_applied=0)
    writer.close()
    assert (summary["global_batch_size"], summary["batch_size"], summary["workers"]) == (7, 3, 3)


# Nodes ---------------------------------------------------------------------------------------------------------------


def figures(*samples, clock=CLOCK):
    (node,) = per_node(samples, 1, clock)
    return node


def test_first_sample_after_the_end_is_the_last_one_used():
    ticks = [(-0.2, 100), (0.3, 110), (1.9, 150), (2.3, 160), (2.8, 900)]
    node = figures(*(sample(0, seconds, network_sent_bytes=count) for seconds, count in ticks))
    assert (node["network_sent_bytes"], node["samples"]) == (60, 3)
    assert node["network_sent_bytes_per_second"] == pytest.approx(60 / 2.5)


def test_run_shorter_than_the_interval_is_measured():
    clock = replace(CLOCK, run_seconds=0.2)
    node = figures(sample(0, -0.1, cpu_seconds=1.0), sample(0, 0.4, cpu_seconds=1.6), clock=clock)
    assert node["cpu_cores_used"]["mean"] == pytest.approx(1.2)


def test_missing_early_sample_uses_the_first_as_baseline():
    node = figures(sample(0, 0.5, cpu_seconds=1.0), sample(0, 1.5, cpu_seconds=1.5))
    assert node["cpu_seconds"] == 0.5
    assert figures(sample(0, 0.5, cpu_seconds=1.0))["cpu_seconds"] is None


def test_counter_reset_loses_only_the_fall():
    node = figures(*(sample(0, 0.5 * tick, network_sent_bytes=count) for tick, count in enumerate([100, 150, 10, 30])))
    assert node["network_sent_bytes"] == 50 + 20


def test_partly_observed_figure_covers_its_samples():
    node = figures(*(sample(0, 0.5 * tick, network_sent_bytes=count) for tick, count in enumerate([None, 100, None, 160])))
    assert (node["network_sent_bytes"], node["network_sent_bytes_per_second"]) == (60, 60)
    assert figures(*(sample(0, 0.5 * tick, cpu_cores_used=None, cpu_seconds=None) for tick in range(4)))["cpu_cores_used"] is None


def test_gpus_are_separate():
    gpus = [
        ({"name": "A", "utilization": 0.5, "memory_bytes": 10, "power_watts": None}, {"name": "B", "utilization": share})
        for share in (0.2, 0.4)
    ]
    node = figures(*(sample(0, 0.5 + tick, gpus=pair) for tick, pair in enumerate(gpus)))
    assert [gpu["name"] for gpu in node["gpus"]] == ["A", "B"]
    assert node["gpus"][1]["utilization"] == {"mean": pytest.approx(0.3), "max": 0.4}
    assert (node["gpus"][0]["power_watts"], node["gpus"][0]["memory_bytes"]) == (None, {"mean": 10, "max": 10})


def test_different_network_sources_are_listed(tmp_path):
    writer = open_run(a_job(tmp_path, nodes=3))
    for node, source in enumerate(("sockets", "interface", None)):
        writer.system(sample(node, 0.5, network_source=source))
    summary = summarise(writer.path, CLOCK, state="succeeded", updates_scheduled=0, updates_applied=0)
    writer.close()
    assert summary["network_source"] == ["interface", "sockets"]
    assert [node["network_source"] for node in summary["per_node"]] == ["sockets", "interface", None]


def test_rate_needs_two_increasing_samples():
    first, later = sample(0, 0.0, network_sent_bytes=100), sample(0, 0.5, network_sent_bytes=200)
    assert rate_between(first, later, "network_sent_bytes") == 200
    assert rate_between(None, later, "network_sent_bytes") is None
    assert rate_between(later, sample(0, 1.0, network_sent_bytes=150), "network_sent_bytes") is None
    assert rate_between(first, later, "memory_pss_bytes") is None


# Quantiles -----------------------------------------------------------------------------------------------------------


@given(sample=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=30), percent=st.integers(1, 100))
def test_quantiles_equal_those_of_the_expanded_sample(sample, percent):
    values, weights = (np.array(column) for column in zip(*sample, strict=True))
    written_out = sorted(np.repeat(values, weights))
    rank = math.ceil(percent * len(written_out) / 100)
    assert quantile(values.astype(float), weights, percent / 100) == written_out[min(max(rank, 1), len(written_out)) - 1]


# Documentation -------------------------------------------------------------------------------------------------------


def test_documentation_explains_every_field(tmp_path, repository):
    text = (repository / "docs" / "run-directory.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`(\w+)`", text))
    summary = summary_of(sync_run(tmp_path))
    names = {field.name for record in (StepRecord, EvalRecord, EventRecord, SystemRecord, TaskSample) for field in fields(record)}
    assert names | set(summary) | set(summary["per_node"][0]) | set(RunReader(tmp_path / "one").status()) <= explained
