"""Shared dropout masks: functions of seed, step, layer and example, and random enough."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.models.dropout_masks import MAX_RATE, drawn_rate, keep_mask, keep_mask_of_positions, keep_mask_of_shape, philox_4x32

WHOLE = st.integers(0, 2**31)
PINNED = [173, 91, 60, 180]
PINNED_POSITIONS = [188, 79, 240, 196]


def mask(seed=1, step=2, layer=0, indices=(3, 4), width=9, rate=0.5):
    return keep_mask(seed, step, layer, np.array(indices, np.int64), width, rate)


@given(seed=st.integers(0, 2**63 - 1), step=WHOLE, layer=st.integers(0, 99), index=WHOLE, width=st.integers(1, 70))
def test_examples_mask_does_not_depend_on_its_batch(seed, step, layer, index, width):
    single = mask(seed, step, layer, [index], width)
    among = mask(seed, step, layer, [7, index, 8], width)
    wider = mask(seed, step, layer, [index], width + 5)
    assert single.shape == (1, width)
    assert np.array_equal(single[0], among[1])
    assert np.array_equal(single[0], wider[0, :width])


@pytest.mark.parametrize("change", [{"seed": 9}, {"step": 9}, {"layer": 9}, {"indices": (9, 10)}], ids=str)
def test_each_coordinate_changes_mask(change):
    assert not np.array_equal(mask(width=200), mask(width=200, **change))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_share_of_ones_follows_rate(rate):
    masks = mask(indices=range(100), width=4096, rate=rate)
    deviation = np.sqrt(rate * (1 - rate))
    assert masks.mean() == pytest.approx(1 - rate, abs=5 * deviation / np.sqrt(masks.size) + 1e-9)
    assert masks.mean(axis=0) == pytest.approx(1 - rate, abs=6 * deviation / np.sqrt(100) + 1e-9)


def test_examples_and_columns_are_independent():
    signs = mask(indices=range(200), width=2000) * 2.0 - 1.0
    between_examples = signs @ signs.T / 2000
    between_columns = signs.T @ signs / 200
    np.fill_diagonal(between_examples, 0)
    np.fill_diagonal(between_columns, 0)
    assert np.abs(between_examples).max() < 6 / np.sqrt(2000)
    assert np.abs(between_columns).max() < 6.5 / np.sqrt(200)


def test_values_are_pinned():
    """Resumed runs depend on masks, which must not change between versions."""
    assert np.packbits(mask(seed=2**63 - 1, step=10**6, layer=1, indices=[59_999], width=32)).tolist() == PINNED


def test_empty_slice_has_empty_mask():
    assert mask(indices=()).shape == (0, 9)


# Of positions ---------------------------------------------------------------------------------------------------------


def positions_mask(seed=1, step=2, layer=0, indices=(3, 4), positions=5, width=9, rate=0.5):
    return keep_mask_of_positions(seed, step, layer, np.array(indices, np.int64), positions, width, rate)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_generator_equals_published_numbers(word, expected):
    """Random123's known answers for philox4x32 with ten rounds."""
    numbers = philox_4x32([np.array([word], np.uint64)] * 4, [word, word])
    assert tuple(int(number[0]) for number in numbers) == expected


@given(
    seed=st.integers(0, 2**63 - 1),
    step=WHOLE,
    layer=st.integers(0, 200),
    index=WHOLE,
    shape=st.tuples(st.integers(1, 9), st.integers(1, 30)),
    more=st.tuples(st.integers(0, 9), st.integers(0, 30)),
)
def test_padding_and_neighbours_change_no_mask(seed, step, layer, index, shape, more):
    single = positions_mask(seed, step, layer, [index], *shape)
    among = positions_mask(seed, step, layer, [7, index, 8], shape[0] + more[0], shape[1] + more[1])
    assert single.shape == (1, *shape)
    assert np.array_equal(single[0], among[1, : shape[0], : shape[1]])


@given(index=WHOLE, heads=st.integers(1, 8), queries=st.integers(1, 9), keys=st.integers(1, 9), more=st.integers(0, 9))
def test_padding_changes_no_mask_of_attention(index, heads, queries, keys, more):
    indices = np.array([index])
    single = keep_mask_of_shape(1, 2, 3, indices, (1, heads, queries, keys), 0.5)
    padded = keep_mask_of_shape(1, 2, 3, indices, (1, heads, queries + more, keys + more), 0.5)
    assert single.shape == (1, heads, queries, keys)
    assert np.array_equal(single, padded[:, :, :queries, :keys])


@pytest.mark.parametrize("change", [{"seed": 9}, {"step": 9}, {"layer": 9}, {"indices": (9, 10)}], ids=str)
def test_each_coordinate_changes_a_mask_of_positions(change):
    assert not np.array_equal(positions_mask(width=200), positions_mask(width=200, **change))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_share_of_ones_in_positions_follows_rate(rate):
    masks = positions_mask(indices=range(40), positions=25, width=512, rate=rate)
    deviation = np.sqrt(rate * (1 - rate))
    for axes in ((0, 1, 2), (0, 1), (1, 2), (0, 2)):
        counted = np.prod([masks.shape[axis] for axis in axes])
        assert masks.mean(axis=axes) == pytest.approx(1 - rate, abs=6 * deviation / np.sqrt(counted) + 1e-9)


def test_positions_are_independent():
    signs = positions_mask(indices=range(20), positions=20, width=2000).reshape(400, 2000) * 2.0 - 1.0
    between = signs @ signs.T / 2000
    np.fill_diagonal(between, 0)
    assert np.abs(between).max() < 6.5 / np.sqrt(2000)


def test_chunked_masks_equal_single_masks():
    whole = positions_mask(indices=range(300), positions=40, width=64)
    assert np.array_equal(whole[299], positions_mask(indices=[299], positions=40, width=64)[0])


def test_values_of_positions_are_pinned():
    masks = positions_mask(seed=2**63 - 1, step=10**6, layer=1, indices=[59_999], positions=2, width=16)
    assert np.packbits(masks).tolist() == PINNED_POSITIONS


def test_empty_slice_of_positions_has_empty_mask():
    assert positions_mask(indices=()).shape == (0, 5, 9)
    assert positions_mask(positions=0).shape == (2, 0, 9)


@given(rate=st.floats(0.0, 1.0, exclude_max=True), nines=st.integers(0, 16), shape=st.lists(st.integers(0, 5), min_size=2, max_size=4))
def test_rates_just_below_one_are_valid(rate, nines, shape):
    for near_one in (rate, 1 - 10.0**-nines * (1 - rate), np.nextafter(1.0, 0.0)):
        near_one = min(near_one, np.nextafter(1.0, 0.0))
        keep_mask = keep_mask_of_shape(1, 2, 3, np.arange(shape[0]), shape, near_one)
        assert keep_mask.shape == tuple(shape)
        assert np.array_equal(keep_mask, keep_mask_of_shape(1, 2, 3, np.arange(shape[0]), shape, drawn_rate(near_one)))


def test_largest_rate_has_ones_and_scale_fits_fp16():
    assert keep_mask_of_shape(1, 2, 3, np.arange(40), (40, 50, 512), np.nextafter(1.0, 0.0)).any()
    assert np.isfinite(np.float16(1 / (1 - MAX_RATE)))


def test_masks_of_matrices_are_unchanged():
    indices = np.array([3, 4])
    assert np.array_equal(keep_mask_of_shape(1, 2, 0, indices, (2, 9), 0.5), mask())
