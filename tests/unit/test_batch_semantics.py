"""Examples per update, and per micro-batch of a worker."""

import numpy as np
import pytest
from comparison_samples import made
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from crosstrain.backends.base import State
from crosstrain.core.job import Job
from crosstrain.core.update_rules import EMA, averaging_rates, base_learning_rate, slot_names
from crosstrain.data.sampler import run_sampler
from crosstrain.launch.sweep_runner import updates
from crosstrain.report.compare.factor_values import budget, update_examples
from crosstrain.report.runs.run import count_examples, real_batch


def test_batch_size_is_a_workers_micro_batch():
    job = Job(batch_size=8, accumulate=4, nodes=3, procs_per_node=2, scale_lr="linear", lr=0.1, base_batch_size=32)
    assert (job.micro_batch, job.per_worker_batch, job.global_batch) == (8, 32, 192)
    assert base_learning_rate(job) == pytest.approx(0.6)
    assert base_learning_rate(job.model_copy(update={"mode": "async"})) == pytest.approx(0.1)


def test_global_batch_is_the_whole_update():
    job = Job(global_batch_size=100, accumulate=4, nodes=3)
    assert (job.micro_batch, job.per_worker_batch, job.global_batch) == (9, 34, 100)


def test_more_micro_batches_than_examples_are_refused():
    Job(global_batch_size=8, nodes=2, accumulate=4)
    with pytest.raises(ValidationError, match="accumulate: a worker's 4 examples of an update cannot be computed in 5 micro-batches"):
        Job(global_batch_size=8, nodes=2, accumulate=5)
    with pytest.raises(ValidationError, match=r"accumulate: an update of .* examples is more than any data has"):
        Job(batch_size=10**9, accumulate=65_536, nodes=4096)


def test_weight_average_is_a_separate_slot():
    assert slot_names(Job(ema_decay=0.9)) == ("ema",)
    assert slot_names(Job(ema_decay=0.9, optimizer="adam")) == ("first_moment", "second_moment", "ema")
    assert slot_names(Job(optimizer="adam")) == ("first_moment", "second_moment")
    assert averaging_rates(0.5, np.array([1])) == pytest.approx(9 / 11)
    assert averaging_rates(0.5, np.array([100])) == 0.5


def test_state_to_evaluate_uses_moving_average():
    """The moving average if present, never another slot; the buffers are the model's."""
    trained, average, buffers = ({"w": np.full(2, value)} for value in (1.0, 2.0, 3.0))
    evaluated = State(trained, {"momentum": buffers, EMA: average}, 7, buffers).to_evaluate()
    assert (evaluated.parameters, evaluated.slots, evaluated.updates, evaluated.buffers) == (average, {}, 7, buffers)
    assert State(trained, {"momentum": buffers}, 7, buffers).to_evaluate().parameters is trained


@given(
    size=st.integers(1, 60),
    batch=st.integers(1, 12),
    nodes=st.integers(1, 5),
    mode=st.sampled_from(["sync", "async"]),
    steps=st.integers(1, 200),
)
def test_update_examples_match_sampler(size, batch, nodes, mode, steps):
    """Also where a batch exceeds all training examples; the order is that of real runs."""
    job = Job(batch_size=batch, accumulate=1, nodes=nodes, mode=mode, steps=steps)
    sampler = run_sampler(job, size)
    sampled = sampler.whole(0, 0, sampler.steps_per_epoch).examples
    described = {"dataset": {"sizes": {"train": size}}}
    requested_batch = job.global_batch if mode == "sync" else job.per_worker_batch
    assert real_batch(described, requested_batch) == sampled.max()
    assert count_examples(described, steps, requested_batch) == sum(int(sampled[step % len(sampled)]) for step in range(steps))
    per_worker = [sampler.for_rank(0, 0, 1, rank).offsets[-1] for rank in range(nodes)] if mode == "sync" else [sampled[0]]
    assert max(per_worker) <= job.per_worker_batch
    assert updates(job.model_copy(update={"steps": None, "epochs": 3}), float(size)) == 3 * sampler.steps_per_epoch


@pytest.mark.parametrize(("mode", "examples"), [("sync", 13), ("async", 6)])
def test_update_examples_are_capped_by_dataset_size(mode, examples):
    run = made(mode=mode, nodes=3, batch_size=3, accumulate=2, steps=10, dataset={"sizes": {"train": 13, "test": 4}})
    assert update_examples(run) == examples
    assert budget(run) == ("examples", 130 if mode == "sync" else 4 * 13 - 13 + 6)
