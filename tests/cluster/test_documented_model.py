"""The model of docs/adding-a-model.md trains on both backends; the page's test passes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from digit_pairs import lines, text
from documents import write_package

from crosstrain.conformance.runs import trainer

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_test_printed_on_page_passes(repository, tmp_path):
    package = tmp_path / "package"
    written = write_package(repository / "docs/adding-a-model.md", package)
    (test,) = (path for path in written if path.name.startswith("test_"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    command += ["--basetemp", str(tmp_path / "runs"), str(test)]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    assert "4 passed, 3 skipped, 1 deselected" in done.stdout


@pytest.mark.slow
def test_model_of_ready_layers_trains_equally_on_both_backends(repository, tmp_path, monkeypatch):
    package = tmp_path / "package"
    write_package(repository / "docs/adding-a-model.md", package)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])]))
    losses = []
    for backend in ("torch", "tf"):
        options = ["--model", "my_models.convolutional", "--backend", backend, "--steps", "20", "--no-calibrate", "--out", str(tmp_path)]
        done = trainer("run", *options, "--name", backend, "--json")
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout)["final_train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.thorough
def test_a_model_with_arguments_trains_as_printed(repository, tmp_path, monkeypatch):
    package = tmp_path / "package"
    write_package(repository / "docs/adding-a-model.md", package)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])]))
    options = ["--model", "my_models.wide:large?dropout=0.2", "--backend", "torch", "--steps", "20", "--no-calibrate"]
    done = trainer("run", *options, "--out", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["eval"]["accuracy"] > 0.5


@pytest.mark.thorough
def test_a_model_of_sequences_trains_on_torch(repository, tmp_path, monkeypatch):
    package = tmp_path / "package"
    write_package(repository / "docs/adding-a-model.md", package)
    paths = [str(package), str(repository / "tests/sequences"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    options = ["--model", "my_models.tagger", "--data", "tagged", "--backend", "torch", "--epochs", "2", "--lr", "5", "--no-calibrate"]
    done = trainer("run", *options, "--out", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["eval"]["tag_accuracy"] > 0.5


BROKEN = """
from dataclasses import replace

from crosstrain.metrics import Metric

from ..translator import build as whole


def build(data):
    spec = whole(data)
    ratio = Metric("ratio", "length ratio", "higher", lambda sums: sums["bleu_hypothesis_length"] / sums["bleu_reference_lenght"])
    return replace(spec, objective=replace(spec.objective, metrics=(ratio,)))
"""


@pytest.mark.thorough
def test_translating_model_is_scored_by_custom_metric(repository, tmp_path, monkeypatch):
    """It stops the run, selects the best, and appears in the run, `evaluate` and tables.

    A broken one is refused.
    """
    package = tmp_path / "package"
    write_package(repository / "docs/adding-a-model.md", package)
    (package / "my_models/broken").mkdir()
    (package / "my_models/broken/__init__.py").write_text(BROKEN)
    (package / "my_models/broken/torch.py").write_text("from ..translator.torch import *")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])]))
    large = np.random.default_rng(1).random(len(lines("de"))) < 0.5  # German lines begin with a large letter at random
    (tmp_path / "digits.en").write_text(text(lines("en")))
    (tmp_path / "digits.de").write_text(text(line.capitalize() if up else line for line, up in zip(lines("de"), large, strict=True)))
    options = ["--data", f"parallel-text:{tmp_path}/digits:en-de?vocabulary=320,held-out=51", "--backend", "torch", "--no-calibrate"]
    options += ["--optimizer", "adam", "--lr", "0.01", "--batch-size", "64", "--eval-every", "50steps", "--keep-best", "caseless"]
    options += ["--checkpoint-every", "50steps", "--until", "caseless>=0.4", "--epochs", "20", "--out", str(tmp_path / "runs")]
    broken = trainer("run", "--model", "my_models.broken", *options)
    assert broken.returncode == 2
    assert "model: metric 'ratio' cannot be computed from" in broken.stderr
    assert "bleu_reference_lenght" in broken.stderr
    assert not (tmp_path / "runs").exists()
    done = trainer("run", "--model", "my_models.translator", *options, "--name", "own", "--json")
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert run["target_reached"] is True
    assert run["eval"]["caseless"] >= 0.4
    assert run["eval"]["caseless"] > run["eval"]["exact"]
    assert "right but for case 0." in done.stderr
    evaluated = json.loads(trainer("evaluate", str(tmp_path / "runs/own"), "--trust-run", "--json").stdout)
    assert evaluated["caseless"] == run["translated"]["caseless"]
    assert "right but for case" in trainer("compare", str(tmp_path / "runs/own"), str(tmp_path / "runs/own")).stdout
