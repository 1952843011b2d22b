"""How far the making of a large dataset has come: a line on standard error every few seconds, none for what is done at once."""

from __future__ import annotations

import sys
import time

__all__ = ["ReadingProgress"]

_SECONDS_BETWEEN = 5.0


class ReadingProgress:
    """Tells how many of `total` things (pairs, say) are done; `what` is what is being done, such as ``encoding``."""

    def __init__(self, what: str, total: int, unit: str = "pairs") -> None:
        self._what, self._total, self._unit = what, total, unit
        self._began = self._told = time.monotonic()

    def update(self, done: int) -> None:
        """Tell where it stands, unless it was told just now."""
        now = time.monotonic()
        if now - self._told < _SECONDS_BETWEEN:
            return
        self._told = now
        share = done / self._total if self._total else 1.0
        left = f", about {(now - self._began) * (1 - share) / share:.0f} s left" if share > 0.02 else ""
        sys.stderr.write(f"data: {self._what}: {done:,} of {self._total:,} {self._unit} ({100 * share:.0f} %{left})\n")
        sys.stderr.flush()
