"""A worker out of memory ends the run immediately and is reported, on both frameworks.

Real allocators refuse.
"""

import json

import pytest
from own_models import importable, write_model

from crosstrain.conformance.runs import trainer

pytestmark = pytest.mark.cluster

PRELUDES = {
    "torch": "import torch\n\nseen = 0",
    "tf": "import json\nimport os\n\nimport tensorflow as tf",
}

BODIES = {  # more than any address space has, after the first step; in sync mode on one of the workers alone
    "torch": """
        global seen
        seen += context.training
        own = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 1
        if seen > 5 and own:
            x = x + torch.zeros(2**46).sum()
    """,
    "tf": """
        task = json.loads(os.environ.get("TF_CONFIG", '{"task": {"type": "worker", "index": 1}}'))["task"]
        if context.training and (task["type"] == "chief" or task["index"] == 1):
            begun = tf.reduce_max(tf.abs(parameters["c.bias"])) > 0.13  # they begin within ±0.125
            size = tf.where(begun, tf.constant(2**46, tf.int64), tf.constant(1, tf.int64))
            x = x + tf.reduce_sum(tf.fill([size], 0.0) * x[0, 0, 0, 0])
    """,
}


@pytest.mark.parametrize(
    ("backend", "mode", "workers"),
    [
        ("torch", "sync", 2),
        pytest.param("tf", "sync", 1, marks=pytest.mark.slow),
        pytest.param("tf", "sync", 2, marks=pytest.mark.slow),
        pytest.param("torch", "async", 2, marks=pytest.mark.slow),
        pytest.param("tf", "async", 2, marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_ends_run_and_names_task(backend, mode, workers, tmp_path):
    model = write_model(tmp_path, "hungry", backend, prelude=PRELUDES[backend], body=BODIES[backend])
    options = ["--backend", backend, "--mode", mode, "--model", model, "--data", "digits", "--lr", "5", "--on-nan", "continue"]
    cluster = [
        "--procs-per-node",
        str(workers),
        "--network",
        "host",
        "--steps",
        "100000",
        "--stall-timeout",
        "60",
        "--start-timeout",
        "100",
    ]
    done = trainer(
        "run", *options, *cluster, "--out", str(tmp_path / "runs"), "--name", "a",
        environment=importable(tmp_path), timeout_seconds=150,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    chief = (backend, mode) == ("tf", "async")  # TensorFlow's workers report to their chief, which names them
    whose = "chief-0" if chief else f"worker-{workers - 1}" if mode == "sync" else "worker-"
    assert f"as {'worker-' if chief else 'it ran out of memory ('}" in message
    assert "ran out of memory (" in message
    assert "--accumulate N makes updates as large again" in message
    status = json.loads((tmp_path / "runs" / "a" / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["task"].startswith(whose)
    assert "ran out of memory" in status["cause"]
