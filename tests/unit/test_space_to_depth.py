"""Convolutions of two columns per step equal those of the frameworks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from space_to_depth_cases import PAIR_CASES

from crosstrain.models.layers.formulas import gradient_uses_space_to_depth, uses_space_to_depth

pytestmark = pytest.mark.thorough

TOLERANCE = 1e-12
"""Of float64."""


@pytest.fixture(scope="module", params=["tf", "torch"])
def results(request, tmp_path_factory):
    """Return what a framework computed in another process."""
    path = tmp_path_factory.mktemp("pairs") / "results.npz"
    script = Path(__file__).parent / f"space_to_depth_{request.param}.py"
    done = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(np.load(path))


def test_results_and_gradients_equal_a_plain_convolution(results):
    ours = {name: value for name, value in results.items() if "/ours/" in name}
    assert len(ours) == 2 * len(PAIR_CASES) + sum(1 + case.biased for case in PAIR_CASES.values())
    for name, value in ours.items():
        plain = results[name.replace("/ours/", "/plain/")]
        assert value.shape == plain.shape, name
        assert np.abs(value - plain).max(initial=0.0) <= TOLERANCE * max(np.abs(plain).max(initial=0.0), 1.0), name


@pytest.mark.parametrize("name", PAIR_CASES)
def test_cases_were_computed_in_pairs(results, name):
    assert results[f"{name}/taken"] == 1


FOR_SMALL_BATCHES = """
import torch
from crosstrain.models.base import ForwardContext
from crosstrain.models.layers import torch as layers

taken = []
in_pairs = layers._conv_space_to_depth
layers._conv_space_to_depth = lambda x, *rest: (taken.append(len(x)), in_pairs(x, *rest))[1]
convolve = layers.Layers({"conv.weight": torch.zeros(6, 3, 5, 5)}, ForwardContext(training=True)).conv
for batch in (16, 64):
    convolve(torch.zeros(batch, 3, 32, 32).to(memory_format=torch.channels_last), "conv")
print(taken)
"""


def test_torch_computes_small_batches_directly():
    done = subprocess.run([sys.executable, "-c", FOR_SMALL_BATCHES], capture_output=True, text=True)
    assert done.stdout == "[64]\n", done.stderr


CNN_1 = {"width": 32, "inputs": 3, "outputs": 6, "kernel_width": 5, "stride": 1, "padding": 0}
CNN_2 = {"width": 14, "inputs": 6, "kernel": (5, 5), "stride": 1, "padding": 2}


@pytest.mark.parametrize("change", [{}, {"padding": 2}, {"outputs": 8}], ids=str)
def test_eligible_convolutions_are_used(change):
    assert uses_space_to_depth(**(CNN_1 | change))


OTHERS = [{"width": 31}, {"width": 5}, {"width": 4}, {"inputs": 5}, {"outputs": 9}, {"kernel_width": 4}, {"kernel_width": 1}]
OTHERS += [{"stride": 2}, {"padding": 1}]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_ineligible_convolutions_are_not_used(change):
    assert not uses_space_to_depth(**(CNN_1 | change))


@pytest.mark.parametrize("change", [{}, {"inputs": 8}, {"padding": 0}, {"padding": 4}, {"kernel": (3, 3), "padding": 0}], ids=str)
def test_eligible_gradients_are_used(change):
    assert gradient_uses_space_to_depth(**(CNN_2 | change))


OTHERS = [{"width": 15}, {"inputs": 9}, {"kernel": (5, 4)}, {"kernel": (5, 1), "padding": 0}, {"stride": 2}, {"padding": 1}]
OTHERS += [{"padding": 6}, {"kernel": (3, 3), "padding": 1}, {"kernel": (2, 5)}]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_ineligible_gradients_are_not_used(change):
    assert not gradient_uses_space_to_depth(**(CNN_2 | change))
