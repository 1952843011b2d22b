"""Sort keys for the values of settings: amounts are sorted by size, in whichever unit and spelling they were given."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ...core.units import Cadence, Target, parse_bandwidth

__all__ = ["BY_FIELD", "by_cadence", "by_saving", "by_target", "natural"]

_UNITS = ("steps", "seconds", "epochs", "end")


def natural(value: Any) -> tuple[Any, ...]:
    """Return what puts values in order: numbers, then lists by their elements, then texts, in which whole numbers count as numbers."""
    if isinstance(value, int | float):
        return 0, value
    if isinstance(value, tuple | list):
        return (1, *map(natural, value))
    parts = re.split("([0-9]+)", str(value))
    return (2, *(int(part) if index % 2 else part for index, part in enumerate(parts)))


def by_cadence(text: str) -> tuple[int, float]:
    """Put ``500steps``, ``30s``, ``1epoch`` and ``end`` in order, by unit and amount."""
    cadence = Cadence.parse(text)
    return _UNITS.index(cadence.unit), cadence.amount


def by_saving(value: tuple[str, bool]) -> tuple[Any, ...]:
    """Put in order when checkpoints are saved (see `factor_values.saving`), from often to never."""
    every, at_end = value
    return (*by_cadence(every), not at_end)


def by_target(text: str) -> tuple[Any, ...]:
    """Put goals in order, by figure and value; ``none`` comes first."""
    if text == "none":
        return (0,)
    target = Target.parse(text)
    return 1, target.metric, target.comparison, target.value


BY_FIELD: Mapping[str, Callable[[Any], Any]] = {
    "bandwidth": parse_bandwidth,
    "checkpoint_every": by_cadence,
    "eval_every": by_cadence,
    "until": by_target,
}
"""For the fields of a job that are texts and mean amounts."""
