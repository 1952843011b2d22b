"""Examples as arrays: bit-identical to the dataset's normalisation and defined changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.backends import vectors as gathering
from crosstrain.backends.vectors import GatheredSplit
from crosstrain.core.errors import UsageError
from crosstrain.data.base import DataInfo, TextFeatures
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.data.preprocessing import apply_changes
from crosstrain.data.store.stored_dataset import open_dataset

INDICES = st.lists(st.integers(0, 359), max_size=6).map(lambda indices: np.array(indices, np.int32))


@pytest.fixture(scope="module")
def digits():
    return open_dataset("digits")


@given(indices=INDICES, resident=st.booleans())
def test_images_equal_normalised_dataset(digits, indices, resident):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "FLOAT_LIMIT_BYTES", 2**30 if resident else 0)
        x, y = GatheredSplit(digits, "test").take(indices)
    np.testing.assert_array_equal(x, digits.inputs("test")[indices])
    np.testing.assert_array_equal(y, digits.labels("test")[indices])
    assert (x.dtype, y.dtype) == (np.float32, np.int64)


@given(indices=INDICES, seed=st.integers(0, 99))
def test_changes_are_made_on_the_stored_pixels(digits, indices, seed):
    draw = np.random.default_rng(seed)
    changes = np.stack([draw.integers(-1, 2, len(indices)), draw.integers(-1, 2, len(indices)), draw.integers(0, 2, len(indices))], 1)
    x, _ = GatheredSplit(digits, "train", changing=True).take(indices, changes.astype(np.int32))
    changed = apply_changes(digits.images("train")[indices], changes.astype(np.int32)).astype(np.float64)
    mean, std = (np.array(values).reshape(-1, 1, 1) for values in (digits.info.mean, digits.info.std))
    np.testing.assert_array_equal(x, ((changed / 255.0 - mean) / std).astype(np.float32))


class Sentences:
    """Three pairs of a sentence and a number."""

    info = DataInfo(
        "sentences",
        {"train": 3, "test": 3},
        (ColumnSpec("source", "uint16", (None,)), ColumnSpec("height", "float32"), ColumnSpec("tags", "uint16", (None,))),
        TextFeatures({"source": 9, "tags": 9}),
    )

    def column(self, split, name):
        if name == "height":
            return Column(np.array([1.5, 2.5, 3.5], np.float32))
        if name not in ("source", "tags"):
            raise UsageError(f"data: there is no column {name!r}")
        return Column(np.arange(1, 8, dtype=np.uint16), np.array([0, 4, 5, 7]))


def test_sequences_are_padded_to_longest_taken():
    split = GatheredSplit(Sentences(), "train", inputs=("source", "height"), target="tags")
    inputs, target = split.take(np.array([2, 1]))
    np.testing.assert_array_equal(inputs["source"], [[6, 7], [5, 0]])
    np.testing.assert_array_equal(inputs["source_lengths"], [2, 1])
    np.testing.assert_array_equal(inputs["height"], np.array([3.5, 2.5], np.float32))
    np.testing.assert_array_equal(target["tags"], inputs["source"])
    assert {value.dtype for value in (inputs["source"], inputs["source_lengths"], target["tags"])} == {np.dtype(np.int64)}
    assert [split.longest(0, 3), split.longest(1, 3), split.longest(1, 1), len(split)] == [4, 2, 0, 3]


def test_single_fixed_column_is_a_plain_array():
    inputs, target = GatheredSplit(Sentences(), "test", inputs=("height",), target="height").take(np.array([0]))
    np.testing.assert_array_equal(inputs, [1.5])
    np.testing.assert_array_equal(target, [1.5])


def test_missing_column_is_reported():
    with pytest.raises(UsageError, match="no column 'tokens'"):
        GatheredSplit(Sentences(), "test", inputs=("tokens",), target="tags")
