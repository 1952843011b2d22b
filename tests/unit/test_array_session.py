"""Sync sessions with a backend's gradient sum: two ranks equal one."""

import threading
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from computation_checks import Counting, Images

from crosstrain.backends.arrays.backend import ArraySession, SingleRank
from crosstrain.backends.base import CalibrationOrder, Plan, State
from crosstrain.backends.vectors import VectorRule
from crosstrain.core.cluster import Cluster, Task
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.update_rules import EMA
from crosstrain.models.logreg import build
from crosstrain.models.objectives import Objective

TOY = Path(__file__).parent.parent / "toy"


@pytest.fixture(name="toy")
def importable_toy(monkeypatch):
    monkeypatch.syspath_prepend(str(TOY))
    import crosstrain_toy.logreg

    return crosstrain_toy


class ThreadRanks:
    """Ranks that are threads: the last to arrive sums for all."""

    def __init__(self, count):
        self.vectors, self.closed = {}, []
        self.barrier = threading.Barrier(count, self.add)
        self.left = threading.Barrier(count)

    def add(self):
        self.total = sum(self.vectors[rank].copy() for rank in sorted(self.vectors))

    def member(self, rank):
        outer = self

        class Rank:
            def add_up(self, vector):
                outer.vectors[rank] = vector
                outer.barrier.wait(10)
                vector[:] = outer.total
                outer.left.wait(10)

            def close(self, *, healthy):
                outer.closed.append((rank, healthy))

        return Rank()


def on_ranks(job, make, act):
    """Return the result of `act(session)` on each rank."""
    placed = make.backend.placement(job)
    cluster = Cluster(tuple(placed), ("127.0.0.1",) * job.nodes, {task.name: 1 for task in placed}, "00")
    ranks, results, errors = ThreadRanks(job.workers), {}, []

    def run(task):
        try:
            session = make(Task(task, cluster, threads=1), job, ranks.member(task.index) if job.wrapped else SingleRank())
            results[task.index] = act(session)
            session.close()
            session.close()
        except BaseException as error:
            ranks.barrier.abort()
            ranks.left.abort()
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(task,)) for task in placed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert sorted(ranks.closed) == ([(rank, True) for rank in range(job.workers)] if job.wrapped else [])
    return [results[rank] for rank in range(job.workers)]


class Made:
    """Makes sessions of one model."""

    def __init__(self, toy, spec=None, model=None):
        self.backend, self.data = toy.BACKEND, Images()
        self.spec, self.model = spec or build(self.data.info), model or toy.ToyModel(toy.logreg)

    def __call__(self, task, job, ranks):
        return ArraySession(task, job, self.spec, self.data, self.model, VectorRule, ranks)


def trained(session):
    losses = [result.losses for result in session.train(Plan(0, 3, 0, 0, np.array([0.1, 0.2, 0.05])))]
    return np.concatenate(losses), deepcopy(session.state()), session.evaluate("test")


