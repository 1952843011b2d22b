"""Detection of silent async workers, and of lost peers in error texts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

MAX_TICK_SECONDS = 1.0  # limit per tick: a suspended driver must not blame workers
RESULTS_OF_OTHERS = 2  # others' results per worker: tickets rotate, so the silent worker had its turn


class WorkerWatch:
    """Detection of workers silent beyond `limit_seconds` while others deliver.

    An entire cluster's silence is not reported.
    """

    def __init__(
        self,
        workers: int,
        limit_seconds: float,
        event: Callable[..., Any],
        show: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        on_silent: Callable[[int], None] | None = None,
    ) -> None:
        self._limit_seconds, self._event, self._show, self._clock, self._on_silent = limit_seconds, event, show, clock, on_silent
        self._watched_seconds = 0.0
        self._answered_at = [0.0] * workers
        self._results_of_others = [0] * workers
        self._reported: set[int] = set()
        self._absent: set[int] = set()
        self._looked_at = clock()

    def tick(self) -> None:
        """Read the clock; call about once a second."""
        now = self._clock()
        self._watched_seconds += min(now - self._looked_at, MAX_TICK_SECONDS)
        self._looked_at = now

    def on_updates(self, worker: int) -> None:
        """Note a worker's updates; report workers that are silent too long."""
        self._answered(worker)
        workers = range(len(self._answered_at))
        for peer in (peer for peer in workers if peer != worker):
            self._results_of_others[peer] += 1
            enough = self._results_of_others[peer] >= RESULTS_OF_OTHERS * len(workers)
            if enough and self._silent_seconds(peer) > self._limit_seconds and peer not in self._reported | self._absent:
                self._reported.add(peer)
                self._event("worker_silent", worker=peer, silent_seconds=self._silent_seconds(peer))
                self._show(
                    f"worker-{peer} has finished no step for {self._silent_seconds(peer):.0f} s, while others have: it may be stopped or "
                    "stuck. Training continues without it until an evaluation or a checkpoint has to wait for it (--stall-timeout "
                    f"{self._limit_seconds:g})"
                )
                if self._on_silent is not None:
                    self._on_silent(peer)

    def on_quiescent(self) -> None:
        """Note that no work is outstanding: every worker has answered."""
        for worker in range(len(self._answered_at)):
            self._answered(worker)

    def on_absent(self, worker: int) -> None:
        """Expect nothing from a worker that restarts."""
        self._absent.add(worker)
        self._reported.discard(worker)

    def on_back(self, worker: int) -> None:
        """Expect results from the worker again."""
        self._absent.discard(worker)
        self._answered_at[worker], self._results_of_others[worker] = self._watched_seconds, 0

    def _silent_seconds(self, worker: int) -> float:
        return self._watched_seconds - self._answered_at[worker]

    def _answered(self, worker: int) -> None:
        silent_seconds = self._silent_seconds(worker)
        self._answered_at[worker], self._results_of_others[worker] = self._watched_seconds, 0
        if worker in self._reported:
            self._reported.discard(worker)
            self._event("worker_answers", worker=worker, silent_seconds=silent_seconds)
            self._show(f"worker-{worker} has finished steps again, after {silent_seconds:.0f} s")


# Texts of the system, frameworks' libraries and our backends; frameworks raise general errors.
_CONNECTION_LOST = re.compile(
    r"(?:reset|closed|aborted) by (?:the )?(?:remote )?peer|connection (?:was )?(?:reset|closed|aborted|lost|refused|timed out)"
    r"|broken pipe|socket closed|no route to host|failed to connect to all addresses"
    r"|lost (?:the chief|a parameter server|worker-\d+)|every worker is lost",
    re.IGNORECASE,
)
_HEARTBEAT_LOST = re.compile(r"heartbeat timeout|coordinationservice/heartbeat", re.IGNORECASE)


def indicates_silent_peer(text: str) -> bool:
    """Return whether a text reports that a peer no longer answers, which may be stopped."""
    return _HEARTBEAT_LOST.search(text) is not None


def indicates_peer_loss(text: str) -> bool:
    """Return whether a text reports a lost connection or a silent peer."""
    return _CONNECTION_LOST.search(text) is not None or indicates_silent_peer(text)


def caused_by_peer_loss(error: BaseException | None) -> bool:
    """Return whether the loss of a connection caused an error."""
    seen: set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ConnectionError) or indicates_peer_loss(str(error)):
            return True
        error = error.__cause__
    return False
