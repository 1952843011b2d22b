"""Chief of async training: first parameter server, hands out tickets, counts updates.

A ticket travels with the reply to the push before it: one round trip an update. A lost worker's ticket is requeued, less the updates that
every shard has; an update that some shards have is computed again, and those skip it (`AppliedSteps`), so its parts come from two reads of
the parameters. The chief also holds fp16's loss scale.
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
from ...exchange.parameter_server.server import Listener, initial_shard, pushed_step, shard_bounds, warm_rule
from ...exchange.parameter_server.shards import MakeRule, Vector, bytes_of
from ...exchange.parameter_server.wire_protocol import (
    NO_FIGURES,
    OVERFLOWED,
    REFRESH_SHARDS,
    Connection,
    Figures,
    Frame,
    Hello,
    Kind,
    ShardLinks,
    WorkerLinks,
    connect,
)
from ...models.base import Array, ModelSpec
from ..base import CalibrationOrder, CalibrationResult, EvalResult, Plan, State, StepResult, make_sampler
from ..decoding_functions import Translating
from ..vectors import ChiefLossScale, StateMemory, evaluation_batch
from .tickets import EvalSums, EvalTicket, Ticket, TicketProgress, TicketQueue, TrainTicket, cut_evaluation, cut_plan, encode

log = logging.getLogger(__name__)
CLOSE_SECONDS = 5.0  # for workers and parameter servers to end
GIVE_UP_SHARE = 0.75  # of the stall timeout, so that the driver does not consider the whole cluster stalled
TICKETS_AHEAD = 2  # per worker when `train` requests the next plan: a quarter of a plan
PROFILED_WORKER = 0  # traces its first updates with ``--profile``
Translate = Callable[[State], Translating]  # called before each use


class _ServedWorker:
    """Connection, buffers and last ticket of a worker.

    The ticket decides which messages are allowed; `figures` hold the loss scale in fp16.
    """

    def __init__(self, number: int, link: Connection, generation: int, progress: TicketProgress, elements: int) -> None:
        self.number, self.link, self.generation, self.progress = number, link, generation, progress
        self.gradient, self.values = (np.empty(elements, np.float32) for _ in range(2))
        self.incoming, self.outgoing = bytes_of(self.gradient), bytes_of(self.values)
        self.ticket: Ticket | None = None
        self.figures = NO_FIGURES


class AsyncSession:
    """The only leading task of an async run; a `Session` and `ReplacesWorkers`."""

    on_stalled_worker: Callable[[int], None] | None = None

    def __init__(
        self, task: Task, job: Job, model: ModelSpec, data: Dataset, make_rule: MakeRule, translate: Translate | None = None
    ) -> None:
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
        self._servers = ShardLinks([self._connect(task, placed, deadline) for placed in task.cluster.tasks_with_role("ps")])
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
            self._serve_worker(_ServedWorker(worker, link, generation, progress, self._shard.elements))
        except OSError as error:
            log.warning("lost worker-%d: %s", worker, error)
            self._take_back(worker, generation, progress)
        except Exception as error:  # noqa: BLE001 - handed to the session's thread, which raises it
            self._tickets.fail(error)
        finally:
            self._links.leave(worker)

    def _take_back(self, worker: int, generation: int, progress: TicketProgress) -> None:
        """End a lost worker's leases, then requeue the updates that not all shards have applied.

        All shards have all but its last update.
        """
        everywhere = False
        try:
            everywhere = self._servers.end_lease(worker, generation, progress.last_step)
        except OSError as error:
            self._tickets.fail(RunFailedError(f"lost a parameter server: {error}"))
        self._tickets.release(worker, progress.close(without_last=not everywhere))
        self._given_up.discard(worker)

    def _serve_worker(self, worker: _ServedWorker) -> None:
        while True:
            frame = worker.link.receive(worker.incoming)
            if self._ends_ticket(worker, frame) and not self._hand_out_ticket(worker):
                return

    def _ends_ticket(self, worker: _ServedWorker, frame: Frame) -> bool:
        """Carry out a request; return whether the worker now needs a ticket.

        Raises ConnectionError if its ticket forbids it.
        """
        calibrating = isinstance(worker.ticket, CalibrationOrder)
        match frame.kind:
            case Kind.PUSH if calibrating:
                self._shard.update(worker.gradient, frame.lr, frame.version, worker.values, step=pushed_step(frame))
                worker.link.send(Kind.PARAMETERS, worker.outgoing, figures=worker.figures)
                return False
            case Kind.PUSH if worker.progress.expects(pushed_step(frame)):
                return self._apply_push(worker, frame)
            case Kind.ECHO:
                worker.link.send(Kind.DONE)
                return False
            case Kind.JOIN | Kind.PULL:
                joined = worker.generation if frame.kind == Kind.JOIN else 0
                worker.link.send(Kind.PARAMETERS, worker.outgoing, version=self._shard.read(worker.values), examples=joined)
                return False
            case Kind.SUMS:
                self._tickets.finish(worker.number, self._received_sums(worker.link.receive_trailer(frame)))
            case Kind.CALIBRATED if calibrating:
                self._tickets.finish(worker.number, CalibrationResult(worker.number, frame.examples, frame.seconds))
            case Kind.READY:
                self._tickets.join(worker.number)
            case _:
                raise ConnectionError(f"it sent a frame of kind {frame.kind}, which was not agreed")
        return True

    def _apply_push(self, worker: _ServedWorker, frame: Frame) -> bool:
        """Apply an update of the worker's ticket.

        Return whether that was its last, else answer with the new parameters.
        """
        overflowed, step = bool(frame.flags & OVERFLOWED), pushed_step(frame)
        staleness, version = self._shard.update(worker.gradient, frame.lr, frame.version, worker.values, step=step, skip=overflowed)
        if self._loss_scale is not None:
            scale = worker.figures.loss
            self._loss_scale.learn(scale, scale / 2.0 if overflowed else scale, 1)
            worker.figures = Figures(loss=self._loss_scale.scale)
        if worker.progress.add(frame.loss, staleness, frame.seconds):
            worker.link.send(Kind.PARAMETERS, worker.outgoing, version=version, figures=worker.figures)
            return False
        self._tickets.finish(worker.number, worker.progress.close())
        return True

    def _hand_out_ticket(self, worker: _ServedWorker) -> bool:
        ticket, waited = self._tickets.take(worker.number)
        if isinstance(ticket, TrainTicket):
            worker.progress.begin(ticket)
        refresh = waited or isinstance(worker.ticket, EvalTicket) or not isinstance(ticket, TrainTicket)
        worker.ticket = ticket
        if self._loss_scale is not None:
            worker.figures = Figures(loss=self._loss_scale.scale)
        flags, version = REFRESH_SHARDS if refresh else 0, self._shard.read(worker.values, averaged=isinstance(ticket, EvalTicket))
        worker.link.send(Kind.PARAMETERS, worker.outgoing, flags=flags, version=version, figures=worker.figures, trailer=encode(ticket))
        return ticket is not None

    def _examples(self, ticket: TrainTicket, updates: int) -> int:
        first, before = ticket.first_in_epoch, self._sampler.examples_before
        place = ticket.skip, ticket.epoch, ticket.arranged
        return before(first + updates, *place) - before(first, *place)

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Queue a plan; see `Session.train`.

        Raises RunFailedError if all workers are lost, StalledRunError after `stall_timeout`.
        """
        workers = self._job.workers
        self._tickets.put(cut_plan(plan, workers))
        return self._timed(self._gather(lambda: self._tickets.waiting <= TICKETS_AHEAD * workers))

    def drain(self) -> Iterator[StepResult]:
        """Yield everything outstanding; see `Session.drain`. Raises as `train`."""
        return self._timed(self._gather(lambda: self._tickets.quiescent))

    def _timed(self, results: Iterator[StepResult]) -> Iterator[StepResult]:
        began = time.perf_counter()
        yield from results
        self._training_seconds += time.perf_counter() - began

    def _marked(self, result: StepResult) -> StepResult:
        if result.worker == PROFILED_WORKER:
            self._profiling = result.profiled
        return replace(result, profiled=True) if self._profiling else result

    def _gather(self, ready: Callable[[], bool]) -> Iterator[StepResult]:
        seen, since, limit = self._progress(), time.monotonic(), self._job.stall_timeout
        while True:
            self._tickets.wait(lambda: ready() or self._tickets.has_news, min(1.0, limit / 20))
            done = ready()
            yield from map(self._marked, self._tickets.take_results(StepResult))
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
        """Replace, once each, the workers that idle others wait for; return whether there were any."""
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
        awaited = [f"worker-{worker}" for worker in sorted(self._tickets.working)]
        whose = f"; work is outstanding at {', '.join(awaited)}" if awaited else ""
        limit = f"{self._job.stall_timeout:g}"
        return StalledRunError(f"stalled: no update was applied for {limit} s (--stall-timeout {limit}){whose}", *awaited[:1])

    def _progress(self) -> tuple[int, int]:
        return self._shard.version, self._tickets.finished

    def evaluate(self, split: Split) -> EvalResult:
        """Have the workers evaluate; see `Session.evaluate`.

        Raises RuntimeError with updates outstanding.
        """
        self._require_quiet("evaluate")
        began = time.perf_counter()
        size = self._sizes[split]
        self._tickets.put(cut_evaluation(split, size, self._job.workers, evaluation_batch(self._spec)))
        for result in self._gather(lambda: self._tickets.quiescent):
            raise RuntimeError(f"update {result.first_step} was applied during an evaluation")
        sums = [sum(values) for values in zip(*self._tickets.take_results(tuple), strict=True)]
        return EvalResult.of(self._spec.objective, split, size, sums, time.perf_counter() - began, self._shard.version)

    def translating(self) -> Translating:
        """Return the chief's translator with the current weights.

        Raises RuntimeError if the backend does not translate.
        """
        if self._translate is None:
            raise RuntimeError(f"this backend does not translate with {self._spec.name!r}")
        return self._translate(self.state().to_evaluate())

    def _received_sums(self, trailer: bytes) -> EvalSums:
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
        bounds = shard_bounds(self._spec, self._job.ps)
        return [memory.shard(start, stop) for start, stop in bounds]

    def state(self) -> State:
        """Return a copy of the state from all parameter servers; see `Session.state`."""
        self._require_quiet("state")
        memory = self._state_memory()
        local, *remote = self._pieces(memory)
        self._shard.export(lambda pieces, _version: _copy(pieces, local))
        self._servers.fetch(remote)
        return memory.state(self._shard.version, None if self._loss_scale is None else self._loss_scale.scalars)

    def predict(self, split: Split, start: int, stop: int) -> Array:
        """Raise RuntimeError: a chief computes nothing; see `Session.predict`."""
        raise RuntimeError("predict: needs a single synchronous worker")

    def load(self, state: State | None) -> None:
        """Replace the state on every parameter server.

        Raises ValueError where it does not fit the model.
        """
        self._require_quiet("load")
        if state is None:
            raise ValueError("load: the chief was given no state")
        memory = self._state_memory()
        memory.fill(state)
        local, *remote = self._pieces(memory)
        self._shard.replace(lambda pieces: _copy(local, pieces), state.updates)
        self._servers.store(remote, state.updates)
        if self._loss_scale is not None:
            self._loss_scale.restore(state.scalars)

    def calibrate(self, order: CalibrationOrder) -> Sequence[CalibrationResult]:
        """Have every worker repeat a component; see `Session.calibrate`.

        Pushes have a learning rate of 0.
        """
        self._require_quiet("calibrate")
        native = {} if self._calibrated else {"ps_busy_fraction": self._shard.busy_seconds / max(self._training_seconds, 1e-9)}
        self._calibrated = True
        self._tickets.put_for(dict.fromkeys(self._tickets.connected, order))
        for result in self._gather(lambda: self._tickets.quiescent):
            raise RuntimeError(f"update {result.first_step} was applied while a part of a step was calibrated")
        return [replace(result, native=native) for result in self._tickets.take_results(CalibrationResult)]

    def close(self) -> None:
        """End workers and parameter servers, bounded in time; a second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._tickets.end()
        self._listener.close(CLOSE_SECONDS)
        self._servers.close(CLOSE_SECONDS)


def _copy(pieces: Sequence[Vector], into: Sequence[Vector]) -> None:
    for piece, kept in zip(pieces, into, strict=True):
        np.copyto(kept, piece)
