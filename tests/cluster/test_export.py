"""Each export is loaded by plain libraries and gives the same logits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path

import export_loaders
import numpy as np
import psutil
import pytest
from model_checkpoints import save_model
from own_models import importable, write_model

from crosstrain.checkpoint import read_checkpoint
from crosstrain.conformance.runs import run_job
from crosstrain.data.store.stored_dataset import open_dataset

pytestmark = pytest.mark.cluster

SHAPES = {"logreg": (1, 8, 8), "cnn": (3, 32, 32), "alexnet": (3, 63, 63), "resnet18": (3, 64, 64)}


def trainer(*arguments, code=0, **variables):
    command = [sys.executable, "-m", "crosstrain.cli.main", *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    return done


class Model:
    """A model's checkpoint, test images, and our logits of them."""

    def __init__(self, folder, name):
        self.name = name
        self.run = folder
        self.images, self.pixels = folder / "images.npy", folder / "pixels.npy"
        self.checkpoint = save_model(folder, name, SHAPES[name])
        pixels = np.random.default_rng(1).integers(0, 256, (5, *SHAPES[name]), dtype=np.uint8)
        np.save(self.pixels, pixels)
        np.save(self.images, ((np.arange(256, dtype=np.float64) / 255.0 - 0.5) / 0.25).astype(np.float32)[pixels])

    @cached_property
    def logits(self):
        """Logits of our forward function, computed on first use."""
        return self.load(export_loaders.OURS, self.run)

    def load(self, program, folder):
        """Run a loader in the folder of an export; return what it saved."""
        target = self.run / "loaded.npy" if "np.savez" not in program else self.run / "loaded.npz"
        target.unlink(missing_ok=True)
        names = {"IMAGES": self.images, "PIXELS": self.pixels, "LOGITS": target, "CHECKPOINT": self.checkpoint, "MODEL": self.name}
        script = "".join(f"{name} = {str(value)!r}\n" for name, value in names.items()) + program
        if program is not export_loaders.OURS:
            script += export_loaders.ENDING
        done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return np.load(target)

    def export(self, name):
        """Return the folder of an export, made on first use; no temporary file of it is left."""
        folder = self.run / "exports" / f"step-000000123-{name}"
        if not folder.exists():
            temporary = self.run / "tmp"
            temporary.mkdir(exist_ok=True)
            trainer("export", self.run, "--format", name, TMPDIR=str(temporary))
            assert list(temporary.iterdir()) == []
        return folder

    def is_ours(self, logits):
        difference = np.linalg.norm(logits - self.logits) / np.linalg.norm(self.logits)
        return logits.shape == (5, 10) and logits.dtype == np.float32 and difference <= 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models by name, made on first use."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = Model(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


SMALL, LARGE, NORMALISED = (pytest.param(name, marks=pytest.mark.slow) for name in ("logreg", "alexnet", "resnet18"))


