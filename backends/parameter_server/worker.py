"""Worker of the parameter server.

It is a framework's computation on two flat vectors, and their exchange.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...core.cluster import Task, TaskSpec
from ...core.errors import RunFailedError
from ...core.job import Job
from ...core.liveness import mark_working_thread, startup_phase
from ...data.base import Dataset, Split
from ...data.sampler import Batches, Sampler
from ...exchange.parameter_server.server import ShardServer, shard_bounds
from ...exchange.parameter_server.shards import MakeRule, Vector, bytes_of
from ...exchange.parameter_server.wire_protocol import (
    AVERAGED,
    NO_FIGURES,
    NO_STEP,
    OVERFLOWED,
    REFRESH_SHARDS,
    Connection,
    Figures,
    Frame,
    Hello,
    Kind,
    connect,
)
from ...models.base import ModelSpec
from ..base import CalibrationOrder, calibration_batches, make_sampler
from ..capabilities import Device
from ..timing import Calibrator, Exchange
from .session import AsyncSession, Translate
from .tickets import EvalTicket, Ticket, TrainTicket, decode

Computed = tuple[float, bool]  # mean loss, whether the gradient overflowed


class Computation(Protocol):
    """A framework's part of a worker, called by one thread at a time.

    `values` and `gradient`, float32 [parameters + buffers], keep their memory. The worker sets `loss_scale`, None without scaling.
    """

    values: Vector
    gradient: Vector
    loss_scale: float | None
    precision_used: str
    device_used: Device

    def gradients(self, batches: Batches, first_step: int) -> Iterator[Computed]:
        """Compute updates, batch i being update `first_step` + i.

        Yield each when it lies in `gradient`.
        That is the mean loss's gradient, maybe clipped, and the buffers' old values less new. `values` change only between updates.
        """

    def sums(self, split: Split, start: int, stop: int) -> Sequence[float]:
        """Return the objective's sums over examples of a split, with `values`."""

    def calibrator(self, batches: Batches, exchange: Exchange) -> Calibrator:
        """Return what repeats the components of a step on these batches."""


@dataclass(slots=True)
class Remote:
    """Shard as a worker sees it: connection, parts of both flat buffers, and version last read."""

    link: Connection
    values: memoryview
    gradient: memoryview
    version: int = field(default=0)

    def join(self, generation: int = 0) -> int:
        """Fetch the first parameters.

        Return the connection's generation, if it is the chief that answers.
        """
        self.link.send(Kind.JOIN, version=generation)
        return self.receive().examples

    def push(self, step: int, figures: Figures, flags: int) -> None:
        """Send this shard's part of the gradient."""
        self.link.send(Kind.PUSH, self.gradient, flags=flags, version=self.version, examples=step, figures=figures)

    def receive(self) -> Frame:
        """Wait for the newest parameters."""
        frame = self.link.receive(self.values)
        self.version = frame.version
        return frame

    def pull(self, *, averaged: bool = False) -> None:
        """Fetch the newest parameters, or their moving averages if the job keeps them."""
        self.link.send(Kind.PULL, flags=AVERAGED if averaged else 0)
        self.receive()


