"""Writes of a resumed run to its directory that are held back until it is certain that the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["DeferredWrites"]


class DeferredWrites:
    """Writes to a run's documents, made at once in a new run; in one that goes on they wait for `commit`.

    So a start that fails changes nothing of the run that was to go on, and `status_to_restore` is what its status is put back to: None
    for a new run, and from the commit on.
    """

    def __init__(self, status_before: Mapping[str, Any] | None = None) -> None:
        self.status_to_restore = status_before
        self._waiting: list[Callable[[], None]] = []

    def make(self, write: Callable[[], None]) -> None:
        """Make a write, now or at the commit; those that wait are made in the order in which they came."""
        if self.status_to_restore is None:
            write()
        else:
            self._waiting.append(write)

    def commit(self) -> None:
        """The run does go on: make what has waited, and whatever follows at once."""
        self.status_to_restore = None
        for write in self._waiting:
            write()
        self._waiting.clear()
