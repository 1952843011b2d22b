"""Formats figures for people: units spelled out, few digits, decimal prefixes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...metrics.base import PERCENTAGES

__all__ = [
    "UNKNOWN",
    "bytes_text",
    "count_text",
    "duration_text",
    "figure_text",
    "memory_basis",
    "number_text",
    "rate_text",
    "saving_text",
    "seconds_text",
]

UNKNOWN = "-"
"""Stands for what was not observed."""

_PREFIXES = ("", "k", "M", "G", "T", "P")


def number_text(value: float | str | None, digits: int = 4) -> str:
    """Return a figure with `digits` decimals, or three digits where those would hide it or it is huge; UNKNOWN for None.

    NaN and Infinity are given by the names that records have for them, also where they come as these.
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return f"{value:.3g}" if 0 < abs(value) < 10 ** (1 - digits) or abs(value) >= _HUGE else f"{value:,.{digits}f}"


def figure_text(name: str, value: float | str | None, digits: int = 4) -> str:
    """Return what is written of a loss or a metric, wherever it stands: a percentage with two decimals, all else as `number_text` does.

    `name` is the metric's, or that of its figure in a row of a table, such as ``best_eval_bleu``.
    """
    if name.removeprefix("best_").removeprefix("eval_").removeprefix("end_") not in PERCENTAGES or isinstance(value, str):
        return number_text(value, digits)
    return number_text(value if value is None or not math.isfinite(value) else round(value, 2), 2)


_HUGE = 1e7
"""Such as the loss of a run that diverged."""


def count_text(value: float | None) -> str:
    """Return a whole number with separators: ``12,345``."""
    return UNKNOWN if value is None else f"{round(value):,}"


def rate_text(value: float | None) -> str:
    """Return events per second: ``12,345/s``, and with decimals below 100: ``3.42/s``."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}/s" if value >= 100 else f"{value:.3g}/s"


def bytes_text(value: float | None, per_second: bool = False, like: float | None = None) -> str:
    """Return an amount of bytes with a decimal prefix, that of the amount `like`: ``12.3 MB``, ``980 B/s``."""
    if value is None:
        return UNKNOWN
    power, size = 0, abs(value if like is None else like)
    while size >= 999.5 and power < len(_PREFIXES) - 1:
        value, size, power = value / 1000, size / 1000, power + 1
    digits = 0 if power == 0 or value >= 99.95 else 1
    text = f"{value:.2g}" if power and 0 < abs(value) < 0.95 else f"{value:.{digits}f}"
    return f"{text} {_PREFIXES[power]}B{'/s' if per_second else ''}"


def seconds_text(seconds: float | None) -> str:
    """Return a short time with three digits: ``1.23 s``, ``12.3 ms``, ``50 µs``; UNKNOWN for None."""
    if seconds is None:
        return UNKNOWN
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return "0 s" if not seconds else f"{seconds * 1e9:.3g} ns"


def saving_text(checkpoints: Mapping[str, Any]) -> str:
    """Return what the ``checkpoints`` of a summary cost on average: training's pause and the time of writing, as far as they are known."""
    stall, write = ((checkpoints.get(name) or {}).get("mean") for name in ("stall_seconds", "write_seconds"))
    stalled = "" if stall is None else f"; each paused training for {seconds_text(stall)}"
    written = "" if write is None else f"; writing one took {seconds_text(write)}, in the background or after training"
    failed = f", {checkpoints['failed']:,} FAILED" if checkpoints.get("failed") else ""
    return f"{checkpoints['saved']:,} saved{failed}{stalled}{written}"


def memory_basis(pss: bool) -> str:
    """Return what the figures of a node's memory are; `pss`: there is one of PSS, which short runs have no sample of."""
    divided = "; PSS divides it among them, and is sampled rarely, so it is no peak" if pss else ""
    return f"RSS counts shared memory in every process{divided}."


def duration_text(seconds: float | None) -> str:
    """Return a duration: ``0.34 s``, ``12.3 s``, ``2 min 05 s``, ``3 h 07 min``."""
    if seconds is None:
        return UNKNOWN
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
