"""Every shipped configuration is a valid job at all of its points, with valid documentation."""

from __future__ import annotations

import re
import shlex

import pytest

from crosstrain.cli.commands.run import run
from crosstrain.cli.commands.sweep import make_grid, sweep
from crosstrain.cli.group import COMMANDS
from crosstrain.cli.options import given_options
from crosstrain.core.plugins import find, forward_plugin, load
from crosstrain.core.settings.sources import resolve, shipped
from crosstrain.core.settings.sweeps import Grid, plan, read_grid
from crosstrain.core.update_rules import check_model_width
from crosstrain.data.base import DataInfo, TextFeatures
from crosstrain.data.columns import ColumnSpec
from crosstrain.data.store.location import resolve as find_data
from crosstrain.models.build import build_model

RUNS = {
    "cs744-alexnet",
    "cs744-logreg-async",
    "cs744-logreg-sync",
    "debian-text-tiny",
    "eecs598-cnn",
    "eecs598-cnn-checkpoint",
    "eecs598-fastest-90",
    "numbers-tiny",
    "quickstart",
    "w251-transformer",
}
SWEEPS = {
    "cs744-alexnet-2-vs-3": 2,
    "cs744-logreg-batch-sweep": 10,
    "eecs598-batch": 3,
    "eecs598-nodes": 3,
    "eecs598-plain-vs-ddp": 6,
    "eecs598-profile": 2,
    "eecs598-two-procs": 2,
    "heterogeneous": 8,
    "hw2-100-epochs": 2,
    "hw2-cnn-batch": 6,
    "hw2-logreg-batch": 5,
    "hw2-logreg-nodes": 3,
}
"""Those that bring a grid, with its points."""

EXPERIMENTS = RUNS | set(SWEEPS)


def comment(name):
    return "\n".join(line for line in shipped()[name].read_text(encoding="utf-8").splitlines() if line.startswith("#"))


def commands(name):
    """Return each `trainer …` line of the comment, without the remark after it."""
    return [shlex.split(line, comments=True) for line in re.findall(r"^#     trainer (.*)$", comment(name), re.MULTILINE)]


def test_shipped_configs_are_the_experiments():
    assert set(shipped()) == EXPERIMENTS


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_config_is_job_with_existing_names(name):
    resolved = resolve({}, {}, name)
    job = resolved.job
    assert find("backend", job.backend)
    assert load(find("model", job.model), "model")
    assert find_data(job.data).source.name == job.data
    assert {"lr", "model", "data"} <= {field for field, source in resolved.sources.items() if "shipped" in source}


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_commands_in_its_comment_are_valid(name):
    shown = commands(name)
    assert (["sweep", name] if name in SWEEPS else ["run", "--config", name]) in shown
    for command, *arguments in shown:
        assert command in COMMANDS
        if command == "sweep":
            with sweep.make_context("sweep", arguments) as context:
                assert context.params["config"] == name
                grid = make_grid(name, context.params["grids"], context.params["repeats"])
                plan(grid, given_options(context), {}, name)
        if command == "run" and "--resume" not in arguments:
            with run.make_context("run", arguments) as context:
                assert context.params["config"] == name
                resolve(given_options(context), {}, name)


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_all_points_are_valid_jobs(name):
    grid = read_grid(name)
    if name in RUNS:
        assert grid == Grid()
        return
    points = plan(grid, {}, {}, name)
    assert len(points) == SWEEPS[name]
    for point in points:
        load(find("model", point.job.model), "model")
        forward_plugin(point.job.model, point.job.backend)


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_page_of_experiments_names_it(repository, name):
    assert f"`{name}`" in (repository / "docs/experiments.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(EXPERIMENTS - {"quickstart", "numbers-tiny", "debian-text-tiny"}))
def test_comment_has_reference_figures_and_real_data(name):
    text = comment(name)
    assert re.search(r"reference.*\n?.*\d", text)
    assert re.search(r"--data ((svhn|mnist|cifar10)\S* --data-dir FOLDER|parallel-text:PREFIX)", text)


def test_checkpoint_experiment_differs_only_in_checkpoints():
    plain, with_checkpoints = (resolve({}, {}, name).job.model_dump() for name in ("eecs598-cnn", "eecs598-cnn-checkpoint"))
    assert {field for field, value in plain.items() if with_checkpoints[field] != value} == {"checkpoint_every", "keep_best"}


def test_experiments_of_both_modes_differ_only_in_mode():
    sync, asynchronous = (resolve({}, {}, f"cs744-logreg-{mode}").job.model_dump() for mode in ("sync", "async"))
    assert {field for field, value in sync.items() if asynchronous[field] != value} == {"mode"}


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_noam_schedule_has_model_width(name):
    job = resolve({}, {}, name).job
    if job.schedule == "noam":
        pieces = ColumnSpec("source", "uint16", (None,)), ColumnSpec("target", "uint16", (None,))
        data = DataInfo("made", {"train": 1, "test": 1}, pieces, TextFeatures({"source": 9, "target": 9}))
        check_model_width(job, build_model(job.model, data).width)
