"""Evaluation of a trained model on either backend: equal to numpy, and no process remains."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from model_checkpoints import save_model
from PIL import Image

from crosstrain.checkpoint import read_checkpoint
from crosstrain.cli.main import main
from crosstrain.data.store.stored_dataset import open_dataset

pytestmark = pytest.mark.cluster


def command(*arguments):
    return [sys.executable, "-m", "crosstrain.cli.main", "evaluate", *map(str, arguments)]


def evaluate(*arguments, code=0):
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    return done


def refused(capsys, *arguments):
    """Return the message of a refused request.

    In this process, since requests are refused before a framework is imported.
    """
    assert main(["evaluate", *map(str, arguments)]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.fixture(scope="module")
def digits():
    return open_dataset("digits")


@pytest.fixture(scope="module")
def run(tmp_path_factory, digits):
    path = tmp_path_factory.mktemp("run")
    save_model(path, "logreg", info=digits.info, digest=digits.digest)
    return path


def expected(run, data, split):
    """Logits, mean loss and accuracy in float64."""
    checkpoint = read_checkpoint(run / "checkpoints/step-000000123")
    x = data.inputs(split).reshape(len(data.labels(split)), -1).astype(np.float64)
    logits = x @ checkpoint.parameters["dense.weight"].astype(np.float64).T + checkpoint.parameters["dense.bias"]
    labels = data.labels(split)
    shifted = logits - logits.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]
    return logits, losses.mean(), (logits.argmax(1) == labels).mean()


@pytest.mark.quick_cases("test-tf")
@pytest.mark.parametrize(
    ("split", "backend"), [("test", "tf"), ("test", "torch"), ("train", "torch"), pytest.param("train", "tf", marks=pytest.mark.slow)]
)
def test_evaluate_figures_equal_numpy(run, digits, tmp_path, backend, split):
    target = tmp_path / "predictions.npz"
    done = evaluate(run, "--backend", backend, "--split", split, "--predictions", target, "--json")
    printed = json.loads(done.stdout)
    logits, loss, accuracy = expected(run, digits, split)
    assert printed["examples"] == len(logits) == digits.info.sizes[split]
    assert printed["loss"] == pytest.approx(loss, rel=1e-5)
    assert printed["accuracy"] == accuracy
    assert (printed["backend"], printed["trained_by"], printed["step"], printed["split"]) == (backend, "torch", 123, split)
    assert printed["precision_used"].startswith("fp32")
    with np.load(target) as saved:
        assert sorted(saved) == ["labels", "logits"]
        assert np.array_equal(saved["labels"], digits.labels(split))
        assert saved["logits"].dtype == np.float32
        assert np.linalg.norm(saved["logits"] - logits) <= 1e-5 * np.linalg.norm(logits)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tf", pytest.param("torch", marks=pytest.mark.slow)])
def test_pixels_are_normalised_as_in_training(tmp_path, digits, backend):
    """The model was trained on data of another mean and deviation, which it stores."""
    trained_on = replace(digits.info, name="glyphs28", features=replace(digits.info.images, mean=(0.1,), std=(0.7,)))
    save_model(tmp_path, "logreg", info=trained_on)
    done = evaluate(tmp_path, "--data", "digits", "--backend", backend, "--json")
    assert "digits is normalised by the mean and standard deviation of glyphs28" in done.stderr
    _, loss, accuracy = expected(tmp_path, digits.normalised_as((0.1,), (0.7,)), "test")
    assert json.loads(done.stdout)["loss"] == pytest.approx(loss, rel=1e-5)
    assert json.loads(done.stdout)["accuracy"] == accuracy


@pytest.mark.slow
def test_evaluate_relative_folder_works_from_any_folder(tmp_path):
    """It is recorded as an absolute path: evaluation, export and resume work from any folder."""
    draw = np.random.default_rng(0)
    for split, number in (("train", 6), ("test", 2)):
        for name in ("ants", "bees"):
            folder = tmp_path / "here" / "pictures" / split / name
            folder.mkdir(parents=True)
            for count in range(number):
                Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{count}.png")
    (tmp_path / "there").mkdir()

    def trainer(place, *arguments):
        words = [sys.executable, "-m", "crosstrain.cli.main", *map(str, arguments)]
        done = subprocess.run(words, cwd=tmp_path / place, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    common = ("run", "--model", "cnn", "--backend", "torch", "--batch-size", "4", "--out", tmp_path / "runs")
    name, folder = f"image-folder:{tmp_path}/here/pictures?size=16", tmp_path / "here/pictures"
    trainer("here", *common, "--name", "a", "--data", "image-folder:pictures?size=16", "--steps", "2", "--json")
    job = json.loads((tmp_path / "runs/a/job.json").read_text())
    assert (job["data"], job["data_dir"]) == (name, None)
    assert trainer("there", "evaluate", tmp_path / "runs/a", "--trust-run", "--json")["examples"] == 4
    exported = trainer("there", "export", tmp_path / "runs/a", "--format", "safetensors", "--json")
    described = json.loads((Path(exported["path"]) / "model.json").read_text())
    assert described["class_names"] == ["ants", "bees"]
    same = ("--data", "image-folder:here/pictures?size=16")
    assert trainer(".", "run", "--resume", tmp_path / "runs/a", *same, "--steps", "+1", "--json")["steps"] == 3
    trainer("here", *common, "--name", "b", "--data", "image-folder:?size=16", "--data-dir", "pictures", "--steps", "1", "--json")
    job = json.loads((tmp_path / "runs/b/job.json").read_text())
    assert (job["data"], job["data_dir"]) == ("image-folder:?size=16", str(folder))

    (folder / "test" / "bees").rename(folder / "test" / "wasps")
    (folder / "train" / "bees").rename(folder / "train" / "wasps")
    refused = evaluate(tmp_path / "runs/a", "--data", name, code=2)
    assert "class 1 of" in refused.stderr
    assert "is called 'wasps', but the model was trained on" in refused.stderr


@pytest.mark.thorough
def test_evaluate_default_backend_is_that_of_training(run):
    text = evaluate(run).stdout
    assert re.search(r"^logreg after 123 updates, trained by torch on digits$", text, re.MULTILINE)
    assert re.search(r"^accuracy  0\.\d{4}$", text, re.MULTILINE)
    assert re.search(r"^on        360 examples of digits \(test\), torch, fp32, \d+\.\d\d s$", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tf", "torch"])
def test_evaluate_uses_running_statistics(tmp_path, backend):
    """Both backends use the checkpoint's statistics: others would change the loss."""
    data = open_dataset("digits")
    save_model(tmp_path, "resnet18", info=data.info)
    target = tmp_path / "predictions.npz"
    printed = json.loads(evaluate(tmp_path, "--backend", backend, "--predictions", target, "--json").stdout)
    logits = np.load(target)["logits"]
    labels = data.labels("test")
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]
    assert printed["loss"] == pytest.approx(losses.mean(), rel=1e-4)
    reference = _resnet_logits(tmp_path, data)
    assert np.linalg.norm(logits[:20] - reference) <= 1e-4 * np.linalg.norm(reference)


