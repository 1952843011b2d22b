"""The requested number format is used or the run is refused, also for custom models."""

import json

import pytest
from own_models import importable

from crosstrain.conformance.runs import run_job, trainer

pytestmark = pytest.mark.cluster

SPEC = """
import math

from crosstrain.models.base import ModelSpec, ParameterSpec


def build(data):
    weight = ParameterSpec("weight", (math.prod(data.input_shape), data.classes), bound=0.1)
    return ModelSpec("own", (weight,), data.input_shape, data.classes)
"""

PLAIN = {
    "tf": """
import tensorflow as tf


def forward(parameters, x, context):
    low = tf.cast(x, tf.bfloat16)  # a change of format computes nothing
    return tf.linalg.matmul(tf.reshape(tf.cast(low, tf.float32), [-1, parameters["weight"].shape[0]]), parameters["weight"])
""",
    "torch": """
import torch


def forward(parameters, x, context):
    with torch.autocast(x.device.type, enabled=False):
        return x.to(torch.bfloat16).float().flatten(1) @ parameters["weight"]
""",
}

CASTING = {
    "tf": """
import tensorflow as tf


@tf.function(autograph=False)
def product(x, weight):
    return tf.cast(tf.linalg.matmul(x, weight), tf.float32)


def forward(parameters, x, context):
    kind = context.compute or tf.float32
    x, weight = tf.cast(x, kind), tf.cast(parameters["weight"], kind)
    return product(tf.reshape(x, [-1, weight.shape[0]]), weight)
""",
    "torch": """
def forward(parameters, x, context):
    return x.flatten(1) @ parameters["weight"]
""",
}

CLUSTERS = {"one process": {}, "sync": {"procs_per_node": 2}, "async": {"mode": "async", "procs_per_node": 2}}


def write(folder, functions):
    package = folder / "own_formats" / "model"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(SPEC)
    for backend, text in functions.items():
        (package / f"{backend}.py").write_text(text)
    return "own_formats.model"


QUICK = [("tf", "async"), ("torch", "sync")]
"""Each backend, and each mode of several processes; `make conformance` has the others, one process alone among them."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "cluster"),
    [
        pytest.param(backend, cluster, marks=() if (backend, cluster) in QUICK else pytest.mark.slow)
        for backend in ("tf", "torch")
        for cluster in CLUSTERS
    ],
)
def test_a_format_that_a_model_does_not_compute_in_is_refused(backend, cluster, tmp_path):
    model, options = write(tmp_path, PLAIN), CLUSTERS[cluster]
    command = ["--backend", backend, "--model", model, "--data", "digits", "--steps", "5", "--out", str(tmp_path / "runs")]
    layout = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    done = trainer("run", *command, *layout, "--precision", "bf16", environment=importable(tmp_path))
    assert done.returncode == 2, done.stderr
    assert f"--precision: got 'bf16', but the forward function of model '{model}' on {backend} computes nothing in it" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tf", pytest.param("torch", marks=pytest.mark.slow)])
def test_bf16_custom_model_is_trained(backend, tmp_path):
    options = {"model": write(tmp_path, CASTING), "data": "digits", "steps": 20, "calibrate": False, "save_final": True}
    runs = {
        precision: run_job(tmp_path, name=precision, backend=backend, precision=precision, environment=importable(tmp_path), **options)
        for precision in ("fp32", "bf16")
    }
    assert [run.summary["precision_used"] for run in runs.values()] == ["fp32", "bf16"]
    assert runs["fp32"].losses.tolist() != runs["bf16"].losses.tolist()
    done = trainer("evaluate", str(runs["bf16"].path), "--trust-run", "--json", environment=importable(tmp_path))
    assert json.loads(done.stdout)["precision_used"] == "bf16"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_logreg_computes_in_bfloat16_on_both_backends(mode, tmp_path):
    options = {"mode": mode, "global_batch_size": 32, "steps": 20, "calibrate": False}
    full = run_job(tmp_path, name="full", backend="torch", **options)
    low = {backend: run_job(tmp_path, name=backend, backend=backend, precision="bf16", **options) for backend in ("tf", "torch")}
    for run in low.values():
        assert run.summary["precision_used"] == "bf16"
        assert run.losses.tolist() != full.losses.tolist()
        assert run.losses == pytest.approx(full.losses, rel=0.02)
