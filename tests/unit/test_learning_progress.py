"""The classification of learning curves (improving, flat, overfitting) on known curves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.report.analysis.learning import CERTAIN, CHANCE, MIN_EVALUATIONS, assess_curves

COURSES = {
    "improving": lambda x: 2 * np.exp(-3 * x),
    "flat": lambda x: 2 * np.exp(-15 * x) + 0.5,
    "overfitting": lambda x: 2 * np.exp(-8 * x) + 0.6 * np.maximum(0, x - 0.4),
}
"""Evaluation losses over the run, 0 to 1: falling to its end, falling in its first quarter, rising over its last half."""


def course(name, n):
    return COURSES[name](np.linspace(0, 1, n))


def training(n):
    return 2 * np.exp(-5 * np.linspace(0, 1, n))


@pytest.mark.parametrize("name", COURSES)
@pytest.mark.parametrize("n", [MIN_EVALUATIONS, 12, 30, 100, 1000])
def test_smooth_curve_is_classified(name, n):
    assert assess_curves(course(name, n), training(n)).state == name


@given(
    name=st.sampled_from(list(COURSES)),
    n=st.integers(12, 200),
    scale=st.floats(1e-3, 1e3),
    shift=st.floats(-10, 10),
    seed=st.integers(0, 2**32 - 1),
)
def test_verdict_is_independent_of_scale_and_offset(name, n, scale, shift, seed):
    """Curves have noise of 0.5 % of the first loss."""
    noise = 0.01 * np.random.default_rng(seed).uniform(-1, 1, n)
    plain = assess_curves(course(name, n) + noise, training(n))
    moved = assess_curves(scale * (course(name, n) + noise + shift), scale * training(n))
    assert plain.state == moved.state
    assert moved.gain == pytest.approx(scale * plain.gain, rel=1e-3)


@pytest.mark.parametrize("name", COURSES)
@pytest.mark.parametrize("n", [12, 30, 100])
def test_little_noise_hides_the_truth_in_2_percent_at_most(name, n):
    """With noise of 0.5 % a few points may seem to fall by chance: `unclear`, no other verdict."""
    noises = (0.01 * np.random.default_rng(seed).uniform(-1, 1, n) for seed in range(150))
    states = [assess_curves(course(name, n) + noise, training(n)).state for noise in noises]
    assert sum(state not in (name, "unclear") for state in states) <= 3
    assert states.count(name) >= (150 * 0.85 if name == "flat" else 147)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_change(seed):
    """Runs of any length, with noise as large as the loss: flat, at most one in six unclear."""
    rng = np.random.default_rng(seed)
    states = [assess_curves(1 + rng.normal(size=n), training(n)).state for n in rng.integers(MIN_EVALUATIONS, 100, 100)]
    assert states.count("flat") + states.count("unclear") >= 97
    assert states.count("flat") >= 85


def test_single_outlier_decides_nothing():
    losses = course("flat", 20)
    for place in range(20):
        spiked = losses.copy()
        spiked[place] += 1.0
        assert assess_curves(spiked, training(20)).state in ("flat", "unclear"), place


def test_too_few_evaluations_are_not_judged():
    progress = assess_curves(course("overfitting", MIN_EVALUATIONS - 1), training(MIN_EVALUATIONS - 1))
    assert (progress.state, progress.reason) == ("unclear", f"7 evaluations of at least {MIN_EVALUATIONS}")


def test_non_finite_loss_is_not_judged():
    losses = course("improving", 20)
    losses[7] = np.nan
    assert assess_curves(losses, training(20)).state == "unclear"


@pytest.mark.parametrize("train", [np.full(20, np.nan), training(20)[::-1]])
def test_loss_rising_with_training_loss_is_no_overfitting(train):
    assert assess_curves(course("overfitting", 20), train).state == "worsening"


@pytest.mark.parametrize("value", [0.0, 2.3, 1e-30, 1e30])
def test_constant_loss_is_flat(value):
    assert assess_curves(np.full(20, value), np.full(20, value)).state == "flat"


@given(n=st.integers(MIN_EVALUATIONS, 100), slope=st.floats(-1, 1), noise=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_change_is_judged_by_its_standard_errors(n, slope, noise, seed):
    losses = 5 + slope * np.linspace(0, 1, n) + noise * np.random.default_rng(seed).normal(size=n)
    progress = assess_curves(losses, training(n))
    if progress.standard_errors is None or progress.state in ("overfitting", "worsening"):
        return
    notable = abs(progress.change) >= 0.01 * max(progress.gain, progress.rise) and abs(progress.change) > 1e-4
    expected = "flat" if progress.standard_errors < CHANCE else "unclear" if progress.standard_errors < CERTAIN else "change"
    state = {"improving": "change", "rising": "change"}.get(progress.state, progress.state)
    assert state == expected or (state == "flat" and not notable)
    assert progress.state != ("rising" if progress.change < 0 else "improving")
