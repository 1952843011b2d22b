"""Runs recorded before metrics were named: every reader takes them as runs with an accuracy."""

import json
import shutil
from pathlib import Path

import pytest

from crosstrain.checkpoint import list_checkpoints, peek_meta
from crosstrain.conformance.runs import trainer
from crosstrain.metrics import LOSS
from crosstrain.metrics.base import ACCURACY
from crosstrain.records.store.run_directory import RunReader

WRITTEN_BEFORE = Path(__file__).parent / "golden/run-before-metrics"


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(WRITTEN_BEFORE, tmp_path / "runs/before-metrics"))


def test_old_evaluations_have_an_accuracy(run):
    lines = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]
    assert all("accuracy" in line and "metrics" not in line for line in lines)
    reader = RunReader(run)
    assert reader.metrics() == (ACCURACY.info, LOSS)
    assert [record.metrics for record in reader.evals()] == [{"accuracy": line["accuracy"]} for line in lines]
    assert [record.figure("loss") for record in reader.evals()] == [line["loss"] for line in lines]


def test_old_checkpoint_has_its_figures(run):
    (path,) = list_checkpoints(run)
    assert peek_meta(path).metrics == {name: RunReader(run).summary()["eval"][name] for name in ("loss", "accuracy")}


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (["runs", "show"], "test accuracy               0.8"),
        (["compare"], "accuracy"),
        (["compare", "--curves", "accuracy", "--points", "3", "--json"], '"quantity": "accuracy"'),
        (["watch"], "test accuracy               0.8"),
        (["export", "--describe"], "evals.jsonl"),
        (["explain"], "of a worker's step: computation"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_commands_read_old_runs(run, command, output):
    done = trainer(*command, str(run))
    assert (done.returncode, output in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.thorough
def test_lists_and_tables_have_old_runs(run, tmp_path):
    listed = json.loads(trainer("runs", "list", "--out", str(run.parent), "--where", "accuracy>=0.8", "--json").stdout)["runs"]
    assert [row["run"] for row in listed] == ["before-metrics"]
    done = trainer("runs", "export", str(run), "--what", "evals", "--output", str(tmp_path / "evals.csv"))
    assert done.returncode == 0, done.stderr
    assert {"loss", "accuracy"} <= set((tmp_path / "evals.csv").read_text().splitlines()[0].split(","))
