"""Convolutions that take two columns at once give what the frameworks' own give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pair_cases import PAIR_CASES

from crosstrain.models.layers.pairs import paired

TOLERANCE = 1e-12
"""Of float64."""


@pytest.fixture(scope="module", params=["tf", "torch"])
def results(request, tmp_path_factory):
    """What a framework computed in a process of its own."""
    path = tmp_path_factory.mktemp("pairs") / "results.npz"
    script = Path(__file__).parent / f"pairs_{request.param}.py"
    done = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(np.load(path))


def test_results_and_gradients_are_those_of_a_plain_convolution(results):
    ours = {name: value for name, value in results.items() if "/ours/" in name}
    assert len(ours) == 2 * len(PAIR_CASES) + sum(1 + case.biased for case in PAIR_CASES.values())
    for name, value in ours.items():
        plain = results[name.replace("/ours/", "/plain/")]
        assert value.shape == plain.shape, name
        assert np.abs(value - plain).max(initial=0.0) <= TOLERANCE * max(np.abs(plain).max(initial=0.0), 1.0), name


def test_each_of_them_was_taken_in_pairs(results):
    assert results["taken"] == len(PAIR_CASES)


CNN = {"width": 32, "inputs": 3, "outputs": 6, "kernel_width": 5, "stride": 1, "padding": 0}


OTHERS = [{"width": 31}, {"width": 5}, {"width": 4}, {"inputs": 5}, {"outputs": 9}, {"kernel_width": 4}, {"kernel_width": 1}]
OTHERS += [{"stride": 2}, {"padding": 2}]


@pytest.mark.parametrize("change", [{}, *OTHERS], ids=str)
def test_which_are_taken_in_pairs(change):
    assert paired(**(CNN | change)) == (not change)
