"""Costs of the exchange by messages and bytes, and the gain of the direct one.

The runs' bottlenecks are written by hand.
"""

import json
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from explained_runs import explained_run
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.cli.commands.explain import explain as command
from crosstrain.report.analysis.advice import advise
from crosstrain.report.analysis.diagnosis import BAND, diagnose, exchange_text
from crosstrain.report.runs.run import Run

MS = 1e-3


def explain_run(out, *, compute=1.0, network=3.0, count=3, **options):
    workers = [{"compute": compute * MS, "communicate": network * MS}] * count
    return diagnose(Run(explained_run(out, workers, **options)))


def test_exchange_is_messages_bytes_and_overhead(tmp_path):
    costs = explain_run(tmp_path, message_seconds=2 * MS).exchange_costs
    assert costs.step_seconds == pytest.approx(4 * MS)
    assert costs.messages_seconds_per_step == pytest.approx(2 * MS)
    assert costs.bytes_seconds_per_step == pytest.approx(1 * MS)
    assert costs.around_seconds_per_step == pytest.approx(0, abs=1e-12)
    assert costs.messages_fraction == pytest.approx(0.5)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0.001, 20))
def test_exchange_parts_sum_to_its_step_time(compute, seen, whole, message):
    with tempfile.TemporaryDirectory() as folder:
        path = explained_run(Path(folder), [{"compute": compute * MS, "communicate": seen * MS}] * 2, message_seconds=message * MS)
        document = json.loads((path / "calibration.json").read_text())
        document["workers"] = [{**worker, "communicate_seconds": whole * MS} for worker in document["workers"]]
        (path / "calibration.json").write_text(json.dumps(document))
        costs = diagnose(Run(path)).exchange_costs
    parts = (costs.messages_seconds_per_step, costs.bytes_seconds_per_step or 0.0, costs.around_seconds_per_step)
    assert (costs.bytes_seconds_per_step is None) == (message > whole)
    assert ("transfer of the bytes too little to be measured" in exchange_text(costs)) == (message > whole)
    assert sum(parts) == pytest.approx(seen * MS)
    assert min(parts) >= 0
    assert costs.messages_fraction <= 1


def test_time_around_the_all_reduce_is_called_overhead(tmp_path):
    path = explained_run(tmp_path, [{"compute": MS, "communicate": 8 * MS}] * 2, message_seconds=0.1 * MS)
    document = json.loads((path / "calibration.json").read_text())
    document["workers"] = [{**worker, "communicate_seconds": 2 * MS} for worker in document["workers"]]
    (path / "calibration.json").write_text(json.dumps(document))
    output = CliRunner().invoke(command, [str(path)], catch_exceptions=False).output
    assert "transfer of the bytes 1.9 ms (21%), framework overhead and waiting around the all-reduce 6 ms (67%)" in output
    assert output.count("mostly overhead and waiting") == 2
    assert "moving and summing" not in output


@settings(max_examples=10, deadline=None)
@given(st.floats(0.01, 10), st.floats(1.001, 3), st.floats(0.001, 20), st.floats(0.0, 0.5))
def test_slow_calibration_leaves_exchange_unknown(step, slower, whole, spread):
    """All of the step is then computation, scaled down to it, although there was an exchange."""
    with tempfile.TemporaryDirectory() as folder:
        path = explained_run(Path(folder), [{"compute": step * MS, "spread": spread}] * 2, direct={"direct_step_seconds": MS})
        document = json.loads((path / "calibration.json").read_text())
        measured = {"compute_seconds": slower * step * MS, "communicate_seconds": whole * MS, "message_seconds": MS}
        document["workers"] = [{**worker, **measured} for worker in document["workers"]]
        (path / "calibration.json").write_text(json.dumps(document))
        explanation = diagnose(Run(path))
        output = CliRunner().invoke(command, [str(path)], catch_exceptions=False).output
    costs = explanation.exchange_costs
    assert costs.messages_seconds_per_step is costs.bytes_seconds_per_step is costs.direct_exchange_speedup_estimate is None
    assert costs.exchange_fraction_at_most == pytest.approx(min(1.0, max(whole / step, spread)))
    assert "unknown, at most about" in output
    assert "stragglers 0%, communication 0%" not in output
    assert "100% of a worker's step is forward" not in output


