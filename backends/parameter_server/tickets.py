"""Tickets: pieces of a plan or evaluation for free workers.

A lost worker's unapplied updates return to the queue.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from ...core.cluster import split_evenly
from ...data.base import Split
from ...data.batching import Arranged
from ..base import CalibrationOrder, CalibrationResult, Plan, StepComponent, StepResult

PIECES_PER_WORKER = 8  # small enough that workers end together
MAX_COUNT = 512  # updates in a ticket
_HEAD = struct.Struct("<cqqqqq")
_SPLITS: tuple[Split, ...] = ("train", "test")
_COMPONENTS: tuple[StepComponent, ...] = get_args(StepComponent)


@dataclass(frozen=True, slots=True)
class TrainTicket:
    """Consecutive updates of an epoch, each with a learning rate; other fields as in `Plan`."""

    first_step: int
    epoch: int
    first_in_epoch: int
    learning_rates: NDArray[np.float64]
    skip: int = 0
    arranged: Arranged = ()

    @property
    def count(self) -> int:
        """Number of updates."""
        return len(self.learning_rates)

    def remainder(self, done: int) -> TrainTicket:
        """Return the rest after `done` updates."""
        rest = self.learning_rates[done:]
        return TrainTicket(self.first_step + done, self.epoch, self.first_in_epoch + done, rest, self.skip, self.arranged)


@dataclass(frozen=True, slots=True)
class EvalTicket:
    """The examples start … stop − 1 of a split."""

    split: Split
    start: int
    stop: int


Ticket = TrainTicket | EvalTicket | CalibrationOrder  # a calibration order is for a particular worker


def cut_plan(plan: Plan, workers: int) -> list[TrainTicket]:
    """Cut a plan into tickets of nearly equal size."""
    pieces = max(min(plan.count, workers * PIECES_PER_WORKER), math.ceil(plan.count / MAX_COUNT))
    return [
        TrainTicket(
            plan.first_step + start, plan.epoch, plan.first_in_epoch + start, plan.learning_rates[start:stop], plan.skip, plan.arranged
        )
        for start, stop in split_evenly(plan.count, pieces)
    ]


def cut_evaluation(split: Split, size: int, workers: int, least: int) -> list[EvalTicket]:
    """Cut a split into a few tickets per worker, if possible of at least `least` examples."""
    pieces = max(1, min(4 * workers, size // least))
    return [EvalTicket(split, start, stop) for start, stop in split_evenly(size, pieces) if stop > start]


def encode(ticket: Ticket | None) -> bytes:
    """Return a ticket as bytes; None: there are no more."""
    if ticket is None:
        return _HEAD.pack(b"x", 0, 0, 0, 0, 0)
    if isinstance(ticket, EvalTicket):
        return _HEAD.pack(b"e", _SPLITS.index(ticket.split), ticket.start, ticket.stop, 0, 0)
    if isinstance(ticket, CalibrationOrder):
        return _HEAD.pack(b"c", _COMPONENTS.index(ticket.component), ticket.count, round(1e9 * ticket.seconds), 0, 0)
    head = _HEAD.pack(b"t", ticket.first_step, ticket.epoch, ticket.first_in_epoch, ticket.count, ticket.skip)
    return head + np.asarray(ticket.learning_rates, dtype="<f8").tobytes() + np.array(ticket.arranged, dtype="<i8").tobytes()


def decode(data: bytes) -> Ticket | None:
    """Read what `encode` wrote. Raises ValueError for anything else."""
    kind, first, second, third, count, skip = _HEAD.unpack_from(data)
    if kind == b"x":
        return None
    if kind == b"e":
        return EvalTicket(_SPLITS[first], second, third)
    if kind == b"c":
        return CalibrationOrder(_COMPONENTS[first], second, third / 1e9)
    rest = (len(data) - _HEAD.size) // 8 - count
    if kind != b"t" or count < 0 or rest < 0 or rest % 3 or (len(data) - _HEAD.size) % 8:
        raise ValueError("not a ticket of the parameter server")
    rates = np.frombuffer(data, dtype="<f8", count=count, offset=_HEAD.size)
    arranged = np.frombuffer(data, dtype="<i8", offset=_HEAD.size + 8 * count).reshape(-1, 3).tolist()
    return TrainTicket(first, second, third, rates.astype(np.float64), skip, tuple((*entry,) for entry in arranged))


EvalSums = tuple[float, ...]  # in the objective's order
Result = StepResult | EvalSums | CalibrationResult
R = TypeVar("R", bound=Result)


class TicketQueue:
    """Queue of tickets for connection threads, and their results for the session's thread.

    `finished` counts tickets.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._own: dict[int, Ticket] = {}
        self._held: dict[int, Ticket] = {}
        self._present: set[int] = set()
        self._dismissed: set[int] = set()
        self._results: dict[type, list[Any]] = {}
        self._failure: Exception | None = None
        self._ended = False
        self.finished = 0

    def join(self, worker: int) -> None:
        """Note that a worker is connected and warm."""
        with self._changed:
            self._present.add(worker)
            self._changed.notify_all()

    def take(self, worker: int) -> tuple[Ticket | None, bool]:
        """Wait for a ticket; return it, None at the end, and whether it waited.

        Raises ConnectionError for a dismissed worker.
        """
        with self._changed:
            waited = not self._has_ticket(worker) and not self._ended
            self._changed.wait_for(lambda: self._has_ticket(worker) or self._ended or worker in self._dismissed)
            if worker in self._dismissed:
                raise ConnectionError("it has been dismissed")
            if not self._has_ticket(worker):
                self._present.discard(worker)
                self._changed.notify_all()
                return None, waited
            ticket = self._own.pop(worker) if worker in self._own else self._waiting.popleft()
            self._held[worker] = ticket
            self._changed.notify_all()
            return ticket, waited

    def dismiss(self, worker: int) -> None:
        """Give a worker no more tickets, until it is readmitted."""
        with self._changed:
            self._dismissed.add(worker)
            self._changed.notify_all()

    def readmit(self, worker: int) -> None:
        """Allow another process in the place of a dismissed worker."""
        with self._changed:
            self._dismissed.discard(worker)

    def _has_ticket(self, worker: int) -> bool:
        return worker in self._own or bool(self._waiting)

    def finish(self, worker: int, result: Result | None) -> None:
        """Finish a worker's ticket; None: of updates of which none was applied."""
        with self._changed:
            del self._held[worker]
            self.finished += 1
            self._keep(result)
            self._changed.notify_all()

    def _keep(self, result: Result | None) -> None:
        if result is not None:
            self._results.setdefault(type(result), []).append(result)

    def release(self, worker: int, applied: StepResult | None) -> None:
        """Remove a lost worker; keep what was applied of its ticket and requeue the rest first."""
        with self._changed:
            self._present.discard(worker)
            self._own.pop(worker, None)
            ticket = self._held.pop(worker, None)
            self._keep(applied)
            if isinstance(ticket, TrainTicket) and applied is not None:
                ticket = ticket.remainder(applied.count)
            if isinstance(ticket, EvalTicket) or (isinstance(ticket, TrainTicket) and ticket.count):
                self._waiting.appendleft(ticket)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Have the session's thread raise an error of a connection thread."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def put(self, tickets: Sequence[Ticket]) -> None:
        """Append tickets to the queue."""
        with self._changed:
            self._waiting.extend(tickets)
            self._changed.notify_all()

    def put_for(self, tickets: Mapping[int, Ticket]) -> None:
        """Give each worker a particular ticket, all at the same time."""
        with self._changed:
            self._own.update(tickets)
            self._changed.notify_all()

    def end(self) -> None:
        """Let every idle worker go: there are no more tickets."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def connected(self) -> frozenset[int]:
        """The workers connected now."""
        with self._changed:
            return frozenset(self._present)

    @property
    def working(self) -> frozenset[int]:
        """The workers that hold a ticket."""
        with self._changed:
            return frozenset(self._held)

    @property
    def waiting(self) -> int:
        """Number of tickets that no worker holds."""
        with self._changed:
            return len(self._waiting)

    @property
    def quiescent(self) -> bool:
        """Whether no ticket is waiting or held."""
        with self._changed:
            return not self._waiting and not self._own and not self._held

    @property
    def has_news(self) -> bool:
        """Whether there are results of updates to take, or no workers."""
        with self._changed:
            return StepResult in self._results or not self._present

    def take_results(self, kind: type[R]) -> list[R]:
        """Return the results of a kind since the last call."""
        with self._changed:
            return self._results.pop(kind, [])

    def wait(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Wait until `ready`, called after each change, or the timeout; return whether it is.

        Raises a connection's error.
        """
        with self._changed:
            is_ready = self._changed.wait_for(lambda: self._failure is not None or ready(), timeout)
            if self._failure is not None:
                raise self._failure
            return is_ready


