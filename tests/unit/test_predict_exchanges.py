"""Predictions for both exchanges, from runs with either and native runs that tried direct."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from predict_samples import BATCH, PAYLOAD, RING, calibrated_run

from crosstrain.cli.commands.predict import predict as command
from crosstrain.core.errors import UsageError
from crosstrain.report.analysis.cost_model import Link, Ring, link_bytes, ring_step, traffic
from crosstrain.report.analysis.fit import fit, observe
from crosstrain.report.runs.run import Run

DIRECT = Ring(hop_seconds=0.0002, seconds_per_byte=3e-9, hidden_fraction=0.25, exchange="direct")
FIGURES = ("hop_seconds", "seconds_per_byte", "hidden_fraction", "other_seconds")


def same(fitted, expected):
    assert fitted.exchange == expected.exchange
    for name in FIGURES:
        assert getattr(fitted, name) == pytest.approx(getattr(expected, name), rel=1e-6, abs=1e-12), name


def observed(*paths):
    return [observe(Run(path)) for path in paths]


class TestTraffic:
    @given(st.integers(2, 64), st.floats(1, 1e9))
    def test_exchanges_send_at_least_the_minimum(self, workers, payload):
        least = 2 * (workers - 1) / workers * payload
        for exchange in ("native", "direct"):
            assert traffic(exchange, payload, workers).sent_bytes >= least * (1 - 1e-12)
        # direct sends more only if that saves a message: 32 KiB at most
        assert traffic("direct", payload, workers).sent_bytes <= least + 32 * 1024 + 1

    def test_direct_exchange_has_fewer_rounds(self):
        assert traffic("direct", 31400, 3) == (2, 2 * 31400, 1)
        assert traffic("direct", 1e6, 3) == (4, pytest.approx(4 / 3 * 1e6), 2)
        assert traffic("native", 31400, 5).rounds == 8

    @given(st.integers(1, 16), st.integers(1, 4), st.floats(1, 1e8))
    def test_links_carry_only_traffic_between_nodes(self, nodes, per_node, payload):
        workers = nodes * per_node
        on_links = link_bytes("direct", payload, workers, nodes)
        sent_in_all = workers * traffic("direct", payload, workers).sent_bytes if workers > 1 else 0.0
        assert on_links * nodes <= sent_in_all * (1 + 1e-12)
        assert (on_links == 0) == (nodes == 1)
        if per_node == 1 and nodes > 1:
            assert on_links == pytest.approx(traffic("direct", payload, workers).sent_bytes)


class TestFit:
    @pytest.mark.parametrize("nodes", [2, 3, 4])
    def test_direct_run_is_fitted_exactly(self, tmp_path, nodes):
        model = fit(observed(calibrated_run(tmp_path, exchange="direct", ring=DIRECT, nodes=nodes)))
        same(model.ring, DIRECT)

    @pytest.mark.parametrize("nodes", [2, 3, 4])
    def test_native_run_fits_both_exchanges(self, tmp_path, nodes):
        runs = observed(calibrated_run(tmp_path, nodes=nodes, direct=DIRECT))
        same(fit(runs).ring, RING)
        same(fit(runs, "native").ring, RING)
        same(fit(runs, "direct").ring, DIRECT)

    def test_exchanges_are_fitted_separately(self, tmp_path):
        runs = observed(calibrated_run(tmp_path), calibrated_run(tmp_path, name="two", exchange="direct", ring=DIRECT))
        same(fit(runs).ring, RING)
        same(fit(runs, "direct").ring, DIRECT)
        same(fit(runs[::-1]).ring, DIRECT)

    def test_single_process_run_needs_no_exchange(self, tmp_path):
        model = fit(observed(calibrated_run(tmp_path, nodes=1, bandwidth=None, cores_per_node=None)), "direct")
        assert (model.measured, model.ring) == (frozenset(), Ring(exchange="direct"))

    @pytest.mark.parametrize(
        ("changes", "exchange", "message"),
        [
            ({"direct": "a port was closed"}, "direct", r"nothing is known of 'direct': '' did not try it \(a port was closed\)"),
            ({}, "direct", r"did not try it \(it was made by a release that did not\)"),
            ({"exchange": "direct", "ring": DIRECT}, "native", "trained with direct alone"),
            ({"mode": "async", "nodes": 3}, "direct", "is async"),
        ],
    )
    def test_unmeasured_exchange_is_refused(self, tmp_path, changes, exchange, message):
        with pytest.raises(UsageError, match=message.replace("", ".*")):
            fit(observed(calibrated_run(tmp_path, **changes)), exchange)


class TestCommand:
    def predicted(self, *arguments):
        return CliRunner().invoke(command, [str(argument) for argument in arguments])

    def test_direct_exchange_is_predicted_from_a_native_run(self, tmp_path):
        path = calibrated_run(tmp_path, direct=DIRECT)
        arguments = [path, "--nodes", "2,4,128", "--scaling", "weak", "--exchange", "direct"]
        document = json.loads(self.predicted(*arguments, "--json").output)
        assert (document["exchange"], document["validation"]) == ("direct", None)
        prediction, more, too_many = document["predictions"]
        expected = ring_step(0.03 + 0.0025 * BATCH, PAYLOAD, 2, 2, DIRECT, Link(12.5e6)).seconds
        assert prediction["step_seconds"] == pytest.approx(expected)
        assert prediction["step_seconds_low"] is None
        assert more["step_seconds"] > prediction["step_seconds"]
        assert too_many["step_seconds"] is None
        output = self.predicted(*arguments).output
        assert "with each other one (sync, --exchange direct)" in output
        assert "the direct exchange is for 64 workers at most" in output
        assert "with the exchange tried after it the model gives" in output

    def test_run_of_the_other_exchange_gives_computing_time(self, tmp_path):
        native, direct = calibrated_run(tmp_path), calibrated_run(tmp_path, name="two", exchange="direct", ring=DIRECT)
        output = self.predicted(native, direct, "--nodes", "2").output
        assert "two: trained with another exchange, so only what computing costs is taken from there" in " ".join(output.split())

    @pytest.mark.parametrize(
        ("options", "message"),
        [(["--exchange", "gloo"], "native, direct"), (["--exchange", "direct", "--topology", "ps"], "belongs to --topology ring")],
    )
    def test_unknown_exchange_is_refused(self, tmp_path, options, message):
        done = self.predicted(calibrated_run(tmp_path), *options)
        assert isinstance(done.exception, UsageError)
        assert message in str(done.exception)
