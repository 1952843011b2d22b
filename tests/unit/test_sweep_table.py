"""The table at the end of a sweep: a row per point of any grid, with folded repeats."""

from __future__ import annotations

import re

import pytest
from comparison_samples import made, written

from crosstrain.cli.commands.sweep import points_conclusion, points_text
from crosstrain.core.settings.sweeps import Grid, plan
from crosstrain.report.analysis.conclusion import conclude
from crosstrain.report.analysis.sentences import as_text, closing_text, render_conclusion
from crosstrain.report.runs.run import finished_run


def swept(folder, grid, **flags):
    """Write a run for each point, at 1000, 2000, … examples/s; return the paths with settings."""
    base = {} if "backend" in grid.axes else {"backend": "torch"}
    points = plan(grid, {**base, **flags}, {}, None)
    runs = [
        made(point.name, folder=folder, summary={"examples_per_second": 1000.0 * number}, **point.job.model_dump(exclude={"out", "name"}))
        for number, point in enumerate(points, start=1)
    ]
    written(folder, *runs)
    return [(folder / point.name, point.settings) for point in points]


def speeds(text):
    """Return the rows of the table of speed, header first: settings of the point and examples/s."""
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if "examples/s" in line and "relative" in line)
    rows = [re.split(r"\s{2,}", line.strip()) for line in (lines[first], *lines[first + 2 : lines.index("", first)])]
    return [row[: rows[0].index("examples/s") + 1] for row in rows]


@pytest.mark.parametrize(
    ("field", "values", "flags"),
    [
        ("tensorboard", [False, True], {}),
        ("calibrate", [False, True], {}),
        ("mllog", [False, True], {}),
        ("monitor", [False, True], {}),
        ("keep", [2, 10], {}),
        ("keep_best", ["accuracy", "loss"], {}),
        ("launcher", ["auto", "local"], {}),
        ("mlflow_experiment", ["one", "two"], {}),
        ("bandwidth", ["100mbit", "1gbit"], {"nodes": 1}),
        ("beta1", [0.8, 0.9], {"optimizer": "sgd"}),
    ],
)
def test_repeats_of_different_points_are_separate_rows(tmp_path, field, values, flags):
    points = swept(tmp_path, Grid({field: values}, (), 2), **flags)
    shown = [str(value).lower() for value in values]
    assert speeds(points_text(points, repeats=True, width=None)) == [
        [field, "runs", "examples/s"],
        [shown[0], "2", "2,000 ± 12,706"],
        [shown[1], "2", "3,000 ± 12,706"],
    ]


def test_points_are_ordered_by_their_values(tmp_path):
    points = swept(tmp_path, Grid({"bandwidth": ["1gbit", "300mbit", "0.5gbit"], "eval_every": ["100steps", "20steps"]}), nodes=2)
    assert [row[:2] for row in speeds(points_text(points, repeats=False, width=None))[1:]] == [
        [bandwidth, every] for bandwidth in ("300mbit", "0.5gbit", "1gbit") for every in ("20steps", "100steps")
    ]


def test_runs_without_repeats_are_rows(tmp_path):
    points = swept(tmp_path, Grid({"seed": [10, 9], "tensorboard": [True, False]}))
    text = points_text(points, repeats=False, width=None)
    assert speeds(text) == [
        ["seed", "tensorboard", "examples/s"],
        ["9", "false", "4,000"],
        ["9", "true", "3,000"],
        ["10", "false", "2,000"],
        ["10", "true", "1,000"],
    ]
    assert "Several runs" not in text


def test_points_of_cases_with_missing_settings_are_distinct(tmp_path):
    cases = [{"nodes": 1}, {"nodes": 2, "cores_per_node": [1, 0.5]}]
    points = swept(tmp_path, Grid({}, cases, 2))
    assert [row[:3] for row in speeds(points_text(points, repeats=True, width=None))] == [
        ["nodes", "cores_per_node", "runs"],
        ["1", "-", "2"],
        ["2", "1,0.5", "2"],
    ]


def test_repeat_under_another_kernel_is_separate(tmp_path):
    points = swept(tmp_path, Grid({"batch_size": [8]}, (), 2))
    other_run = made("other", batch_size=8, seed=2, node={"kernel": "7.0.0"})
    written(tmp_path, other_run)
    points.append((tmp_path / "other", {"batch_size": 8, "seed": 2}))
    assert [row[:3] for row in speeds(points_text(points, repeats=True, width=None))] == [
        ["batch_size", "kernel", "runs"],
        ["8", "6.1.0", "2"],
        ["8", "7.0.0", "1"],
    ]


def test_seeds_alone_are_one_row_with_their_number(tmp_path):
    text = points_text(swept(tmp_path, Grid(repeats=3)), repeats=True, width=None)
    assert [row[:1] for row in speeds(text)] == [["run"], ["seed ×3"]]


def test_scaling_series_is_named_by_its_batch(tmp_path):
    cases = [{"nodes": 1, "batch_size": 60}, {"nodes": 2, "batch_size": 30}]
    lines = points_text(swept(tmp_path, Grid({}, cases, 2)), repeats=True, width=None).splitlines()
    (first,) = (index for index, line in enumerate(lines) if line.startswith("scaling"))
    rows = [re.split(r"\s{2,}", line.strip()) for line in (lines[first], *lines[first + 2 : lines.index("", first)])]
    assert rows == [
        ["scaling", "nodes", "speed-up", "efficiency"],
        ["strong, global batch 60", "1", "1.00x", "100%"],
        ["2", "1.50x", "75%"],
    ]


@pytest.mark.parametrize(
    ("grid", "flags"),
    [
        ({"batch_size": [16, 32]}, {"nodes": 2}),
        ({"lr": [0.1, 0.2], "mode": ["sync", "async"]}, {"nodes": 2}),
        ({"mode": ["async", "sync"], "backend": ["torch", "tf"]}, {"nodes": 3}),
        ({"nodes": [1, 2, 3]}, {}),
    ],
    ids=str,
)
def test_sweep_and_comparison_agree(tmp_path, grid, flags):
    points = swept(tmp_path, Grid(grid, (), 2), **flags)
    conclusion = conclude([finished_run(path) for path, _ in points])
    assert points_conclusion(points) == conclusion.to_json(render_conclusion(conclusion).sentences)
    assert points_text(points, repeats=True, width=None).startswith(as_text(render_conclusion(conclusion), None))


def test_sweep_ends_with_conclusion_and_requested_tables(tmp_path, capsys):
    points = swept(tmp_path, Grid({"batch_size": [16, 32], "lr": [0.1, 0.2], "backend": ["torch", "tf"]}, (), 3))
    words = render_conclusion(conclude([finished_run(path) for path, _ in points]))
    answer, every = (points_text(points, repeats=True, width=None, tables=tables) for tables in (False, True))
    assert answer == as_text(words, None)
    assert answer.count("\n") < 40
    assert every.startswith(answer)
    assert len(speeds(every)) == 1 + 8
    short, long = (points_text(points, repeats=True, width=120, height=height, tables=False) for height in (100, 10))
    assert long == short + closing_text(words, 120)  # a table longer than the terminal is followed by the conclusion again
    assert "examples/s" in points_text(points[:1], repeats=True, width=None, tables=False)  # one run has no conclusion
