"""Learning rates against torch's own schedulers' published formulas, written out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.job import Job
from crosstrain.engine.learning_rate import base_learning_rate, learning_rates


def rates(first=0, count=100, per_epoch=10, total=100, **fields):
    return learning_rates(Job(**fields), first, count, per_epoch, total)


def test_constant():
    assert set(rates(lr=0.3)) == {0.3}


def test_step_decays_at_the_start_of_an_epoch():
    found = rates(lr=1.0, schedule="step", schedule_step_epochs=2, schedule_gamma=0.5)
    assert [found[step] for step in (0, 19, 20, 39, 40, 99)] == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.0625])


def test_cosine_goes_from_the_rate_to_almost_nothing():
    found = rates(lr=2.0, schedule="cosine")
    assert found[0] == 2.0
    assert found[50] == pytest.approx(1.0)
    assert found[99] == pytest.approx(1 + math.cos(math.pi * 0.99))


def test_warm_up_is_linear_and_reaches_the_rate():
    found = rates(lr=1.0, warmup_steps=4)
    assert list(found[:6]) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_scaling_with_the_global_batch(rule, expected):
    job = Job(lr=0.1, scale_lr=rule, global_batch_size=128, base_batch_size=32, nodes=4)
    assert base_learning_rate(job) == pytest.approx(expected)


def test_async_scales_with_the_batch_of_an_update():
    job = Job(lr=0.1, scale_lr="linear", mode="async", global_batch_size=128, base_batch_size=32, nodes=4)
    assert base_learning_rate(job) == pytest.approx(0.1)


@given(st.integers(0, 90), st.integers(1, 10), st.sampled_from(["constant", "step", "cosine"]), st.integers(0, 20))
def test_a_plan_cut_anywhere_has_the_same_rates(first, count, schedule, warmup_steps):
    whole = rates(schedule=schedule, warmup_steps=warmup_steps)
    np.testing.assert_array_equal(rates(first, count, schedule=schedule, warmup_steps=warmup_steps), whole[first : first + count])
