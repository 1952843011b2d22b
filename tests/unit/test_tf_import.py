"""TensorFlow is imported without Keras, which is still available on use."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CHECK = """
import json, os, sys
from crosstrain.backends.tf.runtime import import_tensorflow
import_tensorflow(deterministic=False)
heavy = sorted({"keras", "sklearn", "matplotlib"} & set(sys.modules))
chosen = os.environ.get("TF_USE_LEGACY_KERAS")
import tensorflow as tf
print(json.dumps([heavy, chosen, tf.keras.layers.Dense(2)(tf.ones((1, 3))).shape.as_list()]))
"""


def run(**variables):
    environment = {name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"} | variables
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.thorough
def test_keras_is_imported_on_first_use():
    assert run() == [[], None, [1, 2]]


@pytest.mark.slow
def test_chosen_keras_is_kept():
    heavy, chosen, shape = run(TF_USE_LEGACY_KERAS="0")
    assert "keras" in heavy
    assert (chosen, shape) == ("0", [1, 2])
