"""The conformance suite's independent image reader agrees with the product's definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.conformance.cases import _inputs as judged_inputs
from crosstrain.conformance.cases import train_logistic_regression
from crosstrain.core.job import Job
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.data.preprocessing import apply_changes
from crosstrain.data.store.stored_dataset import open_dataset

shifts = st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.integers(0, 1))


@given(
    changes=st.lists(shifts, min_size=1, max_size=6),
    shape=st.tuples(st.integers(1, 3), st.integers(4, 9), st.integers(4, 9)),
    seed=st.integers(0, 2**32 - 1),
)
def test_augmented_images_follow_the_definition(changes, shape, seed):
    draw = np.random.default_rng(seed)
    images = draw.integers(0, 256, (len(changes), *shape), dtype=np.uint8)
    mean, std = tuple(draw.uniform(0, 1, shape[0]).tolist()), tuple(draw.uniform(0.1, 1, shape[0]).tolist())
    info = DataInfo.of_images("made-up", {"train": len(images), "test": 1}, ImageFeatures(shape, 2, mean, std))
    moved = np.array(changes, dtype=np.int32)
    changed = apply_changes(images, moved).astype(np.float64) / 255
    expected = (changed - np.reshape(mean, (-1, 1, 1))) / np.reshape(std, (-1, 1, 1))
    np.testing.assert_array_equal(judged_inputs(info, images, moved), expected.reshape(len(images), -1))


def test_images_without_augmentation_are_the_inputs():
    data = open_dataset("digits")
    inputs = judged_inputs(data.info, data.images("test"), None)
    np.testing.assert_array_equal(inputs.astype(np.float32), data.inputs("test").reshape(len(inputs), -1))


def test_augmentation_changes_training():
    job = {"backend": "reference", "steps": 20, "global_batch_size": 30}
    plain, changed = (
        train_logistic_regression(Job.model_validate({**job, "augment": kind}), open_dataset("digits")) for kind in ("none", "crop")
    )
    assert np.all(np.isfinite(changed.losses))
    assert np.max(np.abs(plain.losses - changed.losses)) > 1e-3
