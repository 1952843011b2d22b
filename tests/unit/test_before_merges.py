"""Runs, settings and JSON documents that were written before the files of the product were merged: all are read as they were.

`golden/before-merges/commands.txt` has the command of each document `json/NN.json`, in its order.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from crosstrain.checkpoint import list_checkpoints, read_checkpoint
from crosstrain.core.process import python

KEPT = Path(__file__).parent / "golden/before-merges"
COMMANDS = (KEPT / "commands.txt").read_text().splitlines()
SETTINGS = sorted(path.stem for path in (KEPT / "settings").glob("*.toml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(shutil.copytree(KEPT, tmp_path_factory.mktemp("before") / "kept"))


def trainer(folder, *arguments):
    command = [*python("crosstrain.cli.main"), *arguments, "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.replace(str(folder), "/home/somebody"))


@pytest.mark.parametrize("number", range(1, len(COMMANDS) + 1), ids=COMMANDS)
def test_json_document_of_earlier_run_is_the_same(folder, number):
    expected = json.loads((KEPT / f"json/{number:02}.json").read_text())
    assert trainer(folder, *COMMANDS[number - 1].split()) == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_earlier_file_are_the_same(folder, name):
    expected = json.loads((KEPT / f"settings/{name}.json").read_text())
    assert trainer(folder, "run", "--config", f"settings/{name}.toml", "--print-config") == expected


@pytest.mark.parametrize(("run", "steps"), [("torch-sync", [18, 12, 6]), ("tf-async", [12, 6]), ("tf-sync", [12, 6])])
def test_checkpoints_of_earlier_run_load(run, steps):
    found = [read_checkpoint(path) for path in list_checkpoints(KEPT / "runs" / run)]
    assert [checkpoint.meta.step for checkpoint in found] == steps


def keys(document, path=""):
    """Return the path of every key of a JSON document; the elements of a list are one, and so are figures that a short run may lack."""
    if isinstance(document, dict) and not path.endswith(".memory_pss_bytes"):
        return {path} | {key for name, value in document.items() for key in keys(value, f"{path}.{name}")}
    return {path}.union(*(keys(value, f"{path}[]") for value in document)) if isinstance(document, list) else {path}


@pytest.mark.thorough
@pytest.mark.parametrize("run", ["tf-sync", "torch-async"])
def test_json_document_of_new_run_has_the_same_fields(tmp_path, run):
    command = json.loads((KEPT / f"runs/{run}/job.json").read_text())["command"]
    expected = json.loads((KEPT / f"json/run-{run}.json").read_text())
    assert keys(trainer(tmp_path, *command[1:])) == keys(expected)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", "tf"])
def test_earlier_run_resumes(folder, backend, tmp_path):
    runs = shutil.copytree(folder / "runs", tmp_path / "runs")
    summary = trainer(tmp_path, "run", "--resume", str(runs / "torch-sync"), "--backend", backend, "--steps", "24")
    assert (summary["state"], summary["steps"]) == ("succeeded", 24)
