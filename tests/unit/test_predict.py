"""`trainer predict`: formulas by hand, fits of runs from a known model, band and command."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from predict_samples import BATCH, COMPUTE, PAYLOAD, RING, SERVER, calibrated_run, write

from crosstrain.cli.commands.predict import predict
from crosstrain.cli.group import invoke
from crosstrain.core.errors import UsageError
from crosstrain.report.analysis.cost_model import Compute, Link, Ring, Server, ring_step, server_step
from crosstrain.report.analysis.fit import fit, observe
from crosstrain.report.analysis.predictions import Point, Question, Validation, ValidationGroup, band_factor, read_validation, remarks
from crosstrain.report.analysis.predictions import predict as predicted
from crosstrain.report.runs.run import Run

BARE = Ring(wire_factor=1.0)


class TestFormulas:
    def test_ring_sends_2_n_minus_1_over_n_of_the_bytes(self):
        """4 workers, 8 MB, 1 MB/s: 2·3/4·8 = 12 s on the link; 6 messages of 0.5 s, half latency."""
        step = ring_step(1.0, 8e6, 4, 4, Ring(hop_seconds=0.25, wire_factor=1.0), Link(1e6, 0.25))
        assert step.components == {"compute": 1.0, "link": 12.0, "copying": 0.0, "latency": 3.0, "other": 0.0}
        assert (step.seconds, step.updates_per_second, step.limited_by) == (16.0, 1 / 16, "link")

    def test_hidden_time_fits_into_the_window(self):
        half = ring_step(4.0, 4e6, 2, 2, Ring(wire_factor=1.0, hidden_fraction=0.5), Link(1e6))
        assert (half.seconds, half.components["link"]) == (6.0, 2.0)
        long = ring_step(1.0, 4e6, 2, 2, Ring(wire_factor=1.0, hidden_fraction=0.5, window_fraction=0.25), Link(1e6))
        assert (long.seconds, long.components["link"]) == (4.75, 3.75)

    def test_single_worker_and_node_need_no_link(self):
        assert ring_step(1.0, 8e6, 1, 1, Ring(other_seconds=9.0), Link(1.0)).seconds == 1.0
        assert ring_step(1.0, 8e6, 2, 1, Ring(0.5, 1e-6, 1.0), Link(1.0, 100.0)).seconds == 1.0 + 8.0 + 1.0

    def test_single_worker_has_a_parameter_server(self):
        step = server_step(1.0, 1e6, 1, 1, 1, Server(0.5, 1e-6, 0.25, 1e-6, 1.0), Link(1.0, 100.0))
        assert step.seconds == pytest.approx(1.0 + (0.5 + 1.0) + (0.25 + 1.0))

    def test_fraction_of_a_core_slows_concurrent_service_only(self):
        limited = Server(0.5, 1e-6, 0.25, 1e-6, 1.0, slowdown=2.0)
        assert server_step(1.0, 1e6, 1, 1, 1, limited, Link(None)).seconds == pytest.approx(1.0 + 2 * (0.5 + 1.0) + (0.25 + 1.0))
        assert server_step(0.0, 1e6, 1, 1, 1, limited, Link(None)).seconds == pytest.approx((0.5 + 1.0) + (0.25 + 1.0))
        elsewhere = server_step(1.0, 1e6, 1, 1, 1, replace(limited, shared_cores=False), Link(None))
        assert elsewhere.seconds == pytest.approx(1.0 + (0.5 + 1.0) + (0.25 + 1.0))

    def test_server_link_is_the_bound(self):
        """20 MB of updates a second each way over 1 MB each: 20 updates; a local worker adds none."""
        crowd = server_step(0.1, 1e6, 1, 400, 1, Server(wire_factor=1.0, shared_cores=False), Link(20e6))
        assert crowd.updates_per_second == pytest.approx(20 + 10, rel=0.01)
        assert crowd.limited_by == "link"

    def test_server_cpu_is_the_bound_on_fast_links(self):
        crowd = server_step(0.1, 1e6, 1, 400, 1, Server(service_seconds=0.02, shared_cores=False), Link(None))
        assert crowd.updates_per_second == pytest.approx(50, rel=1e-3)
        assert crowd.limited_by == "server"

    def test_parameter_servers_share_the_bytes(self):
        single, double = (server_step(0.1, 1e6, 1, 400, ps, Server(wire_factor=1.0, shared_cores=False), Link(20e6)) for ps in (1, 2))
        assert double.updates_per_second / single.updates_per_second == pytest.approx(2.0, rel=0.1)
        few = server_step(0.1, 1e6, 1, 3, 2, Server(wire_factor=1.0, shared_cores=False), Link(20e6))
        assert few.components["link"] <= 2 * 1e6 / 20e6  # no worker's link carries more than the payload each way

    def test_parts_sum_to_the_step(self):
        for step in (
            ring_step(0.1, 1e6, 3, 3, RING, Link(1e7, 1e-3)),
            server_step(0.1, 1e6, 2, 3, 1, SERVER, Link(1e7, 1e-3)),
        ):
            assert math.fsum(step.components.values()) == pytest.approx(step.seconds)
        assert step.updates_per_second == pytest.approx(6 / step.seconds)


class TestFit:
    def test_sync_run_is_fitted_exactly(self, tmp_path):
        ring = Ring(0.001, 8e-9, hidden_fraction=0.25)
        model = fit([observe(Run(calibrated_run(tmp_path, ring=ring)))])
        for name in ("hop_seconds", "seconds_per_byte", "wire_factor", "hidden_fraction", "other_seconds"):
            assert getattr(model.ring, name) == pytest.approx(getattr(ring, name), rel=1e-6, abs=1e-12)
        assert model.compute.fixed_seconds == pytest.approx(COMPUTE.fixed_seconds)
        assert model.compute.seconds_per_example == pytest.approx(COMPUTE.seconds_per_example)
        assert model.measured == {"ring"}

    @pytest.mark.parametrize("ring", [RING, replace(RING, hidden_fraction=0.9, window_fraction=0.3)])
    def test_two_bandwidths_show_the_hidden_share(self, tmp_path, ring):
        runs = [calibrated_run(tmp_path, name=str(rate), bandwidth=f"{rate}mbit", ring=ring) for rate in (100, 1000)]
        ring_fit = fit([observe(Run(path)) for path in runs]).ring
        for name in ("seconds_per_byte", "hidden_fraction", "window_fraction"):
            assert getattr(ring_fit, name) == pytest.approx(getattr(ring, name))

    def test_difference_of_equal_nodes_is_averaged(self, tmp_path):
        path = calibrated_run(tmp_path)
        calibration = json.loads((path / "calibration.json").read_text())
        calibration["workers"][0]["compute_seconds"] *= 1.5
        write(path, "calibration.json", calibration)
        assert fit([observe(Run(path))]).compute.seconds(BATCH) == pytest.approx(1.25 * COMPUTE.seconds(BATCH), rel=1e-3)
        write(path, "job.json", {**json.loads((path / "job.json").read_text()), "cores_per_node": [0.3, 0.4]})
        assert fit([observe(Run(path))]).compute.seconds(BATCH) == pytest.approx(1.5 * COMPUTE.seconds(BATCH), rel=1e-3)

    def test_overhead_is_kept(self, tmp_path):
        path = calibrated_run(tmp_path, ring=Ring(0.001, 8e-9, other_seconds=0.03))
        assert fit([observe(Run(path))]).ring.other_seconds == pytest.approx(0.03)

    def test_async_run_is_fitted_and_extrapolated(self, tmp_path):
        runs = [calibrated_run(tmp_path, name=str(rate), mode="async", nodes=3, bandwidth=f"{rate}mbit") for rate in (50, 1000)]
        model = fit([observe(Run(path)) for path in runs])
        assert model.measured == {"ps"}
        assert (model.server.pulls_per_update, model.server.slowdown) == (2.0, 2.5)
        for nodes, rate in ((2, 200e6), (5, 200e6), (3, 50e6), (8, 1e9)):
            expected = server_step(COMPUTE.seconds(BATCH), PAYLOAD, 1, nodes, 1, SERVER, Link(rate / 8))
            step = server_step(model.compute.seconds(BATCH), PAYLOAD, 1, nodes, 1, model.server, Link(rate / 8))
            assert step.updates_per_second == pytest.approx(expected.updates_per_second, rel=0.02)

    def test_single_worker_gives_no_communication(self, tmp_path):
        model = fit([observe(Run(calibrated_run(tmp_path, nodes=1, bandwidth=None, cores_per_node=None)))])
        assert (model.measured, model.ring) == (frozenset(), Ring())

    def test_batch_of_one_cannot_be_halved(self, tmp_path):
        compute = fit([observe(Run(calibrated_run(tmp_path, batch_size=1)))]).compute
        assert (compute.seconds(1), compute.seconds_per_example) == (pytest.approx(COMPUTE.seconds(1)), 0.0)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model": "cnn"}, "model is logreg and cnn"),
            ({"cores_per_node": (0.5,)}, r"cores_per_node is \[0.4\] and \[0.5\]"),
            ({"payload_bytes": 7}, "1000000 and 7 bytes"),
        ],
    )
    def test_different_jobs_are_refused(self, tmp_path, change, message):
        first, second = calibrated_run(tmp_path), calibrated_run(tmp_path, name="two", **change)
        with pytest.raises(UsageError, match=message):
            fit([observe(Run(first)), observe(Run(second))])

    def test_run_without_calibration_is_refused(self, tmp_path):
        path = calibrated_run(tmp_path)
        (path / "calibration.json").unlink()
        with pytest.raises(UsageError, match=r"is not calibrated.*train a short one again"):
            observe(Run(path))


JUDGED = ValidationGroup(
    "tf", "sync", "w", ("a",), tuple(Point(nodes, 1e8, 32, 100.0, 100.0 * off) for nodes, off in ((2, 0.9), (4, 1.25)))
)


class TestBand:
    def test_errors_are_fractions_of_the_measurement(self):
        assert JUDGED.median_error == pytest.approx(0.175)
        assert JUDGED.largest_error == pytest.approx(0.25)
        assert JUDGED.factor == pytest.approx(1.25)

    @pytest.mark.parametrize(
        ("nodes", "bits_per_second", "doublings"),
        [(1, None, 0), (4, 1e8, 0), (8, 1e8, 1), (512, 1e8, 7), (4, 4e8, 2), (4, 5e7, 1), (16, 2e8, 3), (2, None, 0)],
    )
    def test_doubling_widens_the_band(self, nodes, bits_per_second, doublings):
        factor, doubled = band_factor(JUDGED, nodes, bits_per_second)
        assert (factor, doubled) == (pytest.approx(1.25 ** (1 + doublings)), doublings)

    def test_shipped_table_is_complete(self):
        for judged in read_validation().judged:
            assert judged.points
            assert len(judged.fitted_on) in (1, 2)
            assert judged.factor >= 1


class TestRows:
    def rows(self, tmp_path, *, judged=(JUDGED,), **question):
        fitted = fit([observe(Run(calibrated_run(tmp_path)))])
        request = Question(
            **{"nodes": (1, 4), "link": Link(1e8 / 8), "topology": "ring", "ps": 1, "scalings": ("weak", "strong"), **question}
        )
        rows = predicted(fitted, request, Validation("2025-01-01", "m", judged))
        return rows, remarks(fitted, request, rows)

    def test_speedup_is_relative_to_one_node(self, tmp_path):
        (alone, weak, whole, strong), _ = self.rows(tmp_path)
        assert (alone.speedup, whole.speedup) == (1.0, 1.0)
        assert weak.examples_per_second == pytest.approx(4 * BATCH / weak.step.seconds)
        assert weak.speedup == pytest.approx(4 * COMPUTE.seconds(BATCH) / weak.step.seconds, rel=1e-6)
        assert (strong.global_batch_size, strong.batch_size) == (2 * BATCH, BATCH / 2)
        assert strong.step.components["compute"] == pytest.approx(COMPUTE.seconds(BATCH / 2))
        assert strong.efficiency == pytest.approx(COMPUTE.seconds(2 * BATCH) / strong.step.seconds / 4)
        assert weak.factor == pytest.approx(1.25)

    def test_workers_without_an_example_have_no_prediction(self, tmp_path):
        rows, texts = self.rows(tmp_path, nodes=(512,))
        assert [row.step is None for row in rows] == [False, True]
        assert any("512 nodes would leave workers without an example of the global batch of 64" in text for text in texts)
        assert any("512 nodes are an extrapolation from 2" in text for text in texts)

    def test_unvalidated_topology_has_no_band(self, tmp_path):
        rows, texts = self.rows(tmp_path, topology="ps")
        assert {row.factor for row in rows} == {None}
        assert texts[0].startswith("No run was async: what messages cost is taken from the sync runs.")

    def test_latency_is_reported_as_unvalidated(self, tmp_path):
        assert any(text.startswith("Latency is unvalidated") for text in self.rows(tmp_path)[1])

    @pytest.mark.parametrize(("latency", "banded"), [(1e-6, True), (1.0, False)])
    def test_latency_bound_step_has_no_band(self, tmp_path, latency, banded):
        rows, texts = self.rows(tmp_path, nodes=(2, 4), link=Link(1e8 / 8, latency), scalings=("weak",))
        assert [row.factor is not None for row in rows] == [banded] * 2
        assert any("2 and 4 nodes have no band" in text for text in texts) != banded

    def test_different_nodes_have_no_band(self, tmp_path):
        fitted = fit([observe(Run(calibrated_run(tmp_path, cores_per_node=(0.5, 0.25))))])
        question = Question((2,), Link(1e8 / 8), "ring", 1, ("weak",))
        (row,) = predicted(fitted, question, Validation("2025-01-01", "m", (JUDGED,)))
        assert row.factor is None
        assert any("different numbers of cores (0.25, 0.5)" in text for text in remarks(fitted, question, [row]))

    def test_steps_short_for_scheduler_periods_are_reported(self, tmp_path):
        assert not [text for text in self.rows(tmp_path)[1] if "every 20 ms" in text]
        fitted = fit([observe(Run(calibrated_run(tmp_path, name="short", compute=Compute(0.0, 0.001))))])
        question = Question((2,), Link(None), "ring", 1, ("weak",))
        texts = remarks(fitted, question, predicted(fitted, question, Validation("", "", ())))
        assert any("a worker of a fitted run computes for only 32 ms a step" in text for text in texts)

    def test_more_servers_than_nodes_are_refused(self, tmp_path):
        with pytest.raises(UsageError, match="ps: got 3; allowed: at most one on each node, and 1 of --nodes is fewer"):
            self.rows(tmp_path, topology="ps", ps=3)


class TestCommand:
    def test_default_nodes_have_room_for_the_servers(self, tmp_path):
        path = calibrated_run(tmp_path)
        arguments = [path.name, "--out", str(tmp_path), "--topology", "ps", "--scaling", "weak", "--json"]
        for more, nodes in (([], [1, 2, 4, 8, 64, 512]), (["--ps", "3"], [4, 8, 64, 512])):
            done = CliRunner().invoke(predict, [*arguments, *more])
            assert done.exit_code == 0, done.output
            assert [row["nodes"] for row in json.loads(done.stdout)["predictions"]] == nodes

    @pytest.mark.parametrize(
        ("nodes", "expected"), [(2, [1, 2, 4, 8, 64, 512]), (3, [1, 2, 3, 4, 8, 64, 512]), (6, [1, 2, 4, 6, 8, 64, 512])]
    )
    def test_measured_number_of_nodes_is_predicted(self, tmp_path, nodes, expected):
        path = calibrated_run(tmp_path, nodes=nodes)
        predictions = json.loads(CliRunner().invoke(predict, [str(path), "--scaling", "weak", "--json"]).stdout)["predictions"]
        assert [row["nodes"] for row in predictions] == expected
        measured = predictions[expected.index(nodes)]
        assert measured["examples_per_second"] == pytest.approx(observe(Run(path)).examples_per_second, rel=0.01)

    def test_small_dataset_limits_the_global_batch(self, tmp_path):
        path = calibrated_run(tmp_path)
        before = observe(Run(path))
        write(path, "job.json", {**json.loads((path / "job.json").read_text()), "dataset": {"sizes": {"train": 48, "test": 4}}})
        observation = observe(Run(path))
        assert (before.global_batch_size, observation.global_batch_size) == (2 * BATCH, 48)
        assert observation.examples_per_second == pytest.approx(48 / observation.mean("step"))

    @pytest.mark.parametrize("whole", [5, 120, 1000])
    def test_batches_are_whole_numbers(self, tmp_path, whole):
        path = calibrated_run(tmp_path)
        write(path, "summary.json", {**json.loads((path / "summary.json").read_text()), "global_batch_size": whole})
        rows = json.loads(CliRunner().invoke(predict, [str(path), "--nodes", "1,2,3,7,64,512", "--json"]).stdout)["predictions"]
        for row in rows:
            assert isinstance(row["batch_size"], int)
            assert row["batch_size"] == -(-row["global_batch_size"] // row["workers"])
        text = CliRunner().invoke(predict, [str(path), "--nodes", "1,2,3,7,64,512", "--scaling", "strong"]).stdout
        batches = [line.split()[1] for line in text.splitlines() if line[:5].strip().isdecimal()]
        assert batches == [f"{row['batch_size']:,}" for row in rows if row["scaling"] == "strong"]

    def test_json_has_fit_and_predictions(self, tmp_path):
        path = calibrated_run(tmp_path)
        arguments = [path.name, "--out", str(tmp_path), "--nodes", "2,512", "--bandwidth", "10gbit", "--latency", "50us", "--json"]
        done = CliRunner().invoke(predict, arguments)
        document = json.loads(done.stdout)
        assert (document["runs"], document["topology"], document["latency_seconds"]) == (["one"], "ring", pytest.approx(50e-6))
        assert [row["nodes"] for row in document["predictions"]] == [2, 512, 2, 512]
        weak = document["predictions"][0]
        assert weak["step_seconds"] == pytest.approx(sum(weak["parts"].values()))
        assert document["fitted"]["ring"]["hop_seconds"] == pytest.approx(RING.hop_seconds)
        assert document["predictions"][3]["step_seconds"] is None

    def test_table_names_runs_units_and_limits(self, tmp_path):
        path = calibrated_run(tmp_path)
        text = CliRunner().invoke(predict, [str(path), "--nodes", "1,2,8", "--scaling", "weak"]).stdout
        lines = text.splitlines()
        assert lines[0] == "logreg on digits, tf, all-reduce round a ring (sync)"
        assert lines[1] == "Fitted to one (sync, 2 nodes, links of 100mbit)"
        assert [line.split()[0] for line in lines if line[:5].strip().isdecimal()] == ["1", "2", "8"]
        assert "(strong scaling)" not in text

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("--nodes", "2,x", "--nodes: got '2,x'; allowed: whole numbers from 1"),
            ("--nodes", "0", "--nodes: got '0'"),
            ("--bandwidth", "fast", "--bandwidth: got 'fast'; allowed: a positive number with kbit, mbit or gbit"),
            ("--latency", "5", "--latency: got '5'; allowed: a number with ns, us, ms or s"),
            ("--topology", "rin", "--topology: got 'rin'; allowed: ring, ps. Did you mean 'ring'?"),
            ("--ps", "0", "--ps: got '0'; allowed: a whole number of at least 1"),
            ("--scaling", "weka", "--scaling: got 'weka'; allowed: weak, strong, both. Did you mean 'weak'?"),
        ],
    )
    def test_invalid_values_are_named(self, tmp_path, capsys, option, value, message):
        assert invoke(["predict", str(calibrated_run(tmp_path)), option, value]) == 2
        assert message in capsys.readouterr().err

    def test_servers_require_their_topology(self, tmp_path, capsys):
        assert invoke(["predict", str(calibrated_run(tmp_path)), "--ps", "2"]) == 2
        assert "--ps: a ring has no parameter servers" in capsys.readouterr().err

    def test_repeated_run_is_refused(self, tmp_path, capsys):
        path = str(calibrated_run(tmp_path))
        assert invoke(["predict", path, path]) == 2
        assert "got the same run twice" in capsys.readouterr().err

    def test_fit_is_compared_with_its_run(self, tmp_path):
        path = calibrated_run(tmp_path)
        summary = json.loads((path / "summary.json").read_text())
        speed = observe(Run(path)).examples_per_second
        for reported, message in (
            (speed, r"\([+-]0%\)\. -"),
            (speed / 1.5, r"\([+-]0%\)\. In all it made [\d,]+: 33% of its time lay between steps"),
        ):
            write(path, "summary.json", {**summary, "examples_per_second": reported})
            assert re.search(self.FITS + message, self.text(path))

    def test_misfit_is_reported(self, tmp_path):
        """Steps that take a third of their computing time are outside any model."""
        path = calibrated_run(tmp_path, mode="async")
        summary = json.loads((path / "summary.json").read_text())
        for worker in summary["time_shares"]["workers"]:
            worker["step_seconds"] = COMPUTE.seconds(BATCH) / 3
        write(path, "summary.json", summary)
        assert re.search(self.FITS + r"\(-\d\d%\)\. It does not describe this run well", self.text(path))

    FITS = r"For one itself the model gives [\d,]+ examples/s while it trains; [\d,]+ were measured in its steps "

    @staticmethod
    def text(path):
        return " ".join(CliRunner().invoke(predict, [str(path)]).stdout.split())

    def test_shared_cores_make_the_fit_doubtful(self, tmp_path):
        path = calibrated_run(tmp_path)
        summary = json.loads((path / "summary.json").read_text())
        write(path, "summary.json", {**summary, "nodes_sharing_cores": 2})
        output = CliRunner().invoke(predict, [str(path)]).stdout
        assert "fit is doubtful, more nodes may be slower than fewer, and there is no band. Give each node its share" in output
        assert "No band: the model was not judged on anything like this." in output


def test_documented_table_is_the_shipped_one(repository: Path):
    text = (repository / "docs/scaling.md").read_text(encoding="utf-8")
    validation = read_validation()
    assert validation.measured_on in text
    for judged in validation.judged:
        assert f"| {judged.backend} | {judged.mode} | {len(judged.fitted_on)} | {len(judged.points)} | {judged.median_error:.1%} |" in text


def test_run_with_lost_loss_is_skipped_and_named(tmp_path, capsys):
    """Its speed is no training speed: it changes no prediction, and alone gives none."""
    paths = [
        str(calibrated_run(tmp_path, name=name, bandwidth=bandwidth))
        for name, bandwidth in (("a", "100mbit"), ("b", "200mbit"), ("lost", "400mbit"))
    ]
    lost = Path(paths[2])
    write(lost, "summary.json", {**json.loads((lost / "summary.json").read_text()), "non_finite_from_step": 3})
    assert invoke(["predict", *paths[:2], "--json"]) == 0
    expected = capsys.readouterr().out
    assert invoke(["predict", *paths, "--json"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, "lost (from step 3 on)" in captured.err) == (expected, True)
    assert invoke(["predict", paths[2]]) == 2
    assert "was not finite (NaN or infinite) from step 3 on" in capsys.readouterr().err


def test_run_with_contention_is_named(tmp_path, capsys):
    path = calibrated_run(tmp_path)
    assert invoke(["predict", str(path)]) == 0
    assert "CPU contention" not in capsys.readouterr().out
    summary = json.loads((path / "summary.json").read_text())
    summary["per_node"][0] |= {"starved_fraction": 0.9, "foreign_cpu_cores_used": 1.5, "cpu_cores_lost": 0.9, "cores_available": 2.0}
    write(path, "summary.json", summary)
    assert invoke(["predict", str(path)]) == 0
    assert f"CPU contention from other programs slowed {path.name}: speeds may be predicted too low." in capsys.readouterr().out
