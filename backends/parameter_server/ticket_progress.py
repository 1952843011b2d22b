"""What has been applied of the ticket that one worker holds."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ..base import StepResult
from .tickets import TrainTicket

__all__ = ["TicketProgress"]


class TicketProgress:
    """Collects loss, staleness and times of a ticket's updates. Used by one connection thread.

    `examples` tells how many examples the first n updates of a ticket have. The worker traces its first `profiled_updates`, and writes the
    trace before it computes the next one; so that one counts as profiled too.
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
        """Start the clock of a ticket; it is about to be handed out."""
        self._ticket = ticket
        self._losses, self._staleness, self._busy_seconds = [], [], 0.0
        self._began = self._last = time.perf_counter()

    def add(self, loss: float, staleness: int, busy_seconds: float) -> bool:
        """Note an update that was applied; return whether the ticket has more. `busy_seconds`: what the worker spent computing it."""
        self._losses.append(loss)
        self._staleness.append(staleness)
        self._busy_seconds += busy_seconds
        self._last = time.perf_counter()
        return self._ticket is not None and len(self._losses) < self._ticket.count

    @property
    def next_step(self) -> int | None:
        """The number of the update that the worker has to push next, None where it holds no ticket with updates left."""
        expects = self._ticket is not None and len(self._losses) < self._ticket.count
        return self._ticket.first_step + len(self._losses) if expects and self._ticket is not None else None

    @property
    def last_step(self) -> int | None:
        """The number of the update that was applied last, None where none of the ticket was."""
        return None if self._ticket is None or not self._losses else self._ticket.first_step + len(self._losses) - 1

    def close(self, *, without_last: bool = False) -> StepResult | None:
        """Return what was applied as one result, or None where nothing was; the ticket is no longer this worker's.

        `without_last`: the last update is not applied everywhere.
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
