"""Asynchronous training, the chief's side: it is the first parameter server, hands out tickets, and counts what is applied.

A ticket travels with the reply to the push before it, so that an update is one round trip. With several parameter servers the updates
and their staleness are counted at this one; the others hold further pieces of the same vector and follow within the same update.

A worker may be lost and another come in its place (`exchange/parameter_server/leases.py`). What it had of a ticket goes back, less what
every shard has applied. The update that it was pushing may be on some shards alone: it is computed again, and those that have it pass over
it (`applied_steps.py` there), so that its parts come from two reads of the parameters.

The loss scale of fp16 is the chief's, too: each answer that a worker computes on has it, and each push says whether its gradient
overflowed. So one that comes in another's place, or from a checkpoint, goes on with the scale that was found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...core.cluster import Task, TaskSpec
from ...core.errors import RunFailedError, StalledRunError
from ...core.job import Job
from ...core.update_rules import slot_names
from ...data.base import Dataset, Split
from ...exchange.parameter_server.authentication import Hello, connect
from ...exchange.parameter_server.server import Listener, initial_shard, pushed_step, shard_bounds, warm_rule
from ...exchange.parameter_server.shard_links import ShardLinks
from ...exchange.parameter_server.shards import MakeRule, Vector, bytes_of
from ...exchange.parameter_server.wire_protocol import OVERFLOWED, REFRESH_SHARDS, Connection, Kind
from ...exchange.parameter_server.worker_links import WorkerLinks
from ...models.base import Array, ModelSpec
from ..base import CalibrationOrder, CalibrationResult, EvalResult, Plan, State, StepResult, make_sampler
from ..loss_scaling import ChiefLossScale
from ..translating import Translating
from ..vectors.evaluation_batches import evaluation_batch
from ..vectors.state_memory import StateMemory
from .ticket_progress import TicketProgress
from .ticket_queue import EvalSums, TicketQueue
from .tickets import EvalTicket, TrainTicket, cut_evaluation, cut_plan, encode

__all__ = ["AsyncSession", "Translate"]

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long `close` waits for workers and parameter servers to go by themselves."""

GIVE_UP_SHARE = 0.75
"""Of the stall time-out: before the driver, which hears of nothing meanwhile, takes the whole cluster for stalled."""

TICKETS_AHEAD = 2
"""`train` asks for the next plan when no more than this many tickets a worker are left to hand out: a quarter of a plan."""

PROFILED_WORKER = 0
"""The one that traces its first updates with ``--profile``."""

Translate = Callable[[State], Translating]
"""Returns what translates with the weights and buffers of a state on the chief; asked again before each use."""


