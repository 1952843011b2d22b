"""Async training on torch as threads of one process with real sockets.

Run by test_torch_images.py.
"""

import threading
import time
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from processes import free_ports
from torch_image_tasks import Pictures, opened
from torch_tasks import make_cluster, task_of

from crosstrain.backends.base import Plan
from crosstrain.backends.parameter_server.tickets import TrainTicket, encode
from crosstrain.backends.torch import BACKEND
from crosstrain.core.errors import RunFailedError
from crosstrain.core.job import Job
from crosstrain.data.base import DataInfo, TextFeatures
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.data.text import END
from crosstrain.exchange.parameter_server.server import Listener
from crosstrain.exchange.parameter_server.wire_protocol import OVERFLOWED, Figures, Hello, Kind, connect
from crosstrain.models.build import build_model
from crosstrain.models.decoding import Decoding

SIDE = 8
BY_HAND = {"mode": "async", "batch_size": 5, "precision": "fp16"}
"""A job whose one worker, or whose chief, is a test."""


@pytest.fixture(autouse=True)
def set_before_threads_ask():
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


@pytest.fixture(name="fp16_on_the_cpu")
def half_precision(monkeypatch):
    """The CPU computes in fp16 too, though slowly, so that jobs are refused there."""
    monkeypatch.setattr("crosstrain.backends.torch.model.check_precision", lambda job, gpu: None)


@contextmanager
def trained_by_workers(**options):
    """A chief's session, with its workers at work."""
    options = {"mode": "async", "batch_size": 5, **options}
    port, stop = free_ports(8), threading.Event()

    def work(name):
        opened(name, options, SIDE, port)[0].serve(stop)

    workers = [threading.Thread(target=work, args=(f"worker-{place}",)) for place in range(options.get("nodes", 1))]
    for worker in workers:
        worker.start()
    session, _, _ = opened("chief-0", options, SIDE, port)
    try:
        yield session
    finally:
        session.close()
        stop.set()
        for worker in workers:
            worker.join(30)
            assert not worker.is_alive()


def state_after(session, state, count, lr=0.01):
    """The state after some updates from a given one, of the first epoch."""
    session.load(state)
    results = [*session.train(Plan(0, count, 0, 0, np.full(count, lr))), *session.drain()]
    assert sum(result.count for result in results) == count
    return deepcopy(session.state())


# The loss scale of fp16 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "batch_size": 4}])
def test_the_loss_scale_is_part_of_the_state(fp16_on_the_cpu, options):
    """An update whose gradient overflows counts, but changes nothing.

    The scale falls for all workers, and rises after 2000 updates.
    """
    with trained_by_workers(nodes=2, precision="fp16", momentum=0.9, **options) as session:
        start = deepcopy(session.state())
        assert start.scalars == {"loss_scale": 2.0**14, "clean_steps": 0.0}
        overflowed = state_after(session, replace(start, scalars={"loss_scale": 2.0**60, "clean_steps": 1990.0}), 6)
        low = state_after(session, replace(start, scalars={"loss_scale": 2.0**4, "clean_steps": 1990.0}), 6)
        grown = state_after(session, replace(start, scalars={"loss_scale": 2.0**5, "clean_steps": 1995.0}), 6)
        fresh = state_after(session, replace(start, scalars={}), 1)
    assert 2.0**54 <= overflowed.scalars["loss_scale"] <= 2.0**57  # two workers meet one scale once each at most
    assert overflowed.scalars["clean_steps"] == 0.0
    assert overflowed.updates == 6
    assert all(np.array_equal(value, start.parameters[name]) for name, value in overflowed.parameters.items())
    assert low.scalars == {"loss_scale": 2.0**4, "clean_steps": 1996.0}
    assert grown.scalars == {"loss_scale": 2.0**6, "clean_steps": 1.0}
    assert fresh.scalars == {"loss_scale": 2.0**14, "clean_steps": 1.0}


def test_the_loss_scale_cancels_out(fp16_on_the_cpu):
    with trained_by_workers(precision="fp16") as session:
        start = deepcopy(session.state())
        states = [start, *(state_after(session, replace(start, scalars={"loss_scale": 2.0**by}), 6) for by in (4, 9))]
    first, second, third = (np.concatenate([value.ravel() for value in state.parameters.values()]) for state in states)
    assert np.linalg.norm(third - second) < 0.01 * np.linalg.norm(second - first)


def test_float32_has_no_loss_scale():
    with trained_by_workers() as session:
        assert state_after(session, deepcopy(session.state()), 3).scalars == {}


class WorkerByHand:
    """A worker's connection to the chief, by which it joins and is ready."""

    def __init__(self, cluster, elements):
        chief = next(placed for placed in cluster.tasks if placed.name == "chief-0")
        self.link = connect(cluster.endpoint(chief), cluster.secret, Hello("worker", 0, elements), time.monotonic() + 10)
        self._values = memoryview(bytearray(4 * elements))
        self.link.send(Kind.JOIN)
        self.link.receive(self._values)
        self.link.send(Kind.READY)

    def receive_scale(self):
        """The loss scale that comes with an answer; a ticket may come with it, too."""
        frame = self.link.receive(self._values)
        self.link.receive_trailer(frame)
        return frame.loss

    def push(self, step, flags=0):
        self.link.send(Kind.PUSH, memoryview(bytearray(len(self._values))), flags=flags, examples=step, figures=Figures(lr=0.1))


