"""Keep a failing probe from ending anything: its figure becomes None, and what went wrong is said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["Problems"]

T = TypeVar("T")


class Problems:
    """Collects short texts about what could not be observed; each distinct text once in its life. Not for several threads at once."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._new: list[str] = []

    def attempt(self, what: str, probe: Callable[[], T]) -> T | None:
        """Return what the probe returns, or None, with a note, where it raises: measuring never ends a run, whatever breaks in it."""
        try:
            return probe()
        except Exception as error:  # noqa: BLE001 -- see above; the text reaches the run's records
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.note(f"{what}: {reason or type(error).__name__}")
            return None

    def note(self, text: str) -> None:
        """Keep a text for `take`, unless it was kept before."""
        if text not in self._told:
            self._told.add(text)
            self._new.append(text)

    def take(self) -> tuple[str, ...]:
        """Return the texts noted since the last call."""
        new, self._new = tuple(self._new), []
        return new
