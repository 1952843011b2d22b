"""Golden runs, settings and JSON documents from before a merge of product files.

A field that was added since is allowed; a field that existed keeps its name, place and value.
`golden/before-merges/commands.txt` has the command of each document `json/NN.json`, in its order.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from crosstrain.checkpoint import list_checkpoints, read_checkpoint
from crosstrain.conformance.runs import trainer

GOLDEN = Path(__file__).parent / "golden/before-merges"
COMMANDS = (GOLDEN / "commands.txt").read_text().splitlines()
SETTINGS = sorted(path.stem for path in (GOLDEN / "settings").glob("*.toml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(shutil.copytree(GOLDEN, tmp_path_factory.mktemp("before") / "runs"))


@pytest.fixture(autouse=True)
def in_old_folder(folder, monkeypatch):
    """Work in the folder of the runs, with no settings but the arguments."""
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("TRAINER_")]:
        monkeypatch.delenv(name)


def document(*arguments):
    done = trainer(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.replace(os.getcwd(), "/home/somebody"))


def restrict_to(actual, expected):
    """Return `actual` without mapping fields that are missing in `expected` at the same place."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        return {key: restrict_to(value, expected[key]) for key, value in actual.items() if key in expected}
    if isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        return [restrict_to(*pair) for pair in zip(actual, expected, strict=True)]
    return actual


def test_only_added_fields_are_ignored():
    expected = {"a": 1, "rows": [{"b": None}, 2], "gone": 3}
    assert restrict_to({"a": 2, "new": 0, "rows": [{"b": 0, "new": 1}, 2]}, expected) == {"a": 2, "rows": [{"b": 0}, 2]}
    assert restrict_to({"rows": [{"b": None}, 2, 3]}, expected) == {"rows": [{"b": None}, 2, 3]}


@pytest.mark.parametrize("number", range(1, len(COMMANDS) + 1), ids=COMMANDS)
def test_json_document_of_earlier_run_is_the_same(number):
    expected = json.loads((GOLDEN / f"json/{number:02}.json").read_text())
    assert restrict_to(document(*COMMANDS[number - 1].split()), expected) == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_earlier_file_are_the_same(name):
    expected = json.loads((GOLDEN / f"settings/{name}.json").read_text())
    assert restrict_to(document("run", "--config", f"settings/{name}.toml", "--print-config"), expected) == expected


@pytest.mark.parametrize(("run", "steps"), [("torch-sync", [18, 12, 6]), ("tf-async", [12, 6]), ("tf-sync", [12, 6])])
def test_checkpoints_of_earlier_run_load(run, steps):
    checkpoints = [read_checkpoint(path) for path in list_checkpoints(GOLDEN / "runs" / run)]
    assert [checkpoint.meta.step for checkpoint in checkpoints] == steps


def keys(document, path=""):
    """Return the path of every key of a JSON document.

    Elements of a list count as one, and so do figures that a short run may not have.
    """
    if isinstance(document, dict) and not path.endswith(".memory_pss_bytes"):
        return {path} | {key for name, value in document.items() for key in keys(value, f"{path}.{name}")}
    return {path}.union(*(keys(value, f"{path}[]") for value in document)) if isinstance(document, list) else {path}


@pytest.mark.thorough
@pytest.mark.parametrize("run", ["tf-sync", "torch-async"])
def test_json_document_of_new_run_has_all_fields(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    command = json.loads((GOLDEN / f"runs/{run}/job.json").read_text())["command"]
    expected = json.loads((GOLDEN / f"json/run-{run}.json").read_text())
    assert keys(expected) <= keys(document(*command[1:]))


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", "tf"])
def test_earlier_run_resumes(folder, backend, tmp_path):
    runs = shutil.copytree(folder / "runs", tmp_path / "runs")
    summary = document("run", "--resume", str(runs / "torch-sync"), "--backend", backend, "--steps", "24")
    assert (summary["state"], summary["steps"]) == ("succeeded", 24)
