"""Attention under masks and causality, and refused masks and dropout, in both frameworks."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from attention_cases import KINDS, RATE

pytestmark = pytest.mark.thorough

BACKENDS = pytest.mark.parametrize("backend", ["tf", "torch"])
CASES = 20


@pytest.fixture(scope="module")
def results(tmp_path_factory, seed):
    """Return what each backend computed in a separate process."""
    folder, script = tmp_path_factory.mktemp("attention"), str(Path(__file__).parent / "attention_cases.py")
    results_by_backend = {}
    for backend in ("tf", "torch"):
        file = folder / f"{backend}.npz"
        done = subprocess.run(
            [sys.executable, script, backend, str(seed), str(file)], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        results_by_backend[backend] = dict(np.load(file))
    return results_by_backend


def attended(query, key, value, reached, factor):
    """Compute attention by its definition in float64, with heads next to each other."""
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    scores = np.where(reached, query @ key.swapaxes(2, 3) / np.sqrt(query.shape[3]), -np.inf)
    shares = np.exp(scores - scores.max(3, keepdims=True))
    mixed = shares / shares.sum(3, keepdims=True) * factor @ value
    return mixed.transpose(0, 2, 1, 3).reshape(mixed.shape[0], mixed.shape[2], -1)


@BACKENDS
@pytest.mark.parametrize(("masked", "causal", "training"), KINDS)
def test_attention_respects_mask_and_causality(results, backend, masked, causal, training):
    arrays = results[backend]
    for number in range(CASES):
        query, key, value, mask = (arrays[f"{number}/{name}"] for name in ("query", "key", "value", "mask"))
        reached = np.ones((*query.shape[:3], key.shape[2]), np.bool_)
        if masked:
            reached &= mask
        if causal:
            reached &= np.tri(query.shape[2], key.shape[2], dtype=np.bool_)
        expected = attended(query, key, value, reached, 1 + RATE if training else 1)
        assert np.abs(arrays[f"{number}/{masked}/{causal}/{training}"] - expected).max() < 1e-5


@BACKENDS
@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_attention_with_numeric_mask_is_refused(results, backend, kind):
    message = str(results[backend][f"message for {kind}"])
    assert message.startswith(f"model: the attention with the dropout number 5 was given a mask of {kind}; bool is needed, [batch, heads,")


@BACKENDS
def test_dropout_missing_from_spec_is_refused(results, backend):
    message = "model: 'plain' drops with the rate 0.1 (dropout number 3) while it trains, but its ModelSpec does not set dropout=True"
    assert str(results[backend]["message for dropout"]) == message
    assert str(results[backend]["message for no dropout"]) == ""
