"""The loss scale of fp16: the rule that all backends follow."""

from __future__ import annotations

import pytest

from crosstrain.backends.vectors import CLEAN_STEPS, FIRST_SCALE, MAX_SCALE, MIN_SCALE, ChiefLossScale, next_scale, refuse_exhausted
from crosstrain.core.errors import RunFailedError


def scale_after(updates, scale=FIRST_SCALE, clean=0):
    """Return scale and clean updates after updates with finite or non-finite gradients."""
    for finite in updates:
        scale, clean = next_scale(scale, clean, finite)
    return scale, clean


def test_overflow_halves_the_scale_and_resets_the_count():
    assert scale_after([True] * 7) == (FIRST_SCALE, 7)
    assert scale_after([True, True, False, True]) == (FIRST_SCALE / 2, 1)
    assert scale_after([False, False, False]) == (FIRST_SCALE / 8, 0)


def test_scale_doubles_after_enough_clean_updates():
    assert scale_after([True] * (CLEAN_STEPS - 1), 8.0) == (8.0, CLEAN_STEPS - 1)
    assert scale_after([True] * CLEAN_STEPS, 8.0) == (16.0, 0)
    assert scale_after([*[True] * (CLEAN_STEPS - 1), False, True], 8.0) == (4.0, 1)


def test_scale_does_not_exceed_the_first():
    assert scale_after([True] * (3 * CLEAN_STEPS), 2**13) == (MAX_SCALE, 0)
    assert MAX_SCALE == FIRST_SCALE == 2**14
    assert scale_after([True] * CLEAN_STEPS, 2.0**16) == (MAX_SCALE, 0)  # of an earlier release


def test_permanent_overflow_ends_in_an_error():
    refuse_exhausted(scale_after([False] * 14)[0])
    assert scale_after([False] * 14) == (MIN_SCALE, 0)
    with pytest.raises(RunFailedError, match=r"precision fp16: .* even at the loss scale 1, .* --precision bf16"):
        refuse_exhausted(scale_after([False] * 15)[0])


def test_async_workers_share_a_loss_scale():
    scale = ChiefLossScale()
    scale.learn(2.0**14, 2.0**12, 10)
    scale.learn(2.0**14, 2.0**13, 10)  # of a worker that had the older one
    assert scale.scalars == {"loss_scale": 2.0**12, "clean_steps": 0.0}
    for _ in range(4):
        scale.learn(scale.scale, scale.scale, 2000)
    assert scale.scalars == {"loss_scale": 2.0**14, "clean_steps": 0.0}
    scale.restore({"loss_scale": 8.0, "clean_steps": 1999.0})
    scale.learn(8.0, 8.0, 1)
    assert scale.scalars == {"loss_scale": 16.0, "clean_steps": 0.0}
    scale.restore({})
    assert scale.scalars == {"loss_scale": FIRST_SCALE, "clean_steps": 0.0}
    with pytest.raises(RunFailedError, match="precision fp16"):
        scale.learn(1.0, 0.5, 1)
