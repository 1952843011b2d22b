"""Estimated rest of a training: by hand, and for measured parts drawn at random."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.units import Cadence
from crosstrain.report.analysis.duration import Block, Measured, Plan, estimate, make_blocks, steps_per_epoch


def plan(total, evaluate="end", save=None, *, save_final=False, per_epoch=None):
    return Plan(total, Cadence.parse(evaluate), None if save is None else Cadence.parse(save), save_final, per_epoch)


def measured(steps, *paces, evaluations=(), stalls=()):
    """Blocks of a second each, at these updates per second."""
    return Measured(steps, [Block(pace, 1.0) for pace in paces], evaluations, stalls)


def test_estimate_has_training_evaluations_and_checkpoints():
    left = estimate(
        plan(1000, "100steps", "250steps", save_final=True), measured(250, *[50.0] * 5, evaluations=[3.0, 0.4, 0.6], stalls=[0.25])
    )
    assert (left.steps, left.train_seconds) == (750, 15.0)
    assert (left.evaluations, left.evaluate_seconds) == (8, 4.0)  # 300, 400 … 1000; half a second each, except the first
    assert (left.saves, left.save_seconds) == (3, 0.75)
    assert left.seconds == 19.75
    assert left.low_seconds < 0.9 * left.seconds
    assert left.high_seconds == pytest.approx(2 * left.seconds - left.low_seconds)


@pytest.mark.parametrize(
    ("evaluate", "per_epoch", "times"),
    [
        ("end", None, 1),
        ("1epoch", 100.0, 10),
        ("3epochs", 100.0, 4),
        ("1epoch", 99.99, 10),
        ("1epoch", None, 1),
        ("300steps", None, 4),
        ("1000steps", None, 1),
        ("5000steps", None, 1),
        ("4s", None, 6),
    ],
)
def test_plan_has_its_number_of_evaluations(evaluate, per_epoch, times):
    left = estimate(plan(1000, evaluate, per_epoch=per_epoch), measured(0, 50.0, evaluations=[1.0]))
    assert (left.evaluations, left.evaluate_seconds) == (times, times)


def test_unmeasured_evaluations_are_unknown():
    left = estimate(plan(100, "10steps"), measured(0, 50.0))
    assert (left.evaluations, left.evaluate_seconds, left.seconds) == (10, None, 2.0)


def test_final_translation_counts_once():
    translating = replace(plan(1000), translate=True)
    unknown, known = (estimate(translating, replace(measured(0, *[50.0] * 5), translation_seconds=seconds)) for seconds in ((), (9.0, 4.0)))
    assert (unknown.seconds, unknown.translate_seconds) == (20.0, None)
    assert (known.seconds, known.translate_seconds) == (24.0, 4.0)
    assert known.half_width > unknown.half_width
    assert estimate(plan(1000), measured(0, 50.0)).translate_seconds == 0.0
    assert estimate(translating, measured(1000, 50.0)).translate_seconds == 0.0


def test_warm_up_does_not_count_for_speed():
    assert estimate(plan(1000), measured(0, 1.0, *[100.0] * 9)).step_seconds == 0.01


def test_few_blocks_give_no_band():
    left = estimate(plan(1000), measured(0, 100.0, 110.0, 90.0))
    assert (left.low_seconds, left.high_seconds) == (None, None)


def test_missing_speed_gives_no_estimate():
    assert estimate(plan(1000), Measured(0, [], (), ())) is None


def test_completed_plan_has_nothing_left():
    assert estimate(plan(100, "10steps", "10steps", save_final=True), measured(100, *[50.0] * 4)).seconds == 0.0


@given(
    pace=st.floats(0.1, 1e4),
    scatter=st.floats(0.0, 0.3),
    groups=st.integers(40, 200),
    times=st.integers(2, 50),
    seed=st.integers(0, 2**32 - 1),
)
def test_band_covers_a_steady_run(pace, scatter, groups, times, seed):
    """Random speeds; the rest is `times` as long. Nine in ten are within the band, all within 2."""
    rng = np.random.default_rng(seed)
    seconds = 10 / pace * (1 + scatter * rng.uniform(-1, 1, groups * (times + 1)))
    blocks = make_blocks(np.cumsum(seconds)[:groups], np.full(groups, 10), [])
    left = estimate(plan(10 * groups * (times + 1)), Measured(10 * groups, blocks, (), ()))
    assert abs(left.seconds - seconds[groups:].sum()) <= 2 * left.half_width
    assert left.half_width <= (0.11 + scatter) * left.seconds


def test_pauses_are_not_part_of_blocks():
    ends = np.array([1.0, 2.0, 8.0, 9.0])
    blocks = make_blocks(ends, np.full(4, 5), [(2.0, 7.0)])
    assert [block.steps for block in blocks] == pytest.approx([5.0] * 4)
    assert [block.seconds for block in blocks] == pytest.approx([1.0] * 4)


def test_no_groups_give_no_blocks():
    assert make_blocks(np.zeros(0), np.zeros(0, np.int64), []) == []
    assert make_blocks(np.zeros(3), np.full(3, 5), []) == []


@pytest.mark.parametrize(
    ("job", "examples", "updates"),
    [
        ({"epochs": 4, "total_steps": 180}, None, 45.0),
        ({"steps": 180, "total_steps": 180, "dataset": {"sizes": {"train": 1437}}}, 32.0, 45.0),
        ({"epochs": 4, "total_steps": 180, "segments": [{}, {}], "dataset": {"sizes": {"train": 1440}}}, 32.0, 45.0),
        ({"steps": 180, "total_steps": 180}, 32.0, None),
    ],
)
def test_updates_of_an_epoch_are_counted(job, examples, updates):
    assert steps_per_epoch(job, examples) == updates
