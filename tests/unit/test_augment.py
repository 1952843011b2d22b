"""Augmentation of training images: deterministic, exact on bytes, refused where unsuitable."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.backends.base import make_sampler
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.data.batching import FixedCount
from crosstrain.data.preprocessing import Augmentation, apply_changes, augmentation
from crosstrain.data.sampler import Sampler, permutation
from crosstrain.data.sources.digits import DATASET as DIGITS
from crosstrain.data.sources.glyphs import GLYPHS28
from crosstrain.data.store.stored_dataset import open_dataset

CALM = settings(deadline=None, derandomize=True, database=None)

BOTH = Augmentation(4, 2, flip=True)
GOLDEN = "56fafb082d5c9a4128a725c6ec6810fe28fe99114932b7f18121f65d12b95441"


def info(height=32, width=32, flippable=True):
    return DataInfo.of_images(
        "pictures", {"train": 9, "test": 9}, ImageFeatures((3, height, width), 10, (0.5,) * 3, (0.5,) * 3, flippable=flippable)
    )


class TestDraws:
    def test_are_uniform_over_moves_and_sides(self):
        changes = BOTH.draws(1, 0, 90_000)
        assert (changes.dtype, changes.shape) == (np.int32, (90_000, 3))
        counts = np.zeros((9, 5, 2), dtype=np.int64)
        np.add.at(counts, tuple((changes + np.array([4, 2, 0])).T), 1)  # raises for a value out of range
        # 90 combinations, 1,000 of each expected; chi-squared with 89 degrees of freedom passes 150 once in 10,000 seeds
        assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 150

    def test_differ_by_epoch_and_seed_and_from_the_data_order(self):
        first = BOTH.draws(1, 0, 1000)
        assert np.array_equal(first, BOTH.draws(1, 0, 1000))
        assert not np.array_equal(first, BOTH.draws(1, 1, 1000))
        assert not np.array_equal(first, BOTH.draws(2, 0, 1000))
        ranks = np.argsort(permutation(1, 0, 1000))
        assert abs(np.corrcoef(first[:, 0], ranks)[0, 1]) < 0.15  # five standard deviations

    def test_of_an_example_are_independent_of_others(self):
        assert np.array_equal(BOTH.draws(5, 3, 100), BOTH.draws(5, 3, 1000)[:100])

    def test_are_pinned(self):
        assert hashlib.sha256(BOTH.draws(3, 5, 10_000).astype("<i4").tobytes()).hexdigest() == GOLDEN

    def test_hold_requested_kinds_only(self):
        crop, flip = (augmentation(kind, info()) for kind in ("crop", "flip"))
        assert np.abs(crop.draws(0, 0, 1000)).max(0).tolist() == [4, 4, 0]
        assert np.abs(flip.draws(0, 0, 1000)).max(0).tolist() == [0, 0, 1]


class TestKinds:
    def test_scale_with_the_image(self):
        assert augmentation("crop+flip", info(63, 224)) == Augmentation(7, 28, flip=True)
        assert augmentation("none", info()) is None

    def test_mirroring_is_refused_for_unflippable_data(self):
        assert augmentation("crop", info(flippable=False)) == Augmentation(4, 4, flip=False)
        for kind in ("flip", "crop+flip"):
            with pytest.raises(UsageError, match=r"'pictures' must not be mirrored.*Allowed: none, crop"):
                augmentation(kind, info(flippable=False))

    def test_digits_are_not_mirrored(self):
        assert not DIGITS.load(None).flippable
        assert not replace(GLYPHS28, sizes={"train": 10, "test": 10}).load(None).flippable


class TestPixels:
    def test_move_down_and_right_and_leave_zeros(self):
        image = np.arange(1, 13, dtype=np.uint8).reshape(1, 1, 3, 4)
        moved = apply_changes(image, np.array([[1, 2, 0]], np.int32))
        assert moved[0, 0].tolist() == [[0, 0, 0, 0], [0, 0, 1, 2], [0, 0, 5, 6]]
        back = apply_changes(image, np.array([[-1, -2, 0]], np.int32))
        assert back[0, 0].tolist() == [[7, 8, 0, 0], [11, 12, 0, 0], [0, 0, 0, 0]]

    def test_are_mirrored_after_the_move(self):
        image = np.arange(1, 13, dtype=np.uint8).reshape(1, 1, 3, 4)
        assert apply_changes(image, np.array([[0, 1, 1]], np.int32))[0, 0, 0].tolist() == [3, 2, 1, 0]

    @CALM
    @given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.data())
    def test_equal_the_formula(self, height, width, channels, data):
        move = st.tuples(st.integers(-height, height), st.integers(-width, width), st.integers(0, 1))
        changes = np.array(data.draw(st.lists(move, max_size=4)), dtype=np.int32).reshape(-1, 3)
        images = np.random.default_rng(0).integers(1, 256, (len(changes), channels, height, width), dtype=np.uint8)
        before = images.copy()
        result = apply_changes(images, changes)
        assert np.array_equal(images, before)
        for k, (dy, dx, flip) in enumerate(changes.tolist()):
            for y in range(height):
                for x in range(width):
                    from_y, from_x = y - dy, (width - 1 - x if flip else x) - dx
                    inside = 0 <= from_y < height and 0 <= from_x < width
                    assert result[k, :, y, x].tolist() == (images[k, :, from_y, from_x].tolist() if inside else [0] * channels)


class TestBatches:
    @CALM
    @given(st.integers(1, 200), st.integers(1, 220), st.integers(1, 5), st.sampled_from(["sync", "async"]), st.data())
    def test_example_changes_equally_in_any_batch(self, size, batch, workers, mode, data):
        sampler = Sampler(size, 11, FixedCount(batch, workers, mode), workers, BOTH)
        skip = data.draw(st.integers(0, size))
        expected = BOTH.draws(11, 2, size)
        whole = sampler.whole(2, 0, sampler.steps_in_epoch(skip), skip)
        pieces = [whole]
        if mode == "sync":
            pieces += [sampler.for_rank(2, 0, len(whole), rank, skip) for rank in range(workers)]
        for piece in pieces:
            assert piece.changes.dtype == np.int32
            assert np.array_equal(piece.changes, expected[piece.indices])

    def test_without_augmentation_carry_no_changes(self):
        sampler = make_sampler(Job(), open_dataset("digits"))
        assert sampler.whole(0, 0, 2).changes is None
        assert sampler.for_rank(0, 0, 2, 0).changes is None

    def test_of_a_job_follow_its_augment(self):
        sampler = make_sampler(Job(augment="crop", nodes=2), open_dataset("digits"))
        assert np.abs(sampler.for_rank(0, 0, 20, 1).changes).max(0).tolist() == [1, 1, 0]
        with pytest.raises(UsageError, match="augment"):
            make_sampler(Job(augment="crop+flip"), open_dataset("digits"))
