"""The model of docs/adding-a-model.md trains on both frameworks, and the test that the page shows passes."""

import json
import os
import subprocess
import sys

import pytest
from documents import write_package

from crosstrain.conformance.runs import trainer

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_the_pages_own_test_passes(repository, tmp_path):
    package = tmp_path / "package"
    written = write_package(repository / "docs/adding-a-model.md", package)
    (test,) = (path for path in written if path.name.startswith("test_"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    command += ["--basetemp", str(tmp_path / "runs"), str(test)]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    assert "4 passed, 3 skipped, 1 deselected" in done.stdout


def test_a_network_of_ready_layers_trains_alike_on_both_frameworks(repository, tmp_path, monkeypatch):
    package = tmp_path / "package"
    write_package(repository / "docs/adding-a-model.md", package)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])]))
    losses = []
    for backend in ("torch", "tf"):
        asked = ["--model", "my_models.convolutional", "--backend", backend, "--steps", "20", "--no-calibrate", "--out", str(tmp_path)]
        done = trainer("run", *asked, "--name", backend, "--json")
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout)["final_train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_model_of_sequences_trains_on_torch(repository, tmp_path, monkeypatch):
    package = tmp_path / "package"
    write_package(repository / "docs/adding-a-model.md", package)
    paths = [str(package), str(repository / "tests/sequences"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    asked = ["--model", "my_models.tagger", "--data", "tagged", "--backend", "torch", "--epochs", "2", "--lr", "5", "--no-calibrate"]
    done = trainer("run", *asked, "--out", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["eval"]["tag_accuracy"] > 0.5