def test_calibrated_step_is_the_estimate(tmp_path):
    explanation = explain_run(tmp_path, message_seconds=2 * MS, direct={"direct_step_seconds": 1 * MS, "direct_spread": 0.0})
    costs = explanation.exchange_costs
    assert costs.direct_exchange_steps_per_second_estimate == pytest.approx(1000)
    assert costs.direct_exchange_speedup_estimate == pytest.approx(4)
    assert costs.direct_exchange_steps_per_second_low == pytest.approx(1000 / (1 + BAND))
    assert costs.direct_exchange_steps_per_second_high == pytest.approx(1000 * (1 + BAND))
    assert costs.no_estimate is None
    (advice,) = [advice for advice in advise(explanation) if advice.option == "--exchange direct"]
    assert (advice.speedup, advice.bound) == (pytest.approx(4), "about")


def test_scattered_tries_widen_the_band(tmp_path):
    near, far = (
        explain_run(tmp_path / str(spread), direct={"direct_step_seconds": MS, "direct_spread": spread}).exchange_costs
        for spread in (0.0, 0.5)
    )
    assert far.direct_exchange_steps_per_second_low < near.direct_exchange_steps_per_second_low
    assert far.direct_exchange_steps_per_second_high > near.direct_exchange_steps_per_second_high


def test_direct_exchange_without_gain_is_not_advised(tmp_path):
    explanation = explain_run(tmp_path, direct={"direct_step_seconds": 4 * MS})
    assert explanation.verdict == "network"
    assert all(advice.option != "--exchange direct" for advice in advise(explanation))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"direct": "a port was closed"}, "a port was closed"),
        ({}, "the version that made this run did not measure it"),
    ],
)
def test_untried_exchange_has_reason_instead_of_estimate(tmp_path, options, reason):
    costs = explain_run(tmp_path, **options).exchange_costs
    assert (costs.direct_exchange_steps_per_second_estimate, costs.no_estimate) == (None, reason)
    assert exchange_text(costs).endswith(f"the gain of --exchange direct is unknown: {reason}")


def test_direct_exchange_has_costs_and_no_estimate(tmp_path):
    costs = explain_run(tmp_path, message_seconds=2 * MS, exchange="direct").exchange_costs
    assert costs.messages_fraction == pytest.approx(0.5)
    assert (costs.direct_exchange_steps_per_second_estimate, costs.no_estimate) == (None, None)
    assert exchange_text(costs).endswith("with --exchange direct")


@pytest.mark.parametrize("options", [{"mode": "async"}, {"calibrated": False}, {"network": 0.0}, {"message_seconds": None}])
def test_runs_without_exchange_have_no_costs(tmp_path, options):
    assert explain_run(tmp_path, **options).exchange_costs is None


def test_command_shows_costs_and_estimate(tmp_path):
    path = explained_run(tmp_path, [{"compute": MS, "communicate": 3 * MS}] * 3, message_seconds=2 * MS, direct={"direct_step_seconds": MS})
    output = CliRunner().invoke(command, [str(path)], catch_exceptions=False).output
    assert (
        "communication in a step of 4 ms (mean without the first updates): latency 2 ms (50%), transfer of the bytes 1 ms (25%); " in output
    )
    assert "estimated with --exchange direct: 1,000 steps/s (800 to 1,250), 4.00 × the 250 of these steps" in output
    document = json.loads(CliRunner().invoke(command, [str(path), "--json"], catch_exceptions=False).output)
    assert document["exchange_costs"]["messages_seconds_per_step"] == pytest.approx(2 * MS)
    assert document["exchange_costs"]["direct_exchange_steps_per_second_estimate"] == pytest.approx(1000)
