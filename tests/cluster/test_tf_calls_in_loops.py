"""On TensorFlow a step may call functions, such as branches, with any number of threads."""

import numpy as np
import pytest
from own_models import importable, write_model

from crosstrain.conformance.runs import run_job

pytestmark = pytest.mark.cluster

NESTED = """
    import tensorflow as tf

    @tf.function(autograph=False)
    def unchanged(x, depth=3):
        if depth == 0:
            return x
        return tf.cond(tf.reduce_sum(x) > 1e9, lambda: 2 * x, lambda: unchanged(x, depth - 1))
"""
REPEATED = "x = tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, unchanged(x)), (0, x))[1]"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.slow
def test_dense_network_trains_with_and_without_calls(threads, tmp_path):
    losses = []
    for name, calls in ("plain", {}), ("calling", {"prelude": NESTED, "body": REPEATED}):
        model = write_model(tmp_path, name, "tf", **calls)
        run = run_job(
            tmp_path / "runs", importable(tmp_path), backend="tf", model=model, data="digits", steps=20, threads=threads,
            monitor=False, tensorboard=False, eval_every="end", start_timeout=90,
        )  # fmt: skip
        losses.append(run.losses)
    assert len(losses[0]) == 20
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