class Sentences:
    """Ten pairs of sentences of five pieces."""

    info = DataInfo(
        "sentences",
        {"train": 10, "test": 10},
        (ColumnSpec("source", "uint16", (None,)), ColumnSpec("target", "uint16", (None,))),
        TextFeatures({"source": 37, "target": 37}, ("en", "de")),
    )

    def column(self, split, name):
        return Column(np.full(50, 5, np.uint16), np.arange(0, 55, 5))

    def weights(self, split, weight):
        return np.full(10, 5.0)


@contextmanager
def chief_by_hand(data=None, **options):
    """A chief's session, its first worker, and what makes one that comes in its place."""
    job, data = Job(backend="torch", **{**BY_HAND, **options}), data or Pictures(SIDE)
    cluster, spec, sessions = make_cluster(job, free_ports(8)), build_model(job.model, data.info), {}
    elements = spec.size
    opening = threading.Thread(target=lambda: sessions.update(session=BACKEND.open(task_of(cluster, "chief-0"), job, spec, data)))
    opening.start()
    first = WorkerByHand(cluster, elements)
    opening.join()
    try:
        yield sessions["session"], first, lambda: WorkerByHand(cluster, elements)
    finally:
        sessions["session"].close()


def test_replacement_worker_continues_with_current_loss_scale():
    with chief_by_hand() as (session, first, another):
        session.train(Plan(0, 8, 0, 0, np.full(8, 0.1)))  # of one worker's eight tickets each is one update
        assert first.receive_scale() == 2.0**14
        first.push(0, OVERFLOWED)
        assert first.receive_scale() == 2.0**13
        first.link.close()
        second = another()
        for step in range(1, 8):
            assert second.receive_scale() == 2.0**13
            second.push(step)
        assert sum(result.count for result in session.drain()) == 8
        assert session.state().scalars == {"loss_scale": 2.0**13, "clean_steps": 7.0}
        second.link.close()


def test_an_exhausted_loss_scale_ends_the_run():
    with chief_by_hand() as (session, worker, _):
        session.load(replace(deepcopy(session.state()), scalars={"loss_scale": 2.0}))
        session.train(Plan(0, 3, 0, 0, np.full(3, 0.1)))
        for step, scale in enumerate((2.0, 1.0)):
            assert worker.receive_scale() == scale
            worker.push(step, OVERFLOWED)
        with pytest.raises(RunFailedError, match="precision fp16: gradients are not finite even at the loss scale 1"):
            list(session.drain())
        worker.link.close()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_worker_refuses_invalid_loss_scale(fp16_on_the_cpu, scale):
    port = free_ports(8)
    cluster = make_cluster(Job(backend="torch", **BY_HAND), port)
    elements = build_model("logreg", Pictures(SIDE).info).size

    def serve(link, hello, arrival):
        values = memoryview(bytearray(4 * elements))
        assert link.receive().kind == Kind.JOIN
        link.send(Kind.PARAMETERS, values, examples=1)
        assert link.receive().kind == Kind.READY
        link.send(Kind.PARAMETERS, values, figures=Figures(loss=scale), trailer=encode(TrainTicket(0, 0, 0, np.full(3, 0.1))))

    listener = Listener(task_of(cluster, "chief-0"), elements, serve)
    try:
        worker, _, _ = opened("worker-0", BY_HAND, SIDE, port)
        with pytest.raises(RunFailedError, match="for a loss scale"):
            worker.serve(threading.Event())
    finally:
        listener.close(1.0)


def test_chief_translates_fp16_model_in_float32():
    """The chief computes on the CPU."""
    translations = {}
    for precision in ("fp32", "fp16"):
        with chief_by_hand(Sentences(), model="transformer:tiny", precision=precision) as (session, worker, _):
            ((best,),) = session.translating().translate([np.array([5, 6, END])], Decoding(beam=2, extra_length=3), 1)
            translations[precision] = [*best.pieces], best.score
            worker.link.close()
    assert translations["fp16"] == translations["fp32"]


# Parameters that share their gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"accumulate": 3, "batch_size": 4}])
def test_parameters_with_shared_gradients_are_clipped_separately(options):
    gradient = {}
    for limit in (0.0, 0.01):
        with trained_by_workers(**{"model": "small_networks.added", "batch_size": 12, **options, "clip_norm": limit}) as session:
            start = deepcopy(session.state())
            state = state_after(session, start, 1, lr=1.0)
        gradient[limit] = np.concatenate([(start.parameters[name] - value).ravel() for name, value in state.parameters.items()])
    norm = np.linalg.norm(gradient[0.0])
    assert norm > 0.1
    assert np.allclose(gradient[0.01], gradient[0.0] * 0.01 / (norm + 1e-6), atol=1e-6 * norm)


def test_loss_scale_cancels_out_of_shared_gradients(fp16_on_the_cpu):
    moved = {}
    for scale in (1.0, 2.0**10):
        with trained_by_workers(model="small_networks.added", precision="fp16") as session:
            start = deepcopy(session.state())
            state = state_after(session, replace(start, scalars={"loss_scale": scale}), 1, lr=1.0)
        moved[scale] = np.concatenate([(value - start.parameters[name]).ravel() for name, value in state.parameters.items()])
    assert np.linalg.norm(moved[2.0**10] - moved[1.0]) < 0.01 * np.linalg.norm(moved[1.0])
