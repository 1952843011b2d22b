"""An answer to one question about a run: a line for people, figures for programs; and how figures are written in such lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...records.text.numbers import UNKNOWN

__all__ = ["Answer", "digits3", "percent", "time_text"]


@dataclass(frozen=True, slots=True)
class Answer:
    """`key` names it in ``--json``, `question` on the page. `text` is one line; `figures` are a JSON value, None what is not known."""

    key: str
    question: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)


def digits3(value: float | None) -> str:
    """Return a figure with at most three digits that say something: ``0.0123``, ``4.56``, ``78,900``; UNKNOWN for None."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if 1000 <= abs(rounded) < 1e9 else f"{rounded:.3g}"


def percent(fraction: float | None) -> str:
    """Return a fraction as whole percent, with a decimal below one; UNKNOWN for None."""
    if fraction is None:
        return UNKNOWN
    return f"{fraction:.1%}" if 0 < abs(fraction) < 0.0095 else f"{fraction:.0%}"


_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0


def time_text(seconds: float | None) -> str:
    """Return a time with at most three digits: ``0.34 s``, ``12.3 s``, ``2.08 min``, ``3.12 h``, ``2.9 days``; UNKNOWN for None."""
    if seconds is None:
        return UNKNOWN
    for least, unit in ((3 * _DAY, "days"), (2 * _HOUR, "h"), (2 * _MINUTE, "min")):
        if seconds >= least:
            return f"{digits3(seconds / {'days': _DAY, 'h': _HOUR, 'min': _MINUTE}[unit])} {unit}"
    return f"{digits3(seconds)} s"