CASES = [
    {"momentum": 0.9, "ema_decay": 0.9},
    {"optimizer": "adamw", "weight_decay": 0.1, "clip_norm": 0.1, "accumulate": 2},
    {"augment": "crop", "steps_per_call": 2},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize(("workers", "batch"), [(2, 12), (3, 2)])
def test_several_ranks_equal_one(toy, options, workers, batch):
    if batch < options.get("accumulate", 1) * workers:
        options = {**options, "accumulate": 1}
    ((losses, state, evaluated),) = on_ranks(Job(global_batch_size=batch, **options), Made(toy), trained)
    for rank, (rank_losses, copied, counted) in enumerate(
        on_ranks(Job(nodes=workers, global_batch_size=batch, **options), Made(toy), trained)
    ):
        np.testing.assert_allclose(rank_losses, losses, rtol=1e-5)
        assert counted.sums == pytest.approx(evaluated.sums, rel=1e-5)
        assert counted.updates_applied == copied.updates == 3
        if rank:
            assert copied.parameters == {}
            continue
        for kind, expected_values in (
            (copied.parameters, state.parameters),
            *((copied.slots[name], state.slots[name]) for name in state.slots),
        ):
            for name, value in expected_values.items():
                np.testing.assert_allclose(kind[name], value, rtol=1e-4, atol=1e-6)


def test_loaded_state_reaches_all_ranks_and_resets_absent_slots(toy):
    def act(session):
        losses, state, _ = trained(session)
        session.load(replace(state, slots={}) if session._rank == 0 else None)
        loaded = deepcopy(session.state())
        again = np.concatenate([result.losses for result in session.train(Plan(3, 1, 0, 3, np.array([0.1])))])
        return losses, state, loaded, again

    first, second = on_ranks(Job(nodes=2, global_batch_size=6, momentum=0.9, ema_decay=0.5), Made(toy), act)
    np.testing.assert_array_equal(first[3], second[3])
    _, state, loaded, _ = first
    assert loaded.updates == state.updates == 3
    for name, value in state.parameters.items():
        np.testing.assert_array_equal(loaded.parameters[name], value)
        np.testing.assert_array_equal(loaded.slots[EMA][name], value)
        assert not loaded.slots["momentum"][name].any()


def test_missing_or_foreign_state_is_refused(toy):
    def act(session):
        with pytest.raises(ValueError, match="was given no state"):
            session.load(None)
        with pytest.raises(ValueError, match=r"parameter 'dense.weight' of model 'logreg' has shape \(3, 64\)"):
            session.load(State({"dense.weight": np.zeros((2, 2), np.float32)}))

    on_ranks(Job(), Made(toy), act)


def test_buffers_are_local_until_averaged(toy):
    def act(session):
        list(session.train(Plan(0, 2, 0, 0, np.zeros(2))))
        seen = session._values.buffers["seen"].copy()
        session.evaluate("test")
        session.state()
        return seen, session._values.buffers["seen"].copy()

    (seen, mean), (other_seen, same) = on_ranks(Job(nodes=2, global_batch_size=3), Made(toy, Counting.spec, Counting()), act)
    assert [seen.tolist(), other_seen.tolist()] == [[3.0, 5.0], [3.0, 3.0]]
    assert mean.tolist() == same.tolist() == [3.0, 4.0]


def test_calibration_repeats_components_and_keeps_weights(toy):
    def act(session):
        before = deepcopy(session.state())
        timings = [session.calibrate(CalibrationOrder(name, 3))[0] for name in ("data", "compute", "half", "communicate", "message")]
        return before, timings, deepcopy(session.state())

    for before, timings, after in on_ranks(Job(nodes=2, optimizer="adamw", weight_decay=0.1), Made(toy), act):
        assert [(timing.count, timing.seconds > 0) for timing in timings] == [(3, True)] * 5
        for name, value in before.parameters.items():
            np.testing.assert_array_equal(after.parameters[name], value)


def test_single_worker_predicts(toy):
    made = Made(toy)

    def act(session):
        return session.predict("test", 2, 9), session.predict("test", 4, 4), deepcopy(session.state())

    ((logits, none, state),) = on_ranks(Job(), made, act)
    x = made.data.inputs("test")[2:9].reshape(7, -1)
    np.testing.assert_allclose(logits, x @ state.parameters["dense.weight"].T + state.parameters["dense.bias"], atol=1e-5)
    assert none.shape == (0, 3)


def test_several_workers_do_not_predict(toy):
    def act(session):
        with pytest.raises(RuntimeError, match="needs a single worker"):
            session.predict("test", 0, 1)

    on_ranks(Job(nodes=2), Made(toy), act)


def test_unsupported_requests_are_refused(toy):
    made = Made(toy)
    (placed,) = toy.BACKEND.placement(Job())
    task = Task(placed, Cluster((placed,), ("127.0.0.1",), {placed.name: 1}, "00"), 1)
    custom = replace(made.spec, objective=Objective("own", "own_loss", ("loss_sum", "examples"), ()))
    with pytest.raises(UsageError, match=r"^precision: got 'fp16'"):
        toy.BACKEND.open(task, Job(backend="toy", precision="fp16"), made.spec, made.data)
    with pytest.raises(UsageError, match=r"^model: 'logreg' has the loss 'own_loss'; backend toy knows cross_entropy alone"):
        toy.BACKEND.open(task, Job(backend="toy"), custom, made.data)
