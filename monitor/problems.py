"""Keep a failing probe from ending anything: its figure becomes None, and what went wrong is said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..records.schema import MOST_PROBLEM_CHARACTERS, MOST_PROBLEMS

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
            reason = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
            self.note(f"{what}: {reason or type(error).__name__}")
            return None

    def note(self, text: str) -> None:
        """Keep a text for `take`, unless it was kept before; cut where it is long, and with what is no Unicode spelled out."""
        text = text.encode(errors="backslashreplace").decode()[:MOST_PROBLEM_CHARACTERS]
        if text not in self._told:
            self._told.add(text)
            self._new.append(text)

    def take(self) -> tuple[str, ...]:
        """Return the texts noted since the last call, as many as one sample may have; what is left comes with the next."""
        new, self._new = tuple(self._new[:MOST_PROBLEMS]), self._new[MOST_PROBLEMS:]
        return new
