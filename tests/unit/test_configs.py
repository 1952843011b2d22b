"""Every configuration that is shipped is a valid job, and says what it is and how it is run."""

from __future__ import annotations

import re
import shlex

import pytest

from crosstrain.cli.group import COMMANDS
from crosstrain.cli.options import given_options
from crosstrain.cli.run_command import run
from crosstrain.core.config_files import shipped
from crosstrain.core.layers import resolve
from crosstrain.core.plugins import find, load
from crosstrain.data.resolve import resolve as find_data

EXPERIMENTS = {"cs744-alexnet", "eecs598-cnn", "eecs598-cnn-checkpoint", "eecs598-fastest-90", "hw2-cnn-batch", "quickstart"}


def comment(name):
    return "\n".join(line for line in shipped()[name].read_text(encoding="utf-8").splitlines() if line.startswith("#"))


def commands(name):
    """Each `trainer …` line of the comment, without the remark behind it."""
    return [shlex.split(line, comments=True) for line in re.findall(r"^#     trainer (.*)$", comment(name), re.MULTILINE)]


def test_the_experiments_are_there():
    assert set(shipped()) == EXPERIMENTS


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_it_is_a_job_whose_names_exist(name):
    resolved = resolve({}, {}, name)
    job = resolved.job
    assert find("backend", job.backend)
    assert load(find("model", job.model), "model")
    assert find_data(job.data).source.name == job.data
    assert {"lr", "model", "data"} <= {field for field, source in resolved.sources.items() if "shipped" in source}


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_the_commands_in_its_comment_are_valid(name):
    shown = commands(name)
    assert ["run", "--config", name] in shown
    for command, *arguments in shown:
        assert command in COMMANDS
        if command != "run" or "--resume" in arguments:
            continue
        with run.make_context("run", arguments) as context:
            assert context.params["config"] == name
            resolve(given_options(context), {}, name)


@pytest.mark.parametrize("name", sorted(EXPERIMENTS - {"quickstart"}))
def test_it_says_what_the_reference_measured_and_how_real_data_is_used(name):
    text = comment(name)
    assert re.search(r"reference.*\n?.*\d", text)
    assert re.search(r"--data (svhn|mnist|cifar10)\S* --data-dir FOLDER", text)


def test_the_two_whole_runs_differ_in_their_checkpoints_alone():
    plain, with_checkpoints = (resolve({}, {}, name).job.model_dump() for name in ("eecs598-cnn", "eecs598-cnn-checkpoint"))
    assert {field for field, value in plain.items() if with_checkpoints[field] != value} == {"checkpoint_every", "keep_best"}
