"""Columns of examples: `take` and `padded` equal example by example."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.data.columns import Column, ColumnSpec

CALM = settings(deadline=None, derandomize=True, database=None)
LISTS = st.lists(st.lists(st.integers(0, 255), max_size=7), max_size=12)


def make_column(examples):
    offsets = np.concatenate([[0], np.cumsum([len(example) for example in examples])]).astype(np.int64)
    return Column(np.array([value for example in examples for value in example], dtype=np.int32), offsets)


@CALM
@given(LISTS, st.data())
def test_varying_column_is_list_of_examples(examples, data):
    column = make_column(examples)
    assert column.wrong_with(ColumnSpec("tokens", "int32", (None,))) is None
    assert [column.example(index).tolist() for index in range(len(column))] == examples
    assert column.lengths.tolist() == [len(example) for example in examples]
    chosen = data.draw(st.lists(st.integers(0, max(0, len(examples) - 1)), max_size=20 if examples else 0))
    indices = np.array(chosen, dtype=np.int32)
    taken = column.take(indices)
    assert [taken.example(index).tolist() for index in range(len(taken))] == [examples[index] for index in indices]
    assert taken.wrong_with(ColumnSpec("tokens", "int32", (None,))) is None
    more = data.draw(st.integers(0, 3))
    width = max((len(examples[index]) for index in indices), default=0) + more
    assert taken.padded(width).tolist() == [examples[index] + [0] * (width - len(examples[index])) for index in indices]
    if not more:
        np.testing.assert_array_equal(taken.padded(), taken.padded(width))


def test_column_of_a_fixed_shape_is_an_array():
    column = Column(np.arange(24, dtype=np.uint8).reshape(4, 2, 3))
    assert column.wrong_with(ColumnSpec("image", "uint8", (2, 3))) is None
    assert len(column) == 4
    np.testing.assert_array_equal(column.take(np.array([2, 0])).values, column.values[[2, 0]])
    with pytest.raises(ValueError, match="all have one shape"):
        column.lengths  # noqa: B018 - reading it is what fails


def test_too_long_example_is_refused():
    with pytest.raises(ValueError, match="3 elements, more than 2"):
        make_column([[1], [1, 2, 3]]).padded(2)


@pytest.mark.parametrize("index", [-1, 2])
def test_missing_example_raises(index):
    with pytest.raises(IndexError):
        make_column([[1], [2]]).example(index)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (Column(np.zeros(3, np.int64), np.array([0, 3])), "is int64"),
        (Column(np.zeros(3, np.int32)), "has no offsets"),
        (Column(np.zeros((3, 2), np.int32), np.array([0, 3])), "is int32"),
        (Column(np.zeros(3, np.int32), np.array([1, 3])), "do not rise"),
        (Column(np.zeros(3, np.int32), np.array([0, 2])), "do not rise"),
        (Column(np.zeros(3, np.int32), np.array([0, 3, 2, 3])), "do not rise"),
        (Column(np.zeros(3, np.int32), np.array([], dtype=np.int64)), "not int64"),
        (Column(np.zeros(3, np.int32), np.array([0.0, 3.0])), "not int64"),
    ],
)
def test_wrong_column_is_reported(column, words):
    assert words in (column.wrong_with(ColumnSpec("tokens", "int32", (None,))) or "")


@pytest.mark.parametrize(("name", "dtype", "shape"), [("a b", "int32", ()), ("a", "object", ()), ("a", "int32", (2, None))])
def test_invalid_column_spec_is_refused(name, dtype, shape):
    with pytest.raises(ValueError, match="column"):
        ColumnSpec(name, dtype, shape)