class TestFormats:
    """Tests of one class run in one process, which makes each export once."""

    @pytest.mark.thorough
    @pytest.mark.parametrize("name", [SMALL, "cnn", LARGE, NORMALISED])
    def test_plain_tensorflow_serves_the_savedmodel(self, models, name):
        model = models(name)
        assert model.is_ours(model.load(export_loaders.SAVEDMODEL, model.export("savedmodel")))

    @pytest.mark.thorough
    @pytest.mark.parametrize("name", [SMALL, "cnn", LARGE, NORMALISED])
    def test_plain_torch_runs_the_program(self, models, name):
        model = models(name)
        assert model.is_ours(model.load(export_loaders.TORCH_PROGRAM, model.export("torch")))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["alexnet", "resnet18"])
    def test_torchvision_loads_the_state_dict_strictly(self, models, name):
        model = models(name)
        assert model.is_ours(model.load(export_loaders.TORCHVISION, model.export("torch")))

    @pytest.mark.parametrize(
        ("name", "format_name", "program"),
        [
            pytest.param("logreg", "tf-checkpoint", export_loaders.TF_CHECKPOINT, marks=pytest.mark.slow),
            ("logreg", "safetensors", export_loaders.SAFETENSORS),
            ("resnet18", "safetensors", export_loaders.SAFETENSORS),  # with buffers
            pytest.param("resnet18", "tf-checkpoint", export_loaders.TF_CHECKPOINT, marks=pytest.mark.slow),
        ],
    )
    def test_exported_weights_are_bit_identical(self, models, name, format_name, program):
        model = models(name)
        weights = model.load(program, model.export(format_name))
        checkpoint = read_checkpoint(model.checkpoint)
        expected = {**checkpoint.parameters, **checkpoint.buffers}
        assert sorted(weights) == sorted(expected)
        assert all(np.array_equal(weights[key], value) for key, value in expected.items())

    @pytest.mark.parametrize(
        ("name", "format_name"),
        [
            ("logreg", "safetensors"),
            pytest.param("resnet18", "savedmodel", marks=pytest.mark.slow),
            pytest.param("logreg", "tf-checkpoint", marks=pytest.mark.slow),
            pytest.param("resnet18", "torch", marks=pytest.mark.slow),
        ],
    )
    def test_export_readme_code_runs(self, models, name, format_name):
        folder = models(name).export(format_name)
        (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr


SIDES = (8, 28, 32, 33, 64)
"""Down to a single pixel behind the last stage of ResNet-18."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "format_name", "name"),
    [
        ("torch", "torch", "logreg"),
        ("torch", "torch", "cnn"),
        ("torch", "torch", "resnet18"),
        pytest.param("torch", "torch", "alexnet", marks=pytest.mark.slow),
        pytest.param("tf", "savedmodel", "cnn", marks=pytest.mark.slow),
        pytest.param("tf", "savedmodel", "resnet18", marks=pytest.mark.slow),
        pytest.param("tf", "tf-checkpoint", "resnet18", marks=pytest.mark.slow),
        ("-", "safetensors", "resnet18"),
    ],
)
def test_export_accepts_every_image_and_batch_size(tmp_path, backend, format_name, name):
    """The small models in grey too."""
    shapes = [(channels, side, side) for side in SIDES for channels in ((1, 3) if name in ("logreg", "cnn") else (3,))]
    checkpoints = [save_model(tmp_path / str(shape), name, shape) for shape in shapes]
    command = [sys.executable, "-c", export_loaders.EVERY_SIZE, str(tmp_path), backend, format_name, *map(str, checkpoints)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"exported {len(checkpoints)}\n"


class TestTheCommand:
    @pytest.fixture
    def run(self, tmp_path):
        save_model(tmp_path / "run", "logreg", (1, 8, 8), step=100)
        save_model(tmp_path / "run", "logreg", (1, 8, 8), step=200)
        return tmp_path / "run"

    @pytest.mark.thorough
    def test_export_default_is_newest_sound_checkpoint(self, run):
        newest = run / "checkpoints/step-000000200/parameters.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1])
        done = trainer("export", run, "--format", "safetensors", "--json")
        assert "step-000000200" in done.stderr
        assert "parameters.safetensors has" in done.stderr
        printed = json.loads(done.stdout)
        assert (printed["step"], printed["format"]) == (100, "safetensors")
        assert printed["path"] == str(run / "exports/step-000000100-safetensors")
        assert {file["path"] for file in printed["files"]} == {"model.safetensors", "model.json", "README.md"}
        assert all(file["bytes"] == (Path(printed["path"]) / file["path"]).stat().st_size for file in printed["files"])

    @pytest.mark.thorough
    def test_export_copied_checkpoint(self, run, tmp_path):
        (run / "checkpoints/step-000000100").rename(tmp_path / "mine")
        trainer("export", tmp_path / "mine", "--format", "safetensors")
        described = json.loads((tmp_path / "mine-safetensors/model.json").read_text())
        assert (described["model"], described["classes"], described["updates"]) == ("logreg", 10, 100)
        assert (described["mean"], described["std"], described["input_shape"]) == ([0.5], [0.25], [1, 8, 8])

    @pytest.mark.thorough
    def test_export_unnamed_classes_have_numbers(self, run, tmp_path):
        trainer("export", run, "--format", "safetensors", "-o", tmp_path / "numbered")
        described = json.loads((tmp_path / "numbered/model.json").read_text())
        assert described["class_names"] == [str(number) for number in range(10)]
        assert (described["input_name"], described["output_name"]) == ("images", "logits")

    def test_export_overwrites_no_file(self, run, tmp_path):
        target = tmp_path / "taken"
        target.mkdir()
        done = trainer("export", run, "--format", "safetensors", "-o", target, code=2)
        assert f"--output: '{target}' exists, and nothing is overwritten" in done.stderr
        assert list(target.iterdir()) == []

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--format", "savedmodle"], r"--format: got 'savedmodle'; allowed: safetensors, keras, savedm.*Did you mean 'savedmodel'\?"),
            ([], r"--format: give one of safetensors, keras, savedmodel, tf-checkpoint, torch; or --describe"),
            (["--format", "torch", "--describe"], r"--format: give one of"),
            (["--format", "safetensors", "-o", "/proc/no/where"], r"--output: '/proc/no' cannot be written"),
        ],
    )
    def test_export_wrong_request_is_explained(self, run, arguments, message):
        assert re.search(message, trainer("export", run, *arguments, code=2).stderr)

    @pytest.mark.thorough
    def test_export_without_run_is_refused(self, tmp_path):
        for arguments in (["--format", "torch"], ["--describe"]):
            assert "allowed: the path of a run directory" in trainer("export", tmp_path / "none", *arguments, code=2).stderr
        assert "is not a run directory" in trainer("export", tmp_path, "--format", "torch", code=2).stderr

    @pytest.mark.thorough
    def test_export_changed_model_is_refused(self, tmp_path):
        path = save_model(tmp_path, "logreg", (1, 9, 7))
        described = json.loads((path / "checkpoint.json").read_text())
        described["data"]["input_shape"] = [1, 8, 8]
        from crosstrain.checkpoint.files import digest_of, write_manifest

        (path / "checkpoint.json").write_text(json.dumps(described))
        write_manifest(path, {file.name: digest_of(file) for file in path.iterdir() if file.name != "manifest.json"})
        done = trainer("export", tmp_path, "--format", "safetensors", code=2)
        assert "its parameters differ in dense.weight" in done.stderr
        assert not (tmp_path / "exports").exists()

    @pytest.mark.thorough
    def test_export_describes_every_file(self, run):
        trainer("export", run, "--format", "safetensors")
        for name in "job.json", "calibration.json":
            (run / name).write_text("{}")
        (run / "mine.txt").write_text("mine")
        rows = json.loads(trainer("export", run, "--describe", "--json").stdout)
        files = {row["path"]: row for row in rows["files"]}
        assert set(files) == {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
        assert files["mine.txt"] == {"path": "mine.txt", "bytes": 4, "purpose": "not written by trainer"}
        assert [path for path, row in files.items() if row["purpose"] == "not written by trainer"] == ["mine.txt"]
        assert rows["bytes"] == sum(row["bytes"] for row in rows["files"])
        assert rows["damaged"] == {}
        text = trainer("export", run / "checkpoints/step-000000100", "--describe").stdout
        assert re.search(r"^optimizer\.safetensors +2\.\d kB +what the optimiser remembers", text, re.MULTILINE)
        assert text.splitlines()[-1].startswith("4 files, ")

    def test_export_to_other_folder_is_refused(self, tmp_path):
        (tmp_path / "mine.txt").write_text("mine")
        done = trainer("export", tmp_path, "--describe", code=2)
        assert "no file of a run" in done.stderr

    def test_export_describes_damage(self, run):
        (run / "checkpoints/step-000000200/optimizer.safetensors").unlink()
        assert "optimizer.safetensors is missing" in trainer("export", run, "--describe").stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def python_without_torch(tmp_path_factory, make_environment):
    """An interpreter that has TensorFlow and no torch."""
    return make_environment(tmp_path_factory.mktemp("environment"), ["torch", "functorch"])


class TestWithoutAFramework:
    @pytest.mark.thorough
    def test_export_format_reports_its_requirements(self, python_without_torch, tmp_path):
        save_model(tmp_path, "logreg", (1, 8, 8))
        command = [str(python_without_torch), "-m", "crosstrain.cli.main", "export", str(tmp_path)]
        done = subprocess.run([*command, "--format", "torch"], capture_output=True, text=True, timeout=100)
        assert done.returncode == 2
        assert "needs the package 'torch', which is not installed. Install it with: pip install 'crosstrain[torch]'" in done.stderr
        assert subprocess.run([*command, "--format", "safetensors"], capture_output=True, timeout=100).returncode == 0

    def test_evaluate_on_another_backend_is_reported(self, python_without_torch, tmp_path):
        save_model(tmp_path, "logreg", info=open_dataset("digits").info)
        command = [str(python_without_torch), "-m", "crosstrain.cli.main", "evaluate", str(tmp_path), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert "backend: tf, because torch, which trained this model, is not installed" in done.stderr
        assert json.loads(done.stdout)["backend"] == "tf"


@pytest.mark.slow
def test_export_refusal_prints_only_its_reason(tmp_path, monkeypatch):
    """Output of a framework's import is not part of the message."""
    monkeypatch.setenv("PYTHONPATH", importable(tmp_path)["PYTHONPATH"])
    model = write_model(tmp_path, "only_torch", "torch")
    run_job(tmp_path, name="run", backend="torch", model=model, data="digits", steps=2, save_final=True)
    done = trainer("export", tmp_path / "run", "--model", model, "--format", "savedmodel", code=2)
    assert done.stderr.startswith(f"error: --model: '{model}' has no forward function on backend 'tf'; it has one on: torch.")
    assert len(done.stderr.splitlines()) == 1


NAMES = ("type", "forward.train", "forward.a.run", "x/0_.y-z", "9", "Training.buffers", "save", "to.running_mean")

ODD = f"""
import math
from crosstrain.models.base import ModelSpec, ParameterSpec

NAMES = {NAMES}


def build(data):
    weight = ParameterSpec("eval.to", (data.classes, math.prod(data.input_shape)), bound=0.1)
    shifts = (ParameterSpec(name, (data.classes,), bound=0.1) for name in NAMES)
    return ModelSpec("odd", (weight, *shifts), data.input_shape, data.classes)
"""

ODD_FORWARD = """
from . import NAMES


def forward(parameters, x, context):
    return {product} + sum(parameters[name] for name in NAMES)
"""

TORCH_PRODUCT = "x.flatten(1) @ parameters['eval.to'].T"
TF_PRODUCT = "__import__('tensorflow').linalg.matmul(x[:, 0, 0], parameters['eval.to'][:, :8], transpose_b=True)"


@pytest.mark.thorough
def test_every_accepted_name_can_be_exported(tmp_path, monkeypatch):
    """Also those that torch modules use themselves; plain torch computes the same."""
    monkeypatch.setenv("PYTHONPATH", importable(tmp_path)["PYTHONPATH"])
    model = write_model(tmp_path, "odd", "torch")
    package = tmp_path / "own_models" / "odd"
    for name, text in (("__init__", ODD), ("torch", ODD_FORWARD), ("tf", ODD_FORWARD)):
        (package / f"{name}.py").write_text(text.replace("{product}", TF_PRODUCT if name == "tf" else TORCH_PRODUCT))
    run_job(tmp_path, name="run", backend="torch", model=model, data="digits", steps=2, save_final=True)
    for format_name in ("torch", "savedmodel", "tf-checkpoint"):
        trainer("export", tmp_path / "run", "--model", model, "--format", format_name, "--output", tmp_path / format_name)
    code = (
        "import torch; weights = torch.load('state_dict.pt'); x = torch.randn(3, 1, 8, 8)\n"
        "from own_models.odd.torch import NAMES, forward\n"
        "assert {*NAMES, 'eval.to'} <= {*weights}\n"
        "assert torch.equal(torch.export.load('program.pt2').module()(x), forward(weights, x, None))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "torch", check=True)


@pytest.mark.thorough
def test_a_forward_function_for_one_batch_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", importable(tmp_path)["PYTHONPATH"])
    model = write_model(tmp_path, "looping", "torch", prelude="import torch", body="x = torch.stack([image for image in x])")
    run_job(tmp_path, name="run", backend="torch", model=model, data="digits", steps=2, save_final=True)
    done = trainer("export", tmp_path / "run", "--model", model, "--format", "torch", code=2)
    assert done.stderr.startswith(
        f"error: --format: torch.export cannot trace the forward function in '{tmp_path}/own_models/looping/torch.py'"
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.thorough
def test_export_terminated_leaves_no_file(tmp_path):
    save_model(tmp_path, "logreg", (1, 8, 8))
    command = [sys.executable, "-m", "crosstrain.cli.main", "export", str(tmp_path), "--format", "savedmodel"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    children = []
    while not children and process.poll() is None:
        children = psutil.Process(process.pid).children()
        time.sleep(0.01)
    process.terminate()
    assert process.wait(timeout=30) == 130
    assert process.stderr.read().strip() == "error: interrupted"
    process.stderr.close()
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert not (tmp_path / "exports").exists()
