"""An asynchronous worker: take in parameters, have a gradient computed, push it; which examples, its ticket says and the sampler derives.

The parameters lie in the vector that the network fills, and gradients leave from the vector that they are computed into.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from ...core.cluster import Task, TaskSpec
from ...core.errors import RunFailedError
from ...core.job import Job
from ...core.liveness.stack_dump import mark_working_thread
from ...core.liveness.startup_watchdog import startup_phase
from ...data.sampler import Sampler
from ...exchange.parameter_server.authentication import Hello, connect
from ...exchange.parameter_server.server import shard_bounds
from ...exchange.parameter_server.shards import bytes_of
from ...exchange.parameter_server.wire_protocol import AVERAGED, NO_STEP, OVERFLOWED, REFRESH_SHARDS, Connection, Frame, Kind
from ...models.base import ModelSpec
from ..base import CalibrationOrder, calibration_batches
from ..timing import Calibrator
from .computation import Computation
from .tickets import EvalTicket, Ticket, TrainTicket, decode

__all__ = ["Worker"]


@dataclass(slots=True)
class Remote:
    """A shard as a worker sees it: its connection, its part of the two flat buffers, and the version last read."""

    link: Connection
    values: memoryview
    gradient: memoryview
    version: int = field(default=0)

    def join(self, generation: int = 0) -> int:
        """Fetch the parameters for the first time; return the generation of this connection, where it is the chief that answers."""
        self.link.send(Kind.JOIN, version=generation)
        return self.receive().examples

    def push(self, step: int, lr: float, loss: float, seconds: float, flags: int) -> None:
        """Send this shard's part of the gradient."""
        self.link.send(Kind.PUSH, self.gradient, flags=flags, version=self.version, examples=step, lr=lr, loss=loss, seconds=seconds)

    def receive(self) -> Frame:
        """Wait for the newest parameters."""
        frame = self.link.receive(self.values)
        self.version = frame.version
        return frame

    def pull(self, *, averaged: bool = False) -> None:
        """Fetch the newest parameters. `averaged`: their moving averages, where the job keeps them."""
        self.link.send(Kind.PULL, flags=AVERAGED if averaged else 0)
        self.receive()


class Worker:
    """The task of one worker; a `Server`."""

    def __init__(self, task: Task, job: Job, model: ModelSpec, sampler: Sampler, computation: Computation) -> None:
        """Join every shard with a computation that is warm. Raises RunFailedError where one lets nobody in."""
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
        """Connect to every shard, the chief's first."""
        deadline = time.monotonic() + self._job.start_timeout
        holders: list[TaskSpec] = [*task.cluster.of_role("chief"), *task.cluster.of_role("ps")]
        values, gradient = bytes_of(self._computation.values), bytes_of(self._computation.gradient)
        remotes = []
        for placed, (start, stop) in zip(holders, shard_bounds(model, self._job.ps), strict=True):
            hello = Hello("worker", task.placed.index, stop - start)
            link = connect(task.cluster.endpoint(placed), task.cluster.secret, hello, deadline)
            remotes.append(Remote(link, values[4 * start : 4 * stop], gradient[4 * start : 4 * stop]))
        return remotes

    def serve(self, stop: threading.Event) -> None:
        """Work until the chief has no more tickets or `stop` is set.

        Raises RunFailedError where a parameter server is lost. The work is done in a thread, so that signals reach this one.
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
        """Wait for the chief's answer: parameters, and in fp16 what the loss is to be multiplied by from now on."""
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
        """Read the ticket that came with the parameters; after a wait, fetch the other shards' newest parameters too."""
        ticket = decode(self._chief.link.receive_trailer(frame))
        if ticket is not None and frame.flags & REFRESH_SHARDS:
            for remote in self._others:
                remote.pull(averaged=isinstance(ticket, EvalTicket))
        return ticket

    def _train(self, ticket: TrainTicket) -> Frame:
        """Compute and push every update of a ticket; return the reply to the last."""
        batches = self._sampler.whole(ticket.epoch, ticket.first_in_epoch, ticket.count, ticket.skip, ticket.arranged)
        clock, exchange, step, last = time.perf_counter, self._exchange, ticket.first_step, ticket.first_step + ticket.count - 1
        began = clock()
        for (loss, overflowed), lr in zip(self._computation.gradients(batches, step), ticket.learning_rates.tolist(), strict=True):
            frame = exchange(step, lr, loss, clock() - began, OVERFLOWED if overflowed else 0, step == last)
            began = clock()
            step += 1
        return frame

    def _exchange(self, step: int, lr: float, loss: float, seconds: float, flags: int, last: bool) -> Frame:
        """Push the gradient to every shard and take in the new parameters.

        The chief counts an update as applied when its own shard has it. So at the end of a ticket, after which it may read the state,
        the other shards come first.
        """
        for remote in self._others:
            remote.push(step, lr, loss, seconds, flags)
        if last:
            for remote in self._others:
                remote.receive()
        self._chief.push(step, lr, loss, seconds, flags)
        if not last:
            for remote in self._others:
                remote.receive()
        return self._answer()

    def _evaluate(self, ticket: EvalTicket) -> Frame:
        """Compute the sums of an evaluation's piece and return the reply."""
        sums = self._computation.sums(ticket.split, ticket.start, ticket.stop)
        self._chief.link.send(Kind.SUMS, trailer=np.array(sums, "<f8").tobytes())
        return self._answer()

    def _calibrate(self, order: CalibrationOrder) -> Frame:
        """Repeat a part of a step, tell how long it took and return the reply."""
        if self._calibrator is None:
            self._calibrator = self._computation.calibrator(calibration_batches(self._sampler), self)
        count, seconds = self._calibrator.run(order)
        self._chief.link.send(Kind.CALIBRATED, examples=count, seconds=seconds)
        return self._answer()

    def whole(self) -> None:
        """To calibrate: exchange the last gradient for parameters, with a learning rate of 0.

        Not zeros: slots would decay to numbers so small that they are slow to compute with.
        """
        self._exchange(NO_STEP, 0.0, 0.0, 0.0, 0, False)

    def small(self) -> None:
        """To calibrate: exchange headers alone with every shard, in the order of an update."""
        for remote in (*self._others, self._chief):
            remote.link.send(Kind.ECHO)
        for remote in (*self._others, self._chief):
            remote.link.receive()