class Worker:
    """Task of a worker; a `Server`.

    It computes the updates of its tickets on the sampler's examples and pushes them.
    """

    def __init__(self, task: Task, job: Job, model: ModelSpec, sampler: Sampler, computation: Computation) -> None:
        """Join every shard with a warm computation. Raises RunFailedError if one refuses."""
        self._job, self._sampler, self._computation = job, sampler, computation
        self._scaled = computation.loss_scale is not None
        self.precision_used, self.device_used = computation.precision_used, computation.device_used
        startup_phase("joining the cluster", for_others=True)
        self._remotes = self._connect(task, model)
        self._chief, self._others = self._remotes[0], self._remotes[1:]
        generation = self._chief.join()
        for remote in self._others:
            remote.join(generation)
        self._done = threading.Event()
        self._failure: Exception | None = None
        self._calibrator: Calibrator | None = None
        self._chief.link.send(Kind.READY)

    def _connect(self, task: Task, model: ModelSpec) -> list[Remote]:
        deadline = time.monotonic() + self._job.start_timeout
        holders: list[TaskSpec] = [*task.cluster.tasks_with_role("chief"), *task.cluster.tasks_with_role("ps")]
        values, gradient = bytes_of(self._computation.values), bytes_of(self._computation.gradient)
        remotes = []
        for placed, (start, stop) in zip(holders, shard_bounds(model, self._job.ps), strict=True):
            hello = Hello("worker", task.placed.index, stop - start)
            link = connect(task.cluster.endpoint(placed), task.cluster.secret, hello, deadline)
            remotes.append(Remote(link, values[4 * start : 4 * stop], gradient[4 * start : 4 * stop]))
        return remotes

    def serve(self, stop: threading.Event) -> None:
        """Work, in a thread for the sake of signals, until the end or `stop`.

        Raises RunFailedError for a lost server.
        """
        thread = threading.Thread(target=self._work, name="work", daemon=True)
        thread.start()
        while not self._done.wait(0.1) and not stop.is_set():
            pass
        for remote in self._remotes:
            remote.link.abort()
        thread.join()
        for remote in self._remotes:
            remote.link.close()
        if self._failure is not None and not stop.is_set():
            if isinstance(self._failure, OSError):
                raise RunFailedError(f"lost a parameter server: {self._failure}") from self._failure
            raise self._failure

    def _work(self) -> None:
        mark_working_thread()
        try:
            frame = self._answer()
            while (ticket := self._next(frame)) is not None:
                frame = self._carry_out(ticket)
            for remote in self._others:
                remote.link.send(Kind.END)
        except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
            self._failure = error
        finally:
            self._done.set()

    def _answer(self) -> Frame:
        frame = self._chief.receive()
        if self._scaled:
            if not 0.0 < frame.loss < math.inf:
                raise ConnectionError(f"the chief sent {frame.loss:g} for a loss scale")
            self._computation.loss_scale = frame.loss
        return frame

    def _carry_out(self, ticket: Ticket) -> Frame:
        if isinstance(ticket, TrainTicket):
            return self._train(ticket)
        return self._calibrate(ticket) if isinstance(ticket, CalibrationOrder) else self._evaluate(ticket)

    def _next(self, frame: Frame) -> Ticket | None:
        """Read the ticket that came with the parameters.

        After a wait, also fetch the other shards' newest parameters.
        """
        ticket = decode(self._chief.link.receive_trailer(frame))
        if ticket is not None and frame.flags & REFRESH_SHARDS:
            for remote in self._others:
                remote.pull(averaged=isinstance(ticket, EvalTicket))
        return ticket

    def _train(self, ticket: TrainTicket) -> Frame:
        batches = self._sampler.whole(ticket.epoch, ticket.first_in_epoch, ticket.count, ticket.skip, ticket.arranged)
        clock, exchange, step, last = time.perf_counter, self._exchange, ticket.first_step, ticket.first_step + ticket.count - 1
        began = clock()
        for (loss, overflowed), lr in zip(self._computation.gradients(batches, step), ticket.learning_rates.tolist(), strict=True):
            frame = exchange(step, Figures(lr, loss, clock() - began), OVERFLOWED if overflowed else 0, last=step == last)
            began = clock()
            step += 1
        return frame

    def _exchange(self, step: int, figures: Figures, flags: int, *, last: bool) -> Frame:
        """Exchange gradient and parameters with every shard.

        At a ticket's end the chief's comes last: then the chief may read the state.
        """
        for remote in self._others:
            remote.push(step, figures, flags)
        if last:
            for remote in self._others:
                remote.receive()
        self._chief.push(step, figures, flags)
        if not last:
            for remote in self._others:
                remote.receive()
        return self._answer()

    def _evaluate(self, ticket: EvalTicket) -> Frame:
        sums = self._computation.sums(ticket.split, ticket.start, ticket.stop)
        self._chief.link.send(Kind.SUMS, trailer=np.array(sums, "<f8").tobytes())
        return self._answer()

    def _calibrate(self, order: CalibrationOrder) -> Frame:
        if self._calibrator is None:
            self._calibrator = self._computation.calibrator(calibration_batches(self._sampler), self)
        count, seconds = self._calibrator.run(order)
        self._chief.link.send(Kind.CALIBRATED, examples=count, figures=Figures(seconds=seconds))
        return self._answer()

    def whole(self) -> None:
        """Exchange the last gradient at a learning rate of 0, for calibration.

        Zeros would make slots slow to compute with.
        """
        self._exchange(NO_STEP, NO_FIGURES, 0, last=False)

    def small(self) -> None:
        """Calibration: exchange only headers with every shard, in the order of an update."""
        for remote in (*self._others, self._chief):
            remote.link.send(Kind.ECHO)
        for remote in (*self._others, self._chief):
            remote.link.receive()


def open_task(
    task: Task,
    job: Job,
    model: ModelSpec,
    data: Dataset,
    make_rule: MakeRule,
    compute: Callable[[Sampler], Computation],
    translate: Translate | None = None,
) -> AsyncSession | ShardServer | Worker:
    """Open a task of an async run: chief, parameter server or worker.

    `compute` returns a worker's computation.
    """
    if task.placed.role == "chief":
        return AsyncSession(task, job, model, data, make_rule, translate)
    if task.placed.role == "ps":
        return ShardServer(task, job, model, make_rule)
    sampler = make_sampler(job, data, model.objective.weight)
    return Worker(task, job, model, sampler, compute(sampler))