def _resnet_logits(run, data):
    """The logits of the first images by our forward function on torch, outside of any task."""
    script = (
        "import sys\nfrom pathlib import Path\nimport numpy as np, torch\nfrom crosstrain.checkpoint import read_checkpoint\n"
        "from crosstrain.models.base import ForwardContext\nfrom crosstrain.models.resnet18.torch import forward\n"
        "found = read_checkpoint(Path(sys.argv[1]))\n"
        "parameters, buffers = ({k: torch.tensor(v) for k, v in values.items()} for values in (found.parameters, found.buffers))\n"
        "x = torch.from_numpy(np.load(sys.argv[2]))\n"
        "with torch.no_grad():\n    np.save(sys.argv[2], forward(parameters, x, ForwardContext(False, buffers)).numpy())\n"
    )
    images = run / "images.npy"
    np.save(images, data.inputs("test")[:20])
    subprocess.run([sys.executable, "-c", script, str(run / "checkpoints/step-000000123"), str(images)], check=True, timeout=100)
    return np.load(images)


@pytest.mark.slow
def test_evaluate_uses_requested_device(run, monkeypatch):
    """A run that used a GPU is evaluated on the CPU if requested.

    A device that is missing, or not declared, is refused.
    """
    on_cpu = json.loads(evaluate(run, "--device", "cpu", "--json").stdout)
    assert on_cpu["loss"] == json.loads(evaluate(run, "--json").stdout)["loss"]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent / "toy"))
    assert "--device: got 'gpu', which backend toy does not support" in evaluate(run, "--backend", "toy", "--device", "gpu", code=2).stderr
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert re.search("--device: got 'gpu', but .* finds no GPU", evaluate(run, "--device", "gpu", code=2).stderr)


class TestWrongRequests:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["--data", "glyphs28"],
                r"--data: 'glyphs28' has images of shape \[1, 28, 28\], but the model was trained on 'digits' with .*\[1, 8, 8\]",
            ),
            (["--data", "digit"], r"data: got 'digit'.*Did you mean 'digits'\?"),
            (["--backend", "torhc"], r"--backend: got 'torhc'; allowed: tf, torch.*Did you mean 'torch'\?"),
            (["--precision", "fp64"], r"--precision: got 'fp64'; allowed: fp32, bf16, fp16"),
            (["--device", "tpu"], r"--device: got 'tpu'; allowed: auto, cpu, gpu"),
            (["--split", "extra"], r"--split: got 'extra'; allowed: test, train"),
            (["--predictions", "/proc/no/where.npz"], r"--predictions: '/proc/no' is no folder"),
        ],
    )
    def test_evaluate_wrong_request_is_explained(self, run, capsys, arguments, message):
        assert re.search(message, refused(capsys, run, *arguments))

    def test_evaluate_predictions_overwrite_no_file(self, run, tmp_path, capsys):
        target = tmp_path / "mine.npz"
        target.write_bytes(b"mine")
        assert "nothing is overwritten" in refused(capsys, run, "--predictions", target)
        assert target.read_bytes() == b"mine"

    def test_evaluate_another_number_of_classes_is_refused(self, tmp_path, capsys):
        save_model(tmp_path, "logreg", (1, 8, 8), classes=7)
        message = refused(capsys, tmp_path, "--data", "digits")
        assert "'digits' has classes: 10, but the model was trained on 'glyphs' with classes: 7" in message

    def test_evaluate_named_damaged_checkpoint_is_refused(self, tmp_path, digits, capsys):
        path = save_model(tmp_path, "logreg", info=digits.info)
        (path / "parameters.safetensors").unlink()
        assert "parameters.safetensors is missing" in refused(capsys, path)
        assert "no sound checkpoint" in refused(capsys, tmp_path)


@pytest.mark.quick_cases("2-130")
@pytest.mark.faults
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_evaluate_end_leaves_no_process(run, number, code):
    process = subprocess.Popen(command(run), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = []
    deadline = time.monotonic() + 60
    while len(children) < 2 and time.monotonic() < deadline:  # the agent and its task
        time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