class TicketProgress:
    """Loss, staleness and times of a ticket's updates.

    `examples` counts those in its first n updates.
    """

    def __init__(self, worker: int, examples: Callable[[TrainTicket, int], int], profiled_updates: int = 0) -> None:
        self._worker, self._examples = worker, examples
        self._profiled_left = profiled_updates + 1 if profiled_updates else 0
        self._ticket: TrainTicket | None = None
        self._losses: list[float] = []
        self._staleness: list[int] = []
        self._busy_seconds = 0.0
        self._began = self._last = 0.0

    def begin(self, ticket: TrainTicket) -> None:
        """Start a ticket's clock; it is about to be sent."""
        self._ticket = ticket
        self._losses, self._staleness, self._busy_seconds = [], [], 0.0
        self._began = self._last = time.perf_counter()

    def add(self, loss: float, staleness: int, busy_seconds: float) -> bool:
        """Add an applied update, computed in `busy_seconds`; return whether the ticket has more."""
        self._losses.append(loss)
        self._staleness.append(staleness)
        self._busy_seconds += busy_seconds
        self._last = time.perf_counter()
        return self._ticket is not None and len(self._losses) < self._ticket.count

    def expects(self, step: int | None) -> bool:
        """Return whether `step` is the update that the worker has to push next."""
        ticket, done = self._ticket, len(self._losses)
        return ticket is not None and done < ticket.count and step == ticket.first_step + done

    @property
    def last_step(self) -> int | None:
        """The last applied update of the ticket, None without one."""
        return None if self._ticket is None or not self._losses else self._ticket.first_step + len(self._losses) - 1

    def close(self, *, without_last: bool = False) -> StepResult | None:
        """End the ticket; return its applied updates or None.

        `without_last`: some shard misses the last one.
        """
        ticket, self._ticket = self._ticket, None
        if without_last:
            self._losses, self._staleness = self._losses[:-1], self._staleness[:-1]
        if ticket is None or not self._losses:
            return None
        seconds, profiled = self._last - self._began, self._profiled_left > 0
        self._profiled_left = max(0, self._profiled_left - len(self._losses))
        return StepResult(
            ticket.first_step,
            np.array(self._losses, dtype=np.float32),
            self._examples(ticket, len(self._losses)),
            seconds,
            network_wait_seconds=max(0.0, seconds - self._busy_seconds),
            worker=self._worker,
            staleness=np.array(self._staleness, dtype=np.int64),
            profiled=profiled,
        )
