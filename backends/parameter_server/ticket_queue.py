"""Who works on what: tickets waiting and held, results to be fetched, workers present and lost. Shared by the chief's threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ..base import CalibrationResult, StepResult
from .tickets import EvalTicket, Ticket, TrainTicket

__all__ = ["EvalSums", "TicketQueue"]

EvalSums = tuple[float, ...]
"""The sums of a piece of an evaluation, in the order of the model's objective."""


class TicketQueue:
    """Hands tickets to connection threads and collects what comes back for the session's thread. `finished` counts tickets."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._own: dict[int, Ticket] = {}
        self._held: dict[int, Ticket] = {}
        self._present: set[int] = set()
        self._dismissed: set[int] = set()
        self._results: list[StepResult] = []
        self._sums: list[EvalSums] = []
        self._calibrated: list[CalibrationResult] = []
        self._failure: Exception | None = None
        self._ended = False
        self.finished = 0

    def join(self, worker: int) -> None:
        """A worker is connected and warm."""
        with self._changed:
            self._present.add(worker)
            self._changed.notify_all()

    def take(self, worker: int) -> tuple[Ticket | None, bool]:
        """Wait for a ticket. Returns (ticket, or None where there will be no more; whether there was a wait).

        Raises ConnectionError where the worker is dismissed meanwhile.
        """
        with self._changed:
            waited = not self._has_ticket(worker) and not self._ended
            while not self._has_ticket(worker) and not self._ended and worker not in self._dismissed:
                self._changed.wait()
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
        """Another may come in the place of a worker that was dismissed."""
        with self._changed:
            self._dismissed.discard(worker)

    def _has_ticket(self, worker: int) -> bool:
        return worker in self._own or bool(self._waiting)

    def finish_train(self, worker: int, result: StepResult | None) -> None:
        """A worker's ticket is used up."""
        with self._changed:
            del self._held[worker]
            self.finished += 1
            if result is not None:
                self._results.append(result)
            self._changed.notify_all()

    def finish_eval(self, worker: int, sums: EvalSums) -> None:
        """A worker's piece of an evaluation is done."""
        with self._changed:
            del self._held[worker]
            self.finished += 1
            self._sums.append(sums)
            self._changed.notify_all()

    def finish_calibration(self, found: CalibrationResult) -> None:
        """A worker has repeated a component of a step."""
        with self._changed:
            del self._held[found.worker]
            self.finished += 1
            self._calibrated.append(found)
            self._changed.notify_all()

    def release(self, worker: int, applied: StepResult | None) -> None:
        """A worker is gone: keep what was applied of its ticket and put the rest back at the head of the queue."""
        with self._changed:
            self._present.discard(worker)
            self._own.pop(worker, None)
            ticket = self._held.pop(worker, None)
            if applied is not None:
                self._results.append(applied)
            if isinstance(ticket, TrainTicket) and applied is not None:
                ticket = ticket.after(applied.count)
            if isinstance(ticket, EvalTicket) or (isinstance(ticket, TrainTicket) and ticket.count):
                self._waiting.appendleft(ticket)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """A connection thread met an error of its own: the session's thread raises it."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def put(self, tickets: Sequence[Ticket]) -> None:
        """Put tickets at the end of the queue."""
        with self._changed:
            self._waiting.extend(tickets)
            self._changed.notify_all()

    def put_for(self, tickets: Mapping[int, Ticket]) -> None:
        """Give workers a ticket of their own, all at once."""
        with self._changed:
            self._own.update(tickets)
            self._changed.notify_all()

    def end(self) -> None:
        """There will be no more tickets: let every idle worker go."""
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
        """Number of tickets that nobody holds."""
        with self._changed:
            return len(self._waiting)

    @property
    def quiescent(self) -> bool:
        """Whether no ticket is waiting or held."""
        with self._changed:
            return not self._waiting and not self._own and not self._held

    @property
    def has_news(self) -> bool:
        """Whether there are results to take, or no worker to make any."""
        with self._changed:
            return bool(self._results) or not self._present

    def take_results(self) -> list[StepResult]:
        """Return the results that came since the last call."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def take_sums(self) -> list[EvalSums]:
        """Return the evaluation sums that came since the last call."""
        with self._changed:
            sums, self._sums = self._sums, []
            return sums

    def take_calibrated(self) -> list[CalibrationResult]:
        """Return the figures that came since the last call."""
        with self._changed:
            found, self._calibrated = self._calibrated, []
            return found

    def wait(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Wait until `ready`, which is asked whenever something changed, or the time is over; return whether it is.

        Raises what a connection thread failed with. `ready` may use this object's properties.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if ready():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
