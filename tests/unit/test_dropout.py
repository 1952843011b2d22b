"""The shared dropout masks: a function of seed, step, layer and example alone, and as random as they should be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.models.dropout_masks import keep_mask

WHOLE = st.integers(0, 2**31)
PINNED = [173, 91, 60, 180]


def mask(seed=1, step=2, layer=0, indices=(3, 4), width=9, rate=0.5):
    return keep_mask(seed, step, layer, np.array(indices, np.int64), width, rate)


@given(seed=st.integers(0, 2**63 - 1), step=WHOLE, layer=st.integers(0, 99), index=WHOLE, width=st.integers(1, 70))
def test_an_examples_mask_does_not_depend_on_its_batch(seed, step, layer, index, width):
    alone = mask(seed, step, layer, [index], width)
    among = mask(seed, step, layer, [7, index, 8], width)
    wider = mask(seed, step, layer, [index], width + 5)
    assert alone.shape == (1, width)
    assert np.array_equal(alone[0], among[1])
    assert np.array_equal(alone[0], wider[0, :width])


@pytest.mark.parametrize("other", [{"seed": 9}, {"step": 9}, {"layer": 9}, {"indices": (9, 10)}], ids=str)
def test_each_coordinate_changes_it(other):
    assert not np.array_equal(mask(width=200), mask(width=200, **other))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_the_share_that_is_kept(rate):
    kept = mask(indices=range(100), width=4096, rate=rate)
    deviation = np.sqrt(rate * (1 - rate))
    assert kept.mean() == pytest.approx(1 - rate, abs=5 * deviation / np.sqrt(kept.size) + 1e-9)
    assert kept.mean(axis=0) == pytest.approx(1 - rate, abs=6 * deviation / np.sqrt(100) + 1e-9)


def test_examples_and_columns_are_independent():
    signs = mask(indices=range(200), width=2000) * 2.0 - 1.0
    between_examples = signs @ signs.T / 2000
    between_columns = signs.T @ signs / 200
    np.fill_diagonal(between_examples, 0)
    np.fill_diagonal(between_columns, 0)
    assert np.abs(between_examples).max() < 6 / np.sqrt(2000)
    assert np.abs(between_columns).max() < 6.5 / np.sqrt(200)


def test_the_values_are_pinned():
    """A mask is part of what a run is resumed with: it must not change between versions."""
    assert np.packbits(mask(seed=2**63 - 1, step=10**6, layer=1, indices=[59_999], width=32)).tolist() == PINNED


def test_an_empty_slice():
    assert mask(indices=()).shape == (0, 9)