class AsyncSession:
    """The only leading task of an asynchronous run; a `ReplacesWorkers`."""

    on_stalled_worker: Callable[[int], None] | None = None

    def __init__(
        self, task: Task, job: Job, model: ModelSpec, data: Dataset, make_rule: MakeRule, translate: Translate | None = None
    ) -> None:
        """Join the cluster. `make_rule` makes the rule of the chief's own shard; `translate` is needed for a model that translates."""
        self._spec, self._job = model, job
        self._slots = slot_names(job)
        self._sizes, self._translate = dict(data.info.sizes), translate
        self._sampler = make_sampler(job, data, model.objective.weight)
        self._shard = initial_shard(job, model, 0, make_rule)
        self._loss_scale = ChiefLossScale() if job.precision == "fp16" else None
        self._tickets = TicketQueue()
        self._links = WorkerLinks(self._tickets.dismiss, self._tickets.readmit)
        self._given_up: set[int] = set()
        self._memory: StateMemory | None = None
        self._open, self._calibrated, self._training_seconds = True, False, 0.0
        self._profiling = job.profile > 0
        warm_rule(self._shard, job, make_rule)
        deadline = time.monotonic() + job.start_timeout
        self._listener = Listener(task, self._shard.elements, self._serve_peer)
        self._servers = ShardLinks([self._connect(task, placed, deadline) for placed in task.cluster.of_role("ps")])
        self._await_workers(deadline)
        if model.objective.translation is not None:
            self.translating().warm_up()
        if job.saved_every is not None:
            self._state_memory()

    def _connect(self, task: Task, placed: TaskSpec, deadline: float) -> Connection:
        start, stop = shard_bounds(self._spec, self._job.ps)[placed.index]
        return connect(task.cluster.endpoint(placed), task.cluster.secret, Hello("chief", 0, stop - start), deadline)

    def _await_workers(self, deadline: float) -> None:
        expected = frozenset(range(self._job.workers))
        if not self._tickets.wait(lambda: self._tickets.connected >= expected, deadline - time.monotonic()):
            missing = ", ".join(f"worker-{index}" for index in sorted(expected - self._tickets.connected))
            raise RunFailedError(f"start_timeout: {missing} did not join within {self._job.start_timeout:g} seconds")

    def _serve_peer(self, link: Connection, hello: Hello, arrival: float) -> None:
        """Serve one worker's connection, in a thread of its own."""
        worker = hello.place
        if hello.role != "worker" or worker >= self._job.workers:
            log.warning("refused %s-%d: it has no place in this run", hello.role, worker)
            return
        try:
            generation = self._links.enter(worker, link, arrival)
        except ConnectionError as error:
            log.warning("refused worker-%d: %s", worker, error)
            return
        progress = TicketProgress(worker, self._examples, self._job.profile if worker == PROFILED_WORKER else 0)
        try:
            self._serve_worker(link, worker, generation, progress)
        except OSError as error:
            log.warning("lost worker-%d: %s", worker, error)
            self._take_back(worker, generation, progress)
        except Exception as error:  # noqa: BLE001 - handed to the session's thread, which raises it
            self._tickets.fail(error)
        finally:
            self._links.leave(worker)

    def _take_back(self, worker: int, generation: int, progress: TicketProgress) -> None:
        """A worker is lost: have every shard refuse what it still pushes, then put back what not all of them have applied of its ticket.

        They have all but the last update that this one has: the worker has awaited their answers to each before it pushed the next.
        """
        everywhere = False
        try:
            everywhere = self._servers.end_lease(worker, generation, progress.last_step)
        except OSError as error:
            self._tickets.fail(RunFailedError(f"lost a parameter server: {error}"))
        self._tickets.release(worker, progress.close(without_last=not everywhere))
        self._given_up.discard(worker)

    def _serve_worker(self, link: Connection, worker: int, generation: int, progress: TicketProgress) -> None:
        """Answer one worker's requests until there are no more tickets."""
        gradient, values = (np.empty(self._shard.elements, np.float32) for _ in range(2))
        incoming, outgoing = bytes_of(gradient), bytes_of(values)
        calibrating = averaged = False
        scale = 0.0
        while True:
            frame = link.receive(incoming)
            if frame.kind == Kind.ECHO:
                link.send(Kind.DONE)
                continue
            if frame.kind == Kind.PUSH and calibrating:
                self._shard.update(gradient, frame.lr, frame.version, values, step=pushed_step(frame))
                link.send(Kind.PARAMETERS, outgoing, loss=scale)
                continue
            if frame.kind == Kind.PUSH and progress.next_step is not None and progress.next_step == pushed_step(frame):
                overflowed = bool(frame.flags & OVERFLOWED)
                staleness, version = self._shard.update(gradient, frame.lr, frame.version, values, step=pushed_step(frame), skip=overflowed)
                scale = self._scale_after(scale, overflowed=overflowed)
                if progress.add(frame.loss, staleness, frame.seconds):
                    link.send(Kind.PARAMETERS, outgoing, version=version, loss=scale)
                    continue
                self._tickets.finish_train(worker, progress.close())
            elif frame.kind == Kind.SUMS:
                self._tickets.finish_eval(worker, self._received_sums(link.receive_trailer(frame)))
            elif frame.kind == Kind.CALIBRATED and calibrating:
                self._tickets.finish_calibration(CalibrationResult(worker, frame.examples, frame.seconds))
            elif frame.kind in (Kind.JOIN, Kind.PULL):
                joined = generation if frame.kind == Kind.JOIN else 0
                link.send(Kind.PARAMETERS, outgoing, version=self._shard.read(values), examples=joined)
                continue
            elif frame.kind == Kind.READY:
                self._tickets.join(worker)
            else:
                raise ConnectionError(f"it sent a frame of kind {frame.kind}, which was not agreed")
            ticket, waited = self._tickets.take(worker)
            calibrating = isinstance(ticket, CalibrationOrder)
            if isinstance(ticket, TrainTicket):
                progress.begin(ticket)
            flags = REFRESH_SHARDS if waited or averaged or not isinstance(ticket, TrainTicket) else 0
            averaged = isinstance(ticket, EvalTicket)
            scale = 0.0 if self._loss_scale is None else self._loss_scale.scale
            version = self._shard.read(values, averaged=averaged)
            link.send(Kind.PARAMETERS, outgoing, flags=flags, version=version, loss=scale, trailer=encode(ticket))
            if ticket is None:
                return

    def _scale_after(self, given: float, *, overflowed: bool) -> float:
        """Return the scale after an update of a worker that was given one, 0 without fp16. Raises RunFailedError where it is exhausted."""
        if self._loss_scale is None:
            return 0.0
        self._loss_scale.learn(given, given / 2.0 if overflowed else given, 1)
        return self._loss_scale.scale

    def _examples(self, ticket: TrainTicket, updates: int) -> int:
        first, before = ticket.first_in_epoch, self._sampler.examples_before
        place = ticket.skip, ticket.epoch, ticket.arranged
        return before(first + updates, *place) - before(first, *place)

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Queue the plan's tickets and yield what finishes; see `Session.train`.

        Raises RunFailedError where every worker is lost, or none makes progress for `stall_timeout` seconds.
        """
        workers = self._job.workers
        self._tickets.put(cut_plan(plan, workers))
        return self._timed(self._gather(lambda: self._tickets.waiting <= TICKETS_AHEAD * workers))

    def drain(self) -> Iterator[StepResult]:
        """Yield everything outstanding; see `Session.drain`. Errors as in `train`."""
        return self._timed(self._gather(lambda: self._tickets.quiescent))

    def _timed(self, results: Iterator[StepResult]) -> Iterator[StepResult]:
        """Yield the results and count the seconds that it takes, which are those of training."""
        began = time.perf_counter()
        yield from results
        self._training_seconds += time.perf_counter() - began

    def _marked(self, result: StepResult) -> StepResult:
        """Return a result, marked as profiled where it came while the first worker was at it: the others had the machine to themselves."""
        if result.worker == PROFILED_WORKER:
            self._profiling = result.profiled
        return replace(result, profiled=True) if self._profiling else result

    def _gather(self, ready: Callable[[], bool]) -> Iterator[StepResult]:
        """Yield results until `ready`."""
        seen, since, limit = self._progress(), time.monotonic(), self._job.stall_timeout
        while True:
            self._tickets.wait(lambda: ready() or self._tickets.has_news, min(1.0, limit / 20))
            done = ready()
            yield from map(self._marked, self._tickets.take_results())
            if done:
                return
            if not self._tickets.connected:
                raise RunFailedError("every worker is lost, and updates are outstanding")
            if self._progress() != seen:
                seen, since = self._progress(), time.monotonic()
            elif time.monotonic() - since > GIVE_UP_SHARE * limit and self._give_up_stalled():
                since = time.monotonic()
            elif time.monotonic() - since > limit:
                raise self._stalled()

    def _give_up_stalled(self) -> bool:
        """Take their tickets from the workers that are awaited, where others are idle and have others take their place; return whether.

        Where no worker gets on it is not the workers that are to blame. Nobody is given up twice.
        """
        awaited = self._tickets.working
        if self.on_stalled_worker is None or not self._tickets.connected - awaited or self._given_up & awaited:
            return False
        self._given_up |= awaited
        for worker in sorted(awaited):
            log.warning("worker-%d has finished nothing for too long, while others are idle: its ticket goes to them", worker)
            self.on_stalled_worker(worker)
            self._links.cut(worker)
        return True

    def _stalled(self) -> StalledRunError:
        """Return the error that names the workers whose updates are awaited."""
        awaited = [f"worker-{worker}" for worker in sorted(self._tickets.working)]
        whose = f"; work is outstanding at {', '.join(awaited)}" if awaited else ""
        limit = f"{self._job.stall_timeout:g}"
        return StalledRunError(f"stalled: no update was applied for {limit} s (--stall-timeout {limit}){whose}", *awaited[:1])

    def _progress(self) -> tuple[int, int]:
        return self._shard.version, self._tickets.finished

    def evaluate(self, split: Split) -> EvalResult:
        """Have the workers evaluate the current parameters; see `Session.evaluate`. Raises RuntimeError where updates are outstanding."""
        self._require_quiet("evaluate")
        began = time.perf_counter()
        size = self._sizes[split]
        self._tickets.put(cut_evaluation(split, size, self._job.workers, evaluation_batch(self._spec)))
        for result in self._gather(lambda: self._tickets.quiescent):
            raise RuntimeError(f"update {result.first_step} was applied during an evaluation")
        sums = [sum(values) for values in zip(*self._tickets.take_sums(), strict=True)]
        return EvalResult.of(self._spec.objective, split, size, sums, time.perf_counter() - began, self._shard.version)

    def translating(self) -> Translating:
        """Return what translates on the chief with the parameters as they are now; see `Session.translating`.

        Raises RuntimeError where the backend translates nothing.
        """
        if self._translate is None:
            raise RuntimeError(f"this backend does not translate with {self._spec.name!r}")
        return self._translate(self.state().to_evaluate())

    def _received_sums(self, trailer: bytes) -> EvalSums:
        """Return the sums in a frame's trailer. Raises ConnectionError where they are not those of the objective."""
        if len(trailer) != 8 * len(self._spec.objective.sums):
            raise ConnectionError(f"it sent {len(trailer)} bytes of sums, where {8 * len(self._spec.objective.sums)} were agreed")
        return tuple(np.frombuffer(trailer, "<f8").tolist())

    def _require_quiet(self, what: str) -> None:
        if not self._tickets.quiescent:
            raise RuntimeError(f"{what}: updates are outstanding; drain first")

    def _state_memory(self) -> StateMemory:
        if self._memory is None:
            self._memory = StateMemory(self._spec, self._slots)
        return self._memory

    def _pieces(self, memory: StateMemory) -> list[list[Vector]]:
        """Return each shard's pieces of a copy of the state."""
        bounds = shard_bounds(self._spec, self._job.ps)
        return [memory.shard(start, stop) for start, stop in bounds]

    def state(self) -> State:
        """Return a copy of the state, collected from every parameter server; see `Session.state`."""
        self._require_quiet("state")
        memory = self._state_memory()
        own, *others = self._pieces(memory)
        self._shard.export(lambda pieces, _version: _copy(pieces, own))
        self._servers.fetch(others)
        return memory.state(self._shard.version, None if self._loss_scale is None else self._loss_scale.scalars)

    def predict(self, split: Split, start: int, stop: int) -> Array:
        """Refuse: raises RuntimeError, since a chief computes nothing; see `Session.predict`."""
        raise RuntimeError("predict: needs a single synchronous worker")

    def load(self, state: State | None) -> None:
        """Replace the state on every parameter server. Raises ValueError where it does not fit the model."""
        self._require_quiet("load")
        if state is None:
            raise ValueError("load: the chief was given no state")
        memory = self._state_memory()
        memory.fill(state)
        own, *others = self._pieces(memory)
        self._shard.replace(lambda pieces: _copy(own, pieces), state.updates)
        self._servers.store(others, state.updates)
        if self._loss_scale is not None:
            self._loss_scale.restore(state.scalars)

    def calibrate(self, order: CalibrationOrder) -> Sequence[CalibrationResult]:
        """Have every worker repeat a component of a step; see `Session.calibrate`. What is pushed meanwhile has a learning rate of 0."""
        self._require_quiet("calibrate")
        native = {} if self._calibrated else {"ps_busy_fraction": self._shard.busy_seconds / max(self._training_seconds, 1e-9)}
        self._calibrated = True
        self._tickets.put_for(dict.fromkeys(self._tickets.connected, order))
        for result in self._gather(lambda: self._tickets.quiescent):
            raise RuntimeError(f"update {result.first_step} was applied while a part of a step was calibrated")
        return [replace(found, native=native) for found in self._tickets.take_calibrated()]

    def close(self) -> None:
        """Send workers and parameter servers home; bounded in time. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._tickets.end()
        self._listener.close(CLOSE_SECONDS)
        self._servers.close(CLOSE_SECONDS)


def _copy(pieces: Sequence[Vector], into: Sequence[Vector]) -> None:
    for piece, kept in zip(pieces, into, strict=True):
        np.copyto(kept, piece)
