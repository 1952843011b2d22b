"""An asynchronous worker: pull parameters, compute a gradient, push it; which examples, its ticket says and the sampler derives.

On the CPU the parameters lie in the buffer that the network fills, and gradients leave from the buffer they are gathered in.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from ....core.cluster import Task, TaskSpec
from ....core.errors import RunFailedError
from ....core.job import Job
from ....core.liveness.stack_dump import mark_working_thread
from ....core.liveness.startup_watchdog import startup_phase
from ....data.base import Dataset
from ....data.sampler import Batches
from ....exchange.parameter_server.authentication import Hello, connect
from ....exchange.parameter_server.server import shard_bounds
from ....exchange.parameter_server.shards import bytes_of
from ....exchange.parameter_server.wire_protocol import AVERAGED, NO_STEP, OVERFLOWED, REFRESH_SHARDS, Connection, Frame, Kind
from ....models.base import ModelSpec
from ...base import CalibrationOrder, calibration_batches, make_sampler
from ...compiling.choice import TIMED_SECONDS, to_be_chosen
from ...loss_scaling import FIRST_SCALE
from ..calibration import Calibrator
from ..compiler.choice import choose
from ..data import ColumnTensors, resident_splits
from ..model import Context, MicroBatch, Model, micro_batches_of
from ..optimizers import clipped
from ..precision import precision_used, unscaled
from ..profiler import make_tracer
from ..runtime import keep_steps_memory, kind_of
from ..state import cut
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

    def __init__(self, task: Task, job: Job, model: ModelSpec, data: Dataset, device: torch.device) -> None:
        self._job, self._device = job, device
        self._sampler = make_sampler(job, data, model.objective.weight)
        self._splits = resident_splits(job, model, data, device)
        elements = model.size + model.buffers_size
        pinned = device.type == "cuda"
        self._values, self._gradient = torch.zeros(elements, pin_memory=pinned), torch.zeros(elements, pin_memory=pinned)
        self._on_device = self._values if device.type == "cpu" else self._values.to(device)
        self._model = Model.on(job, model, task.rank, self._on_device)
        self._loss_scale = FIRST_SCALE if job.precision == "fp16" else None
        self.precision_used, self.device_used = precision_used(job.precision, device), kind_of(device)
        self._tracer = make_tracer(task, job, device)
        self._gradient_views = cut(self._gradient[: model.size], model.parameters)
        self._moves = dict(zip((buffer.name for buffer in model.buffers), cut(self._gradient[model.size :], model.buffers), strict=True))
        keep_steps_memory()
        startup_phase("warming up")
        first, timing = self._sampler.whole(0, 0, 1), to_be_chosen(job, model, data)
        choose(job, self._model, self._splits["train"], first, self._time_of_step, job.workers, timing=timing)
        self._warm_up()
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
        values, gradient = bytes_of(self._values.numpy()), bytes_of(self._gradient.numpy())
        remotes = []
        for placed, (start, stop) in zip(holders, shard_bounds(model, self._job.ps), strict=True):
            hello = Hello("worker", task.placed.index, stop - start)
            link = connect(task.cluster.endpoint(placed), task.cluster.secret, hello, deadline)
            remotes.append(Remote(link, values[4 * start : 4 * stop], gradient[4 * start : 4 * stop]))
        return remotes

    def _time_of_step(self) -> float:
        """Return the seconds of a gradient."""
        calibrator = Calibrator(self._splits["train"], calibration_batches(self._sampler), self._alone, None, self._device)
        calibrator.run(CalibrationOrder("compute", 1))
        count, seconds = calibrator.run(CalibrationOrder("compute", 1, TIMED_SECONDS))
        return seconds / count

    def _warm_up(self) -> None:
        """Run the kernels of training and evaluation once, on parameters that are all zero."""
        data = self._splits["train"]
        count = self._sampler.examples_at_once(self._job.micro_batch)
        for _ in range(2):
            self._compute(*data.span(0, count), self._model.passes.training(0, Batches.single(count), 0), 1 / count)
        self._model.sums(self._splits["test"], 0, 1)

    def _compute(self, x: ColumnTensors, y: ColumnTensors, context: Context, share: float) -> tuple[float, int]:
        """Gather the batch's gradient, and what moves the buffers, in the outgoing buffer; return the mean loss and the push's flags.

        `share` is 1 / (what its examples weigh together).
        """
        if self._on_device is not self._values:
            self._on_device.copy_(self._values, non_blocking=True)
        loss, scale, flags = self._model.mean_loss(x, y, context, share), self._loss_scale, 0
        gradients = self._model.gradients(loss if scale is None else loss * scale)
        if scale is not None and not unscaled(gradients, scale):
            flags = OVERFLOWED
        torch._foreach_copy_(self._gradient_views, clipped(gradients, self._job.clip_norm) if self._job.clip_norm else gradients)
        for name, move in self._moves.items():
            move.copy_(self._model.passes.buffers[name] - context.updated[name].detach() if name in context.updated else 0.0)
        return float(loss.detach()), flags

    def _accumulate(self, micro_batches: Iterable[MicroBatch], share: float) -> tuple[float, int]:
        """Do the same from micro-batches, computed one after another."""
        if self._on_device is not self._values:
            self._on_device.copy_(self._values, non_blocking=True)
        model, scale, loss_sum, flags = self._model, self._loss_scale, 0.0, 0
        before = {name: buffer.clone() for name, buffer in model.passes.buffers.items()}
        total: list[torch.Tensor] = []
        for x, y, context in micro_batches:
            loss = model.summed_loss(x, y, context) * share
            gradients = model.gradients(loss if scale is None else loss * scale)
            if total:
                torch._foreach_add_(total, gradients)
            else:
                total = gradients
            if context.updated:
                model.keep_updated(context)
            loss_sum += float(loss.detach())
        if scale is not None and not unscaled(total, scale):
            flags = OVERFLOWED
        torch._foreach_copy_(self._gradient_views, clipped(total, self._job.clip_norm) if self._job.clip_norm else total)
        for name, move in self._moves.items():
            move.copy_(before[name] - model.passes.buffers[name])
        return loss_sum, flags

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
        if self._loss_scale is not None:
            if not 0.0 < frame.loss < math.inf:
                raise ConnectionError(f"the chief sent {frame.loss:g} for a loss scale")
            self._loss_scale = frame.loss
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
        if self._job.accumulate > 1:
            return self._train_accumulating(ticket)
        batches = self._sampler.whole(ticket.epoch, ticket.first_in_epoch, ticket.count, ticket.skip, ticket.arranged)
        rates, shares = ticket.learning_rates.tolist(), (1 / batches.weights).tolist()
        clock, compute, exchange, context = time.perf_counter, self._compute, self._exchange, self._model.passes.training
        position, last, tracer = 0, ticket.count - 1, self._tracer
        began = clock()
        for block in self._splits["train"].blocks(batches):
            for x, y in block:
                if tracer is not None:
                    tracer.begin()
                loss, flags = compute(x, y, context(ticket.first_step + position, batches, position), shares[position])
                frame = exchange(ticket.first_step + position, rates[position], loss, clock() - began, flags, position == last)
                if tracer is not None:
                    tracer.done()
                began = clock()
                position += 1
        return frame

    def _train_accumulating(self, ticket: TrainTicket) -> Frame:
        """Do the same where updates are computed in micro-batches."""
        batches = self._sampler.whole(ticket.epoch, ticket.first_in_epoch, ticket.count, ticket.skip, ticket.arranged)
        cut, counts = batches.in_micro_batches(self._job.accumulate)
        examples = enumerate(batch for block in self._splits["train"].blocks(cut) for batch in block)

        def of_update(step: int, count: int) -> Iterator[MicroBatch]:
            for number, (position, (x, y)) in enumerate(islice(examples, count)):
                yield x, y, self._model.passes.training(step, cut, position, number)

        for position, (count, lr) in enumerate(zip(counts.tolist(), ticket.learning_rates.tolist(), strict=True)):
            if self._tracer is not None:
                self._tracer.begin()
            began = time.perf_counter()
            loss, flags = self._accumulate(of_update(ticket.first_step + position, count), 1 / float(batches.weights[position]))
            spent = time.perf_counter() - began
            frame = self._exchange(ticket.first_step + position, lr, loss, spent, flags, position == ticket.count - 1)
            if self._tracer is not None:
                self._tracer.done()
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
        if self._on_device is not self._values:
            self._on_device.copy_(self._values)
        sums = self._model.sums(self._splits[ticket.split], ticket.start, ticket.stop)
        self._chief.link.send(Kind.SUMS, trailer=np.array(sums, "<f8").tobytes())
        return self._answer()

    def _calibrate(self, order: CalibrationOrder) -> Frame:
        """Repeat a part of a step, tell how long it took and return the reply."""
        if self._calibrator is None:
            batches = calibration_batches(self._sampler)
            self._calibrator = Calibrator(self._splits["train"], batches, self._alone, self, self._device)
        count, seconds = self._calibrator.run(order)
        self._chief.link.send(Kind.CALIBRATED, examples=count, seconds=seconds)
        return self._answer()

    def _alone(self, x: ColumnTensors, y: ColumnTensors, batch: Batches) -> None:
        share = 1 / float(batch.weights[0])
        if self._job.accumulate == 1:
            self._compute(x, y, self._model.passes.training(0, batch, 0), share)
        else:
            self._accumulate(micro_batches_of(self._model, x, y, batch, self._job.accumulate), share)

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
