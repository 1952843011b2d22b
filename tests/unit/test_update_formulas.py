"""Update rules over arrays equal the float64 reference, for any job and any blocks."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.backends import vectors as vector_rule
from crosstrain.backends.vectors import UpdateFormulas, VectorRule, clip
from crosstrain.conformance.cases import _Optimizer
from crosstrain.core.job import Job
from crosstrain.core.update_rules import EMA, slot_names
from crosstrain.exchange.parameter_server.shards import bind_rule

DESCENTS = st.fixed_dictionaries(
    {
        "optimizer": st.just("sgd"),
        "momentum": st.sampled_from([0.0, 0.5, 0.9]),
        "weight_decay": st.sampled_from([0.0, 1e-2]),
        "ema_decay": st.sampled_from([0.0, 0.9, 0.999]),
    }
).flatmap(lambda job: st.sampled_from([job, {**job, "nesterov": True}]) if job["momentum"] else st.just(job))
ADAMS = st.fixed_dictionaries(
    {
        "optimizer": st.sampled_from(["adam", "adamw"]),
        "beta1": st.sampled_from([0.0, 0.9]),
        "beta2": st.sampled_from([0.9, 0.999]),
        "weight_decay": st.sampled_from([0.0, 1e-2]),
        "ema_decay": st.sampled_from([0.0, 0.99]),
    }
)
JOBS = st.one_of(DESCENTS, ADAMS).map(Job.model_validate)


@given(job=JOBS, size=st.integers(0, 20), block=st.sampled_from([1, 3, 64]), seed=st.integers(0, 2**32 - 1))
def test_updates_equal_the_reference(job, size, block, seed):
    draw = np.random.default_rng(seed)
    weights = draw.normal(size=size).astype(np.float32)
    expected, average = {"w": weights.astype(np.float64)}, weights.astype(np.float64)
    reference = _Optimizer(job, expected)
    with patch.object(vector_rule, "BLOCK_ELEMENTS", block):
        rule = VectorRule(job, weights)
        for update in range(1, 8):
            gradient, lr = draw.normal(size=size).astype(np.float32), float(draw.uniform(1e-3, 0.1))
            rule.step(gradient, lr)
            reference.apply({"w": gradient.astype(np.float64)}, lr)
            decay = min(job.ema_decay, (1 + update) / (10 + update))
            average = decay * average + (1 - decay) * expected["w"]
    assert rule.updates == 7
    assert tuple(rule.slots) == slot_names(job)
    np.testing.assert_allclose(weights, expected["w"], rtol=2e-4, atol=2e-5)
    if job.ema_decay:
        np.testing.assert_allclose(rule.slots[EMA], average, rtol=2e-4, atol=2e-5)


SIZES = {"a.weight": 5, "a.bias": 2, "norm.weight": 3, "norm.bias": 3, "b.weight": 4}


@given(
    job=JOBS.filter(lambda job: job.weight_decay > 0),
    patterns=st.lists(st.sampled_from(["*.bias", "*norm*", "a.*", "b.weight", "?.weight", "*"]), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, sum(SIZES.values())), max_size=2).map(sorted),
    seed=st.integers(0, 2**32 - 1),
)
def test_excepted_parameters_have_no_decay_in_any_shard(job, patterns, cuts, seed):
    draw, total = np.random.default_rng(seed), sum(SIZES.values())
    values, borders = draw.normal(size=total).astype(np.float32), np.cumsum([0, *SIZES.values()])
    places = {name: slice(*bounds) for name, bounds in zip(SIZES, pairwise(borders), strict=True)}
    kinds = {False: job, True: job.model_copy(update={"weight_decay": 0.0})}
    exempt = {name: any(fnmatchcase(name, pattern) for pattern in patterns) for name in SIZES}
    expected = {name: {"w": values[place].astype(np.float64)} for name, place in places.items()}
    references = {name: _Optimizer(kinds[exempt[name]], weights) for name, weights in expected.items()}
    excepting = job.model_copy(update={"weight_decay_except": ",".join(patterns)})
    shards = [(start, values[start:stop]) for start, stop in pairwise([0, *cuts, total])]
    rules = [(slice(start, start + len(part)), bind_rule(excepting, part, VectorRule, SIZES, start)) for start, part in shards]
    for _ in range(4):
        gradient, lr = draw.normal(size=total).astype(np.float32), float(draw.uniform(1e-3, 0.1))
        for name, reference in references.items():
            reference.apply({"w": gradient[places[name]].astype(np.float64)}, lr)
        for place, rule in rules:
            rule.step(gradient[place].copy(), lr)
    for name, place in places.items():
        np.testing.assert_allclose(values[place], expected[name]["w"], rtol=2e-4, atol=2e-5)
    assert {rule.updates for _, rule in rules} == {4}


@given(job=JOBS, seed=st.integers(0, 2**32 - 1))
def test_inputs_are_unchanged_and_numbers_stay_float32(job, seed):
    draw = np.random.default_rng(seed)
    formulas = UpdateFormulas(job)
    given_arrays = {name: np.abs(draw.normal(size=(2, 3))).astype(np.float32) for name in ("weights", "gradient", *formulas.slots)}
    kept = {name: value.copy() for name, value in given_arrays.items()}
    slots = {name: given_arrays[name] for name in formulas.slots}
    weights, new_slots = formulas.updated(np, given_arrays["weights"], given_arrays["gradient"], slots, formulas.factors(0.1, 3))
    assert all(np.array_equal(value, kept[name]) for name, value in given_arrays.items())
    assert set(new_slots) == set(formulas.slots)
    assert {value.dtype for value in (weights, *new_slots.values())} == {np.dtype(np.float32)}
    assert {value.shape for value in (weights, *new_slots.values())} == {(2, 3)}


@given(values=st.lists(st.floats(-100, 100, width=32), max_size=9), limit=st.sampled_from([0.5, 3.0, 1000.0]))
def test_gradient_is_clipped_by_its_norm(values, limit):
    gradient = np.array(values, np.float32)
    before, norm = gradient.astype(np.float64), np.linalg.norm(np.array(values, np.float64))
    clip(gradient, limit)
    if norm < limit - 1e-3:
        np.testing.assert_array_equal(gradient, before.astype(np.float32))
    assert np.linalg.norm(gradient.astype(np.float64)) <= limit * (1 + 1e-5) or norm <= limit
    np.testing.assert_allclose(gradient, before * min(1.0, limit / (norm + 1e-6)), rtol=1e-5, atol=1e-30)


def test_non_finite_gradient_stays_non_finite():
    gradient = np.array([1.0, np.nan], np.float32)
    clip(gradient, 0.1)
    assert np.isnan(gradient).any()
    with pytest.raises(KeyError):
        UpdateFormulas(Job(momentum=0.9)).updated(np, gradient, gradient, {}, UpdateFormulas(Job()).factors(0.1, 1))
