"""Notices an async worker that has delivered nothing for too long while others have: the run goes on, but on fewer workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["WorkerWatch"]

LONGEST_TICK_SECONDS = 1.0
"""What one look at the clock adds to a silence, at most: a driver that was stopped itself must not take its absence for that of others."""

RESULTS_OF_OTHERS = 2
"""Results for each worker of the run that others deliver meanwhile, at least: work is handed out by turns, so its turn has come."""


class WorkerWatch:
    """Counts how long each worker has delivered nothing. It speaks when another one delivers: that nobody works is no case of it.

    Silence beyond `limit_seconds` is recorded with `event` as ``worker_silent`` and told with `tell`, once; its end as ``worker_answers``.
    `on_silent` gets the worker's number then.
    """

    def __init__(
        self,
        workers: int,
        limit_seconds: float,
        event: Callable[..., Any],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        on_silent: Callable[[int], None] | None = None,
    ) -> None:
        self._limit_seconds = limit_seconds
        self._event, self._tell, self._clock, self._on_silent = event, tell, clock, on_silent
        self._watched_seconds = 0.0
        self._answered_at = [0.0] * workers
        self._results_of_others = [0] * workers
        self._told: set[int] = set()
        self._absent: set[int] = set()
        self._looked_at = clock()

    def tick(self) -> None:
        """Look at the clock; to be called about once a second, whatever happens."""
        now = self._clock()
        passed = min(now - self._looked_at, LONGEST_TICK_SECONDS)
        self._looked_at = now
        self._watched_seconds += passed

    def on_updates(self, worker: int) -> None:
        """A worker has delivered updates; tell of those that have not for too long."""
        self._answered(worker)
        workers = range(len(self._answered_at))
        for other in (other for other in workers if other != worker):
            self._results_of_others[other] += 1
            enough = self._results_of_others[other] >= RESULTS_OF_OTHERS * len(workers)
            if enough and self._silent_seconds(other) > self._limit_seconds and other not in self._told | self._absent:
                self._told.add(other)
                self._event("worker_silent", worker=other, silent_seconds=self._silent_seconds(other))
                self._tell(
                    f"worker-{other} has finished no step for {self._silent_seconds(other):.0f} s, while others have: it may be stopped or "
                    "stuck. Training continues without it until an evaluation or a checkpoint has to wait for it (--stall-timeout "
                    f"{self._limit_seconds:g})"
                )
                if self._on_silent is not None:
                    self._on_silent(other)

    def on_quiescent(self) -> None:
        """Nothing is outstanding: every worker has answered."""
        for worker in range(len(self._answered_at)):
            self._answered(worker)

    def on_absent(self, worker: int) -> None:
        """A worker is being started anew: nothing is expected of it."""
        self._absent.add(worker)
        self._told.discard(worker)

    def on_back(self, worker: int) -> None:
        """It is there again."""
        self._absent.discard(worker)
        self._answered_at[worker], self._results_of_others[worker] = self._watched_seconds, 0

    def _silent_seconds(self, worker: int) -> float:
        """How long a worker has finished no step, as counted at the last tick."""
        return self._watched_seconds - self._answered_at[worker]

    def _answered(self, worker: int) -> None:
        silent_seconds = self._silent_seconds(worker)
        self._answered_at[worker], self._results_of_others[worker] = self._watched_seconds, 0
        if worker in self._told:
            self._told.discard(worker)
            self._event("worker_answers", worker=worker, silent_seconds=silent_seconds)
            self._tell(f"worker-{worker} has finished steps again, after {silent_seconds:.0f} s")
