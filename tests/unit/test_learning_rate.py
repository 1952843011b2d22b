"""Learning rates against published formulas, written out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.schedules import SCHEDULES
from crosstrain.core.settings.job_fields import choices
from crosstrain.core.update_rules import base_learning_rate, check_model_width, learning_rates, schedule_text


def rates(first=0, count=100, per_epoch=10, total=100, width=None, **fields):
    return learning_rates(Job(**fields), first, count, per_epoch, total, width=width)


def test_every_schedule_has_a_formula_and_a_description():
    allowed = set(choices("schedule"))
    assert allowed == set(SCHEDULES)
    for schedule in sorted(allowed):
        assert schedule_text(Job(backend="torch", schedule=schedule, warmup_steps=10), 100)


def test_constant():
    assert set(rates(lr=0.3)) == {0.3}


def test_step_decays_at_the_start_of_an_epoch():
    decayed = rates(lr=1.0, schedule="step", schedule_step_epochs=2, schedule_gamma=0.5)
    assert [decayed[step] for step in (0, 19, 20, 39, 40, 99)] == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.0625])


def test_cosine_falls_from_the_rate_to_almost_zero():
    decayed = rates(lr=2.0, schedule="cosine")
    assert decayed[0] == 2.0
    assert decayed[50] == pytest.approx(1.0)
    assert decayed[99] == pytest.approx(1 + math.cos(math.pi * 0.99))


def test_warm_up_is_linear_and_reaches_the_rate():
    warmed = rates(lr=1.0, warmup_steps=4)
    assert list(warmed[:6]) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_noam_rises_in_warm_up_then_falls_with_the_root():
    noam = rates(count=200, lr=1.5, schedule="noam", schedule_coefficient=2.0, warmup_steps=50, width=64)
    peak = 1.5 * 2.0 / 8.0 / math.sqrt(50)
    assert noam[49] == pytest.approx(peak)
    assert noam[0] == pytest.approx(peak / 50)
    assert noam[199] == pytest.approx(peak / 2)
    assert np.argmax(noam) == 49


def test_noam_continues_by_updates_at_any_position():
    """A run resumed with another batch size: epoch positions change, update numbers continue."""
    job = Job(schedule="noam", warmup_steps=10)
    whole = learning_rates(job, 0, 30, 10, 100, width=16)
    np.testing.assert_array_equal(learning_rates(job, 12, 18, 40, 400, np.arange(18) * 3.3, width=16), whole[12:])


def test_noam_requires_warm_up_and_a_model_width():
    with pytest.raises(ValueError, match=r"noam rises over --warmup-steps"):
        Job(schedule="noam")
    job = Job(schedule="noam", warmup_steps=4)
    check_model_width(job, 64)
    check_model_width(Job(), None)
    with pytest.raises(UsageError, match=r"schedule: got 'noam', .* and 'logreg' has none.* says its width in ModelSpec\.width"):
        check_model_width(job, None)


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_rate_scales_with_the_global_batch(rule, expected):
    job = Job(lr=0.1, scale_lr=rule, global_batch_size=128, base_batch_size=32, nodes=4)
    assert base_learning_rate(job) == pytest.approx(expected)


def test_async_rate_scales_with_the_batch_of_an_update():
    job = Job(lr=0.1, scale_lr="linear", mode="async", global_batch_size=128, base_batch_size=32, nodes=4)
    assert base_learning_rate(job) == pytest.approx(0.1)


@given(st.integers(0, 90), st.integers(1, 10), st.sampled_from(["constant", "step", "cosine"]), st.integers(0, 20))
def test_plan_cut_anywhere_has_the_same_rates(first, count, schedule, warmup_steps):
    whole = rates(schedule=schedule, warmup_steps=warmup_steps)
    np.testing.assert_array_equal(rates(first, count, schedule=schedule, warmup_steps=warmup_steps), whole[first : first + count])
