"""Pairs that are not in a dataset: how many there are for each reason, and where the first one is."""

from __future__ import annotations

from ...base import Split

__all__ = ["LeftOut"]


class LeftOut:
    """Counts pairs by split and reason; lines are numbered from 1, as editors do."""

    def __init__(self) -> None:
        self._found: dict[tuple[Split, str], tuple[int, int]] = {}

    def add(self, split: Split, reason: str, line: int, count: int = 1) -> None:
        """Count some pairs, of which the first is in this line."""
        before, first = self._found.get((split, reason), (0, line))
        self._found[split, reason] = before + count, first

    def lines(self) -> tuple[str, ...]:
        """Return a line a split and reason."""
        return tuple(
            f"{split}: {count:,} {'pair' if count == 1 else 'pairs'} {reason} ({'in' if count == 1 else 'the first in'} line {first:,})"
            for (split, reason), (count, first) in self._found.items()
        )
