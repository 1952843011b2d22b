"""How long others have said nothing, counted so that a process never takes its own absence for the silence of others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

__all__ = ["MOST_TICK_SECONDS", "TICK_SECONDS", "SilenceCounter"]

TICK_SECONDS = 0.25
"""How often whoever listens looks at what has arrived."""

MOST_TICK_SECONDS = 2 * TICK_SECONDS
"""What a tick counts for at most, however long it took."""


class SilenceCounter:
    """Counts for each peer how long nothing has arrived from it. It has no clock of its own: `now` is in seconds, of any beginning."""

    def __init__(self, limit_seconds: float, now: float) -> None:
        self.limit_seconds = limit_seconds
        self._ticked_at = now
        self._seen: dict[int, tuple[Hashable, float]] = {}

    def tick(self, now: float, arrivals: Mapping[int, Hashable]) -> list[int]:
        """Return the peers that have been silent for the limit. `arrivals`: for each peer what changes whenever something arrives.

        A peer that is not in it is forgotten, and begins anew if it comes back.
        """
        passed = min(now - self._ticked_at, MOST_TICK_SECONDS)
        self._ticked_at = now
        before = self._seen
        self._seen = {
            peer: (mark, before[peer][1] + passed if peer in before and before[peer][0] == mark else 0.0) for peer, mark in arrivals.items()
        }
        return [peer for peer, (_, seconds) in self._seen.items() if seconds >= self.limit_seconds]

    def seconds(self, peer: int) -> float:
        """Return how long nothing has arrived from a peer, as counted at the last tick."""
        return self._seen[peer][1] if peer in self._seen else 0.0
