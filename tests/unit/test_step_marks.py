"""A TensorFlow shard applies each step once, and reports partly applied ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SEED = os.environ["CROSSTRAIN_TEST_SEED"]


@pytest.mark.thorough
def test_steps_are_applied_once_and_partial_ones_reported():
    script = Path(__file__).parent / "step_marks_tf.py"
    done = subprocess.run([sys.executable, str(script), SEED], capture_output=True, text=True)
    assert done.returncode == 0, f"--seed {SEED}: {done.stderr[-4000:]}"
