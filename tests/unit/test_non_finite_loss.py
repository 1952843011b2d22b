"""Losses that are not finite: which one is named, and what happens to the run."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.errors import RunFailedError
from crosstrain.engine.policies import LossGuard


def guard(on_nan="fail"):
    warnings = []
    return LossGuard(on_nan, 0.05, warnings.append), warnings


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.integers(0, 10**6))
def test_first_non_finite_loss_ends_the_run(losses, first_step):
    rates = np.linspace(0.1, 0.2, len(losses))
    bad = next((place for place, loss in enumerate(losses) if not math.isfinite(loss)), None)
    watched, warnings = guard()
    if bad is None:
        watched.trained(first_step, np.array(losses, np.float32), rates)
        return
    with pytest.raises(RunFailedError) as raised:
        watched.trained(first_step, np.array(losses, np.float32), rates)
    kind = "not a number" if math.isnan(losses[bad]) else "infinite"
    place = f"(number {first_step + bad} in steps.jsonl, which counts from 0)"
    assert f"the loss of step {first_step + bad + 1:,} is {kind} {place}, at the learning rate {rates[bad]:g};" in str(raised.value)
    assert warnings == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_non_finite_evaluation_ends_the_run(loss):
    watched, _ = guard()
    watched.evaluated(3, "test", 0.7)
    watched.trained(3, np.array([0.5, 0.4]), np.array([0.3, 0.2]))
    with pytest.raises(RunFailedError, match=r"the test loss after 5 steps is .* at the learning rate 0\.2;"):
        watched.evaluated(5, "test", loss)


def test_continuing_run_warns_once():
    watched, warnings = guard("continue")
    for step in range(3):
        watched.trained(step, np.array([math.nan]), np.array([0.1]))
    watched.evaluated(3, "test", math.nan)
    (line,) = warnings
    assert "the loss of step 1 is not a number (number 0 in steps.jsonl, which counts from 0)" in line
    assert "training continues (--on-nan continue)" in line
