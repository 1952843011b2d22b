"""Shell completion: closed lists as they are validated, and existing names."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from crosstrain.cli.group import COMMANDS, trainer
from crosstrain.core.job import Job
from crosstrain.core.plugins import available
from crosstrain.core.settings.job_fields import choices, flag_name
from crosstrain.core.settings.sources import shipped

TRAINER = Path(sys.executable).with_name("trainer")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Create a cache for all of these tests, which stores commands once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def private_cache(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def offered(*words):
    """Return the completions of the last word."""
    completion = ShellComplete(trainer, {}, "trainer", "_TRAINER_COMPLETE")
    return [item.value for item in completion.get_completions(list(words[:-1]), words[-1])]


CLOSED = [field for field in Job.model_fields if choices(field)]


def test_closed_lists_are_completed_as_validated():
    assert {"mode", "optimizer", "precision"} <= set(CLOSED)
    for command in (["run"], ["sweep"]):
        for field in CLOSED:
            assert offered(*command, flag_name(field), "") == list(choices(field)), field


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--model", ""], lambda: set(available("model"))),
        (["run", "--data", ""], lambda: set(available("dataset"))),
        (["run", "--backend", ""], lambda: {*available("backend"), "auto"}),
        (["evaluate", "--backend", ""], lambda: set(available("backend"))),
        (["evaluate", "--data", ""], lambda: set(available("dataset"))),
        (["evaluate", "--split", ""], lambda: {"test", "train"}),
        (["runs", ""], lambda: {"list", "show", "delete", "export"}),
        (["runs", "--mode", ""], lambda: {"sync", "async"}),
        (["runs", "list", "--state", "s"], lambda: {"starting", "succeeded"}),
        (["data", "prepare", "dig"], lambda: {"digits"}),
        (["configs", "show", "quick"], lambda: {"quickstart"}),
        (["co"], lambda: {"compare", "configs"}),
        (["run", "--mode", "sync", "--optim"], lambda: {"--optimizer"}),
        (["runs", "--lim"], lambda: {"--limit"}),
        (["run", "--lr", ""], set),
    ],
)
def test_values_and_names_are_completed(words, expected):
    assert set(offered(*words)) == expected()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Create a working directory with runs, one of a sweep, and other files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAINER_OUT", raising=False)
    for name in ("runs/apple", "runs/apricot", "other/avocado", "runs/$(touch x)", "runs/a sweep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "job.json").write_text("{}")
    (tmp_path / "runs/swept/batch_size=5").mkdir(parents=True)
    (tmp_path / "runs/swept/sweep.json").write_text("{}")
    (tmp_path / "runs/swept/batch_size=5/status.json").write_text("{}")
    (tmp_path / "runs/no-run").mkdir()
    (tmp_path / "archive").mkdir()
    (tmp_path / "mine.toml").write_text("")
    return tmp_path


RUNS = [
    ["watch"],
    ["compare"],
    ["report"],
    ["explain"],
    ["predict"],
    ["evaluate"],
    ["runs", "show"],
    ["run", "--resume"],
    ["run", "--like"],
]


@pytest.mark.parametrize("command", RUNS)
def test_runs_and_folders_complete_run_arguments(folder, command):
    assert set(offered(*command, "ap")) == {"apple", "apricot"}
    assert {"apple", "apricot", "swept", "archive", "runs"} <= set(offered(*command, ""))
    assert {"mine.toml", "no-run", "$(touch x)", "a sweep"}.isdisjoint(offered(*command, ""))  # a shell would execute the third
    assert offered(*command, "swept/") == ["swept/batch_size=5"]


def test_formats_of_every_backend_are_completed():
    assert set(offered("export", "apple", "--format", "")) == {"safetensors", "keras", "torch", "savedmodel", "tf-checkpoint"}


def test_checkpoints_of_typed_run_are_completed(folder):
    for name in ("step-000000500", "step-000001000", ".draft"):
        (folder / "runs/apple/checkpoints" / name).mkdir(parents=True)
    for command in ("evaluate", "export", "translate"):
        assert offered(command, "apple", "--checkpoint", "") == ["step-000001000", "step-000000500"]
        assert offered(command, "runs/apple", "--checkpoint", "step-000000") == ["step-000000500"]
        assert offered(command, "apricot", "--checkpoint", "") == []
        assert offered(command, "--checkpoint", "") == []


def test_runs_come_from_named_folder(folder, monkeypatch):
    assert offered("watch", "--out", "other", "av") == ["avocado"]
    monkeypatch.setenv("TRAINER_OUT", "other")
    assert offered("watch", "av") == ["avocado"]


def test_completion_of_many_runs_is_limited(folder):
    for number in range(1200):
        (folder / f"runs/many-{number}").mkdir()
        (folder / f"runs/many-{number}/job.json").touch()
    assert offered("watch", "apple") == ["apple"]
    assert len(offered("watch", "many")) == 1000


def test_completion_works_without_cache_folder(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "mine.toml"))
    assert offered("watch", "--interv") == ["--interval"]


def test_shipped_configurations_and_files_are_completed(folder):
    for command in (["run", "--config"], ["sweep"], ["submit", "slurm"], ["manifest", "kubernetes"]):
        assert {*shipped(), "mine.toml"} <= set(offered(*command, "")), command
        assert offered(*command, "quick") == ["quickstart"]


def complete_in_bash(folder, *words):
    """Return what bash offers for the last word, with the script that `trainer --help` names."""
    script = f"""
PATH={shlex.quote(str(TRAINER.parent))}:$PATH
eval "$(_TRAINER_COMPLETE=bash_source trainer)"
COMP_WORDS=({shlex.join(["trainer", *words])}); COMP_CWORD={len(words)}
_trainer_completion trainer
printf "%s\\n" "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=folder, timeout=300, check=True)
    return done.stdout.split()


@pytest.mark.thorough
def test_bash_offers_the_same(folder):
    assert complete_in_bash(folder, "run", "--precision", "") == ["fp32", "bf16", "fp16"]
    assert complete_in_bash(folder, "watch", "ap") == ["apple", "apricot"]
    assert complete_in_bash(folder, "runs", "s") == ["show"]


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"state": [], "commands": {"run": {}}}', '{"state": null}'])
def test_damaged_or_old_cache_is_rebuilt(cache, damage):
    assert offered("run", "--mode", "") == ["sync", "async"]
    (file,) = (cache / "crosstrain").iterdir()
    file.write_text(damage)
    assert offered("run", "--mode", "") == ["sync", "async"]
    assert len(file.read_text()) > 1000


def test_cached_completion_imports_no_command(folder, cache):
    """Time depends on the machine; imports do not."""
    request = {"_TRAINER_COMPLETE": "bash_complete", "COMP_WORDS": "trainer run --mode ", "COMP_CWORD": "3"}
    command = [sys.executable, "-X", "importtime", "-P", "-m", "crosstrain.cli.main"]
    for _ in range(2):  # the first may have a new search path, and fills the cache
        done = subprocess.run(command, env={**os.environ, **request}, capture_output=True, text=True, cwd=folder, check=False)
        assert done.stdout.split() == ["plain,sync", "plain,async"]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "crosstrain.cli.completion" in imported
    assert {"pydantic", "numpy", "crosstrain.core.job", "crosstrain.cli.options"}.isdisjoint(imported)


def test_every_command_can_be_cached():
    for name in COMMANDS:
        assert "--help" in offered(name, "--h"), name
