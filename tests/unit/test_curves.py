"""Curves on a common grid, against points computed by hand."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from click.testing import CliRunner
from run_samples import a_job, async_run, open_run, sync_run

from crosstrain.cli.commands.compare import compare
from crosstrain.core.errors import UsageError
from crosstrain.records.store.schema import EvalRecord, StepRecord
from crosstrain.report.pages.export import curves
from crosstrain.report.runs.run import Run


def write_curve_run(folder, name, losses, *, seconds=1.0, examples=10, accuracies=()):
    """Write a run with one update per group, each `seconds` long and of `examples`.

    `accuracies` are those of evaluations after the first updates.
    """
    writer = open_run(a_job(folder, name=name))
    for step, loss in enumerate(losses):
        writer.step(StepRecord(step, 1, 0, seconds * (step + 1), seconds, examples, (loss,), (0.05,)))
    for step, accuracy in enumerate(accuracies, 1):
        writer.evaluation(EvalRecord(step, 0.1, seconds * step + 0.5, 0.1, "test", 360, 0.5, {"accuracy": accuracy}, step))
    writer.write_status("succeeded", exit_code=0)
    writer.close()
    return writer.path


def curve_of_run(curve_set, name, smooth=False):
    for run in curve_set.to_json()["runs"]:
        if run["run"] == name:
            return run["smoothed" if smooth else "raw"]
    raise AssertionError(name)


def test_losses_share_a_grid_and_end_with_their_run(tmp_path):
    paths = [write_curve_run(tmp_path, "short", [4.0, 3.0, 2.0]), write_curve_run(tmp_path, "long", [8.0, 7.0, 6.0, 5.0, 4.0])]
    result = curves([*map(Run, paths)], "loss", "steps", points=5)
    assert result.grid.tolist() == [0, 1, 2, 3, 4]
    assert curve_of_run(result, "short") == [4.0, 3.0, 2.0, None, None]
    assert curve_of_run(result, "long") == [8.0, 7.0, 6.0, 5.0, 4.0]


def test_run_is_interpolated_between_points(tmp_path):
    paths = [write_curve_run(tmp_path, "slow", [4.0, 2.0], seconds=2.0), write_curve_run(tmp_path, "fast", [4.0, 3.0, 2.0, 1.0])]
    result = curves([*map(Run, paths)], "loss", "seconds", points=4)
    assert result.grid.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert curve_of_run(result, "slow") == [None, 4.0, 3.0, 2.0]
    assert curve_of_run(result, "fast") == [4.0, 3.0, 2.0, 1.0]


def test_examples_are_counted_to_the_end_of_each_update(tmp_path):
    paths = [write_curve_run(tmp_path, "ten", [4.0, 2.0]), write_curve_run(tmp_path, "twenty", [4.0, 2.0], examples=20)]
    result = curves([*map(Run, paths)], "loss", "examples", points=4)
    assert result.grid.tolist() == [10, 20, 30, 40]
    assert (curve_of_run(result, "ten"), curve_of_run(result, "twenty")) == ([4.0, 2.0, None, None], [None, 4.0, 3.0, 2.0])


def test_smoothing_starts_without_a_bias(tmp_path):
    result = curves([Run(write_curve_run(tmp_path, "one", [4.0, 2.0, 6.0]))], "loss", "steps", smooth=0.5, points=3)
    assert curve_of_run(result, "one") == [4.0, 2.0, 6.0]
    expected = [4.0, (0.5 * 4 + 2) / 1.5, (0.25 * 4 + 0.5 * 2 + 6) / 1.75]
    assert curve_of_run(result, "one", smooth=True) == pytest.approx(expected)


def test_diverged_loss_is_not_a_gap(tmp_path):
    result = curves([Run(write_curve_run(tmp_path, "one", [4.0, math.nan, 2.0]))], "loss", "steps", points=3)
    assert curve_of_run(result, "one") == [4.0, "NaN", 2.0]


@pytest.mark.parametrize(("over", "grid"), [("steps", [1, 2, 3]), ("examples", [10, 20, 30]), ("seconds", [1.5, 2.5, 3.5])])
def test_accuracy_comes_from_evaluations(tmp_path, over, grid):
    result = curves([Run(write_curve_run(tmp_path, "one", [1.0] * 3, accuracies=[0.25, 0.5, 1.0]))], "accuracy", over, points=3)
    assert result.grid.tolist() == grid
    assert curve_of_run(result, "one") == [0.25, 0.5, 1.0]


@pytest.mark.parametrize("over", ["steps", "examples", "seconds"])
def test_rate_is_mean_since_previous_point(tmp_path, over):
    paths = [write_curve_run(tmp_path, "one", [1.0] * 5, seconds=0.5)]
    assert curve_of_run(curves([*map(Run, paths)], "steps_per_second", over, points=5), "one") == [None, *[pytest.approx(2.0)] * 4]
    assert curve_of_run(curves([*map(Run, paths)], "examples_per_second", over, points=5), "one") == [None, *[pytest.approx(20.0)] * 4]


def test_rate_counts_the_updates_of_all_workers(tmp_path):
    """Two workers whose groups overlap: together 16 updates in a second."""
    result = curves([Run(async_run(tmp_path))], "steps_per_second", "seconds", points=2)
    first, last = result.grid.tolist()
    rate = curve_of_run(result, "two")[1]
    assert rate * (last - first) == pytest.approx(15)


def test_unrecorded_quantity_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--curves: got 'accuracy', of which none of these runs has anything recorded"):
        curves([Run(write_curve_run(tmp_path, "one", [1.0]))], "accuracy", "steps")


def test_command_prints_csv_and_json(tmp_path):
    paths = [str(sync_run(tmp_path)), str(async_run(tmp_path))]
    arguments = [*paths, "--curves", "loss", "--over", "steps", "--smooth", "0.9", "--points", "16"]
    result = CliRunner().invoke(compare, arguments, catch_exceptions=False)
    lines = list(csv.DictReader(io.StringIO(result.output)))
    assert list(lines[0]) == ["steps", "one", "one smoothed", "two", "two smoothed"]
    assert [float(line["steps"]) for line in lines] == list(range(16))
    assert [line["one"] == "" for line in lines] == [False] * 10 + [True] * 6
    document = json.loads(CliRunner().invoke(compare, [*arguments, "--json"], catch_exceptions=False).output)
    assert [run["run"] for run in document["runs"]] == ["one", "two"]
    assert [None if line["one"] == "" else float(line["one"]) for line in lines] == document["runs"][0]["raw"]
    assert (document["quantity"], document["over"], document["smooth"]) == ("loss", "steps", 0.9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--curves", "los"], r"--curves: got 'los'; allowed: loss, accuracy, .*Did you mean 'loss'\?"),
        (["--curves", "loss", "--over", "step"], r"--over: got 'step'; allowed: steps, examples, seconds\. Did you mean 'steps'\?"),
        (["--curves", "loss", "--markdown"], r"--curves: goes with"),
        (["--smooth", "0.5"], r"--over, --smooth and --points: say what a curve is like"),
        (["--json", "--csv"], r"--csv cannot be combined with --json; choose one of"),
        (["--layout", "row"], r"--layout: got 'row'; allowed: auto, columns, rows\. Did you mean 'rows'\?"),
        (["--metric", "acuracy"], r"--metric: got 'acuracy'; .*Did you mean 'accuracy'"),
        (["--metric", "memory,seconds"], r"--metric: got 'seconds'; .*Did you mean .*'init_seconds'"),
    ],
)
def test_invalid_curve_options_are_refused(tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(compare, [str(sync_run(tmp_path)), *arguments], catch_exceptions=False)


@pytest.mark.parametrize(("runs", "most"), [(1, "at most 1,000,000"), (2, "at most 500,000 each for 2 runs")])
def test_too_many_points_are_refused_before_reading(tmp_path, runs, most):
    paths = [sync_run(tmp_path), async_run(tmp_path)][:runs]
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(compare, [*map(str, paths), "--curves", "loss", "--points", "99999999999"], catch_exceptions=False)
    assert (
        str(caught.value) == f"--points: got '99999999999'; allowed: {most}; the records themselves are written by `trainer runs export`."
    )
    assert caught.value.exit_code == 2
    assert len(curves([*map(Run, paths)], "loss", "seconds", points=100_000).grid) == 100_000
