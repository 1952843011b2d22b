"""Computations for parameter server workers: from arrays here, torch's in a subprocess."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from computation_checks import CASES, Counting, Images, check

from crosstrain.backends.arrays.model import ArrayComputation, Passes
from crosstrain.backends.base import make_sampler
from crosstrain.backends.vectors import FlatValues
from crosstrain.core.job import Job

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("options", CASES, ids=str)
def test_array_computation_passes_checks(options, monkeypatch):
    monkeypatch.syspath_prepend(str(TESTS / "toy"))
    from crosstrain_toy import ToyModel, logreg

    check(lambda job, spec, data, sampler: ArrayComputation(job, spec, data, sampler, ToyModel(logreg)), options)


@pytest.mark.thorough
def test_torch_computation_passes_checks():
    script = Path(__file__).parent / "computations_torch.py"
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize(("accumulate", "passes"), [(1, 1), (3, 3), (5, 5)])
def test_buffers_are_updated_by_each_micro_batch(accumulate, passes):
    data, spec = Images(), Counting.spec
    job = Job(mode="async", global_batch_size=5, accumulate=accumulate)
    passes_of_model = Passes(job, spec, data, Counting())
    values, out = FlatValues(spec), FlatValues(spec)
    values.set_initial(spec, 0)
    batches = make_sampler(job, data).whole(0, 0, 2)
    for position, loss in enumerate(passes_of_model.gradients(batches, 0, values, out)):
        labels = data.labels("train")[batches.batch(position)]
        assert loss == pytest.approx(1.0)
        assert out.parameters["weight"] == labels.sum()
        np.testing.assert_array_equal(out.buffers["seen"], [-passes, -5])
        np.testing.assert_array_equal(values.buffers["seen"], [1 + passes * (position + 1), 1 + 5 * (position + 1)])


def test_empty_batch_gives_zeros_and_changes_nothing():
    data, spec = Images(), Counting.spec
    job = Job(nodes=3, global_batch_size=2)
    values, out = FlatValues(spec), FlatValues(spec)
    out.vector.fill(9.0)
    passes = Passes(job, spec, data, Counting())
    (loss,) = passes.gradients(make_sampler(job, data).for_rank(0, 0, 1, 2), 0, values, out)
    assert loss == 0.0
    assert not out.vector.any()
    assert not values.vector.any()
