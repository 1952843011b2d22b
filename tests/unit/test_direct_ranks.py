"""TensorFlow graphs sum gradients over the mesh in the order of ranks, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SEED = os.environ["CROSSTRAIN_TEST_SEED"]
TESTS = Path(__file__).parents[1]


@pytest.mark.thorough
def test_graph_sums_equal_sums_in_rank_order():
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    script = Path(__file__).parent / "direct_ranks_tf.py"
    done = subprocess.run([sys.executable, str(script), SEED], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, f"--seed {SEED}: {done.stderr[-4000:]}"
