"""The page of experiments and its generator; `python -m benchmarks.experiments` runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from documents import shown_commands
from run_samples import summary_of, sync_run

from benchmarks.experiments.__main__ import PAGE, parse, sweep_arguments, write_page
from benchmarks.experiments.catalog import EXPERIMENTS, Compared, Experiment
from benchmarks.experiments.page import COLUMNS, fill, measured_text, places
from benchmarks.experiments.results import Point, Results, above_the_others, figure, ratio, read_results, share_of_the_others
from crosstrain.cli.commands.sweep import make_grid, sweep
from crosstrain.cli.options import given_options
from crosstrain.core.settings.sweeps import plan

NODE = {"cores_available": 2, "cpu_model": "A processor", "memory_total_bytes": 8_000_000_000, "kernel": "6.1", "python": "3.13"}


def plan_points(arguments):
    """Return the points of a `trainer sweep` command line."""
    with sweep.make_context("sweep", list(arguments)) as context:
        grid = make_grid(context.params["config"], context.params["grids"], context.params["repeats"])
        return plan(grid, {name: value for name, value in given_options(context).items() if name != "out"}, {}, context.params["config"])


def summary(**changes):
    node = {
        "train_seconds": 2.0,
        "cpu_seconds": 4.0,
        "cpu_cores_used": {"mean": 0.5, "max": 1.0},
        "memory_rss_bytes": {"mean": 1e9, "max": 2e9},
        "network_sent_bytes": 6e6,
        "network_sent_bytes_per_second": 3e6,
    }
    figures = {"steps_per_second": 100.0, "examples_per_second": 1000.0, "run_seconds": 10.0, "eval": {"accuracy": 0.5, "loss": 1.0}}
    return {**figures, "nodes": 3, "staleness": None, "per_node": [node, node, node], **changes}


def place(page, name):
    """Return the text between the markers of a place."""
    return page.split(f"<!-- begin {name} -->")[1].split(f"<!-- end {name} -->")[0]


def point(settings, job=None, **changes):
    return Point(settings, Path(), {"steps": None, "epochs": 2, **(job or {})}, summary(**changes))


def test_page_has_place_and_command_of_each_experiment():
    page = PAGE.read_text(encoding="utf-8")
    assert sorted(places(page)) == sorted([*EXPERIMENTS, "machine"])
    shown = shown_commands(PAGE)
    for name, experiment in EXPERIMENTS.items():
        assert fill(page, name, "x") != page
        assert ["sweep", experiment.config, *experiment.options] in shown


def test_every_sweep_that_the_page_shows_is_valid():
    shown = [arguments for command, *arguments in shown_commands(PAGE) if command == "sweep" and "--resume" not in arguments]
    assert len(shown) > len(EXPERIMENTS)
    for arguments in shown:
        assert plan_points(arguments)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_sweep_has_compared_and_drawn_points(name):
    experiment = EXPERIMENTS[name]
    points = [point(planned.settings, nodes=planned.job.nodes) for planned in plan_points([experiment.config, *experiment.options])]
    results = Results(points, len(points))
    for comparison in experiment.compared:
        assert comparison.value(results) is not None, comparison.text
    assert results.select(**(experiment.pictured or {}))
    assert set(experiment.figures) <= set(COLUMNS)


def test_figures_of_a_summary(tmp_path):
    summary_fields = summary_of(sync_run(tmp_path))
    assert figure(summary_fields, "per_node.1.cpu_cores_used.mean") == summary_fields["per_node"][1]["cpu_cores_used"]["mean"]
    assert figure(summary_fields, "per_node.*.memory_rss_bytes.max") == [
        node["memory_rss_bytes"]["max"] for node in summary_fields["per_node"]
    ]
    assert figure(summary_fields, "per_node.2.cpu_seconds") is None
    assert figure(summary_fields, "staleness.mean") is None
    for label in set(COLUMNS) - {"communicating", "waiting for peers"}:
        path, _ = COLUMNS[label]
        head = path.split(".")[0]
        assert head in summary_fields, label


def test_calibrated_run_has_time_shares(tmp_path):
    path = sync_run(tmp_path, name="one")
    entry = {"name": "one", "settings": {}, "state": "succeeded", "job": {}}
    (tmp_path / "sweep.json").write_text(json.dumps({"schema": 1, "points": [entry]}))
    summary_fields = summary_of(path)
    (path / "summary.json").write_text(json.dumps({**summary_fields, "time_shares": None}))
    assert read_results(tmp_path).points[0].summary["shares"] is None
    nodes = [{"step_seconds": 0.5, "communicate_seconds": part, "peers_seconds": 0.25} for part in (0.125, 0.25)]
    (path / "summary.json").write_text(json.dumps({**summary_fields, "time_shares": {"nodes": nodes}}))
    (point,) = read_results(tmp_path).points
    assert point.summary["shares"] == {"communicating": [0.25, 0.5], "waiting": [0.5, 0.5]}
    assert "| 25 % / 50 % |" in measured_text(Experiment("quickstart", ("communicating",)), Results([replaced(point)], 1), [])


def replaced(point):
    """Add the fields that a job of a sweep has."""
    return Point(point.settings, point.path, {"steps": None, "epochs": 20}, point.summary)


def test_ratios():
    results = Results([point({"mode": "sync"}, run_seconds=4.0), point({"mode": "async"}, run_seconds=3.0)], 2)
    assert ratio("run_seconds", {"mode": "async"}, {"mode": "sync"})(results) == 0.75
    assert ratio("run_seconds", {"mode": "async"}, {"mode": "none"})(results) is None
    nodes = [{**summary()["per_node"][0], "cpu_seconds": value} for value in (6.0, 1.0, 3.0)]
    uneven = Results([point({}, per_node=nodes)], 1)
    assert share_of_the_others("cpu_seconds")(uneven) == 1.5
    assert above_the_others("cpu_seconds")(uneven) == 3.0
    assert share_of_the_others("network_received_bytes")(uneven) is None


def test_measured_place_has_table_and_comparison():
    experiment = Experiment(
        "eecs598-batch",
        ("run time", "examples/s", "staleness", "CPU cores"),
        (
            Compared("time at 256 over 64", 0.5, ratio("run_seconds", {"batch_size": 256}, {"batch_size": 64})),
            Compared("accuracy", 0.99, ratio("eval.accuracy", {"batch_size": 256}, {"batch_size": 64})),
            Compared("what is missing", 2.0, ratio("run_seconds", {"batch_size": 32}, {"batch_size": 64})),
        ),
    )
    runs = [
        point({"batch_size": 64, "seed": 0}, run_seconds=10.0),
        point({"batch_size": 64, "seed": 1}, run_seconds=14.0),
        point({"batch_size": 256, "seed": 0}, run_seconds=18.0),
    ]
    assert measured_text(experiment, Results(runs, 4), ["figures/x-loss.svg"]) == (
        "| batch_size | seeds | epochs | run time | examples/s | CPU cores |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| 64 | 2 | shortened to 2 from 40 | 12.0 s ± 2.83 s | 1,000 ± 0 | 0.50 ± 0.00 / 0.50 ± 0.00 / 0.50 ± 0.00 |\n"
        "| 256 | 1 | shortened to 2 from 40 | 18.0 s | 1,000 | 0.50 / 0.50 / 0.50 |\n"
        "\n"
        "1 of 4 points are missing.\n"
        "\n"
        "| ratio | reference | here (shortened) | same direction |\n"
        "| --- | ---: | ---: | --- |\n"
        "| time at 256 over 64 | 0.50 | 1.50 | no |\n"
        "| accuracy | 0.99 | 1.00 | yes |\n"
        "| what is missing | 2.00 | - | - |\n"
        "\n"
        "![x-loss](figures/x-loss.svg)"
    )
    by_steps = Results([point({"batch_size": 64}, {"steps": 9, "epochs": None})], 1)
    assert "shortened to 9 from 40 epochs" in measured_text(experiment, by_steps, [])
    assert "Not measured" in measured_text(experiment, Results([], 4), [])


@pytest.mark.thorough
def test_page_is_filled_from_runs(tmp_path):
    """Two runs in the folder of a sweep, with pictures; the other places stay unchanged."""
    folder = tmp_path / "runs/cs744-alexnet-2-vs-3"
    entries = []
    for nodes in (2, 3):
        path = sync_run(folder, name=f"nodes={nodes}", steps=100)
        (path / "env.json").write_text(json.dumps({"schema": 1, "nodes": [NODE, NODE]}))
        job = json.loads((path / "job.json").read_text())
        entries.append({"name": path.name, "settings": {"nodes": nodes}, "state": "succeeded", "job": job})
    entries.append({"name": "nodes=4", "settings": {"nodes": 4}, "state": "failed", "job": entries[0]["job"]})
    (folder / "sweep.json").write_text(json.dumps({"schema": 1, "points": entries}))
    assert len(read_results(folder).points) == 2
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/page.md"
    before = PAGE.read_text(encoding="utf-8")
    page.write_text(before)
    write_page(page, tmp_path / "runs")
    after = page.read_text(encoding="utf-8")
    assert "2 cores, A processor, 8.0 GB, Linux 6.1" in after
    assert "| examples/s on three nodes over two | 1.50 | 1.00 | no |" in after
    assert "1 of 3 points are missing." in after
    drawn = sorted(path.name for path in (tmp_path / "docs/figures").iterdir())
    assert drawn
    assert all(f"](figures/{name})" in after for name in drawn)
    for name in set(EXPERIMENTS) - {"cs744-alexnet-2-vs-3"}:
        assert place(after, name) == place(before, name)


def test_page_without_the_place_is_refused():
    with pytest.raises(ValueError, match="0 places for 'x'"):
        fill("text", "x", "y")


def test_shorter_divides_epochs_or_steps():
    assert sweep_arguments("eecs598-batch", Path("o"), 10) == ["eecs598-batch", "--epochs", "4", "--out", "o", "--name", "eecs598-batch"]
    assert sweep_arguments("cs744-alexnet-2-vs-3", Path("o"), 1000)[1:3] == ["--steps", "1"]
    assert "--epochs" not in sweep_arguments("eecs598-batch", Path("o"), 1)


@pytest.mark.parametrize("arguments", [["--only", "eecs598-bach"], ["--shorter", "0"], ["--shorter", "x"]])
def test_invalid_request_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    assert "eecs598-batch" in capsys.readouterr().err if "--only" in arguments else True
