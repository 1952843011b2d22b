"""`trainer explain` on real runs: one that overfits, and one that predicts a longer one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from imported_later import ImportedLater
from PIL import Image

from crosstrain.conformance.runs import run_job, trainer

pytestmark = pytest.mark.cluster


def answered(path, *options):
    done = trainer("explain", str(path), *options, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["questions"]


def few_digits(folder):
    """Sixty handwritten digits to train with and 300 others to test with, as pictures."""
    digits = ImportedLater("sklearn.datasets").load_digits()
    for number, index in enumerate(np.random.default_rng(0).permutation(len(digits.images))[:360]):
        place = folder / ("train" if number < 60 else "test") / str(digits.target[index])
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[index] * 15.9).astype(np.uint8)).save(place / f"{index}.png")
    return folder


@pytest.mark.thorough
def test_a_cnn_on_sixty_digits_overfits(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))
    data = f"image-folder:{few_digits(tmp_path / 'few')}?size=8"
    learnt = {"model": "cnn", "data": data, "optimizer": "adam", "lr": 0.003, "epochs": 150, "eval_every": "10epochs"}
    run = run_job(tmp_path / "runs", backend="torch", **learnt)
    answers = answered(run.path)
    learning = answers["learning"]
    assert learning["state"] == "overfitting", learning
    assert learning["text"].startswith("overfitting: test loss ")
    assert learning["train_change"] < 0 < learning["rise"]
    assert learning["last_train_loss"] < 0.1 * learning["last_loss"]
    assert answers["training_set"]["examples"] == 60
    assert answers["training_set"]["bytes"] == 60 * (3 * 8 * 8 + 8)  # pixels in three colours, and a label of eight bytes
    names = {file["name"]: file["bytes"] for file in answers["checkpoint_files"]["files"]}
    newest = run.path / "checkpoints" / answers["checkpoint_files"]["newest"]
    assert names["parameters.safetensors"] == (newest / "parameters.safetensors").stat().st_size
    assert {"optimizer.safetensors", "checkpoint.json", "manifest.json"} <= set(names)


@pytest.mark.slow
def test_short_run_predicts_duration_of_longer_run(tmp_path):
    """Ten times the updates; within twice the band, as the machine of the tests is shared."""
    job = {"backend": "torch", "model": "cnn", "data": "digits", "nodes": 2, "eval_every": "1epoch"}
    short, long = (run_job(tmp_path, **job, epochs=epochs, name=name) for name, epochs in (("short", 20), ("long", 200)))
    duration = answered(short.path, "--planned-epochs", "200")["duration"]
    assert duration["planned_steps"] == long.summary["steps"]
    assert duration["evaluations"] == 200
    half = duration["total_seconds_high"] - duration["total_seconds"]
    assert abs(duration["total_seconds"] - long.summary["total_seconds"]) <= 2 * half, (duration, long.summary)
