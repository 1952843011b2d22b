"""The placeholder example for text data, which fits the columns that a model was trained on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.errors import UsageError
from crosstrain.data.base import DataInfo, ImageFeatures, TextFeatures
from crosstrain.data.columns import DTYPES, ColumnSpec
from crosstrain.data.store.stored_dataset import placeholder_text

SHAPES = st.tuples(st.none() | st.integers(1, 4)) | st.just(()) | st.tuples(st.none() | st.integers(1, 3), st.integers(1, 3))
COLUMNS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=4)


@given(COLUMNS, st.integers(2, 10**9))
def test_every_column_has_an_example_of_its_kind(columns, size):
    specs = tuple(ColumnSpec(f"column{number}", dtype, shape) for number, (dtype, shape) in enumerate(columns))
    data = placeholder_text(DataInfo("some", {"train": size, "test": size}, specs, TextFeatures({})))
    for split in ("train", "test"):
        assert data.info.sizes[split] == 1
        assert data.weights(split, "examples").tolist() == [1]
        for spec in specs:
            column = data.column(split, spec.name)
            assert (len(column), column.wrong_with(spec)) == (1, None)
            if spec.varies:
                assert data.weights(split, f"{spec.name}_tokens").tolist() == column.lengths.tolist()


def test_missing_content_is_reported():
    spec = ColumnSpec("source", "uint16", (None,))
    data = placeholder_text(DataInfo("some", {"train": 3, "test": 3}, (spec,), TextFeatures({"source": 9})))
    assert data.attachments == ()
    for refused in (lambda: data.attachment("vocabulary.model"), lambda: data.weights("test", "target_tokens"), lambda: data.images("test"),
                    lambda: data.labels("test"), lambda: data.inputs("test"), lambda: data.column("test", "target")):  # fmt: skip
        with pytest.raises(UsageError, match="'some'"):
            refused()


def test_images_have_no_placeholder():
    with pytest.raises(UsageError, match="is no text"):
        placeholder_text(DataInfo.of_images("digits", {"train": 1, "test": 1}, ImageFeatures((1, 8, 8), 10, (0.0,), (1.0,))))
