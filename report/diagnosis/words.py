"""The words for the parts of a step, and figures as an explanation writes them."""

from __future__ import annotations

from ...records.text.numbers import UNKNOWN

__all__ = ["NAMES", "bits_text", "percent"]

NAMES = {
    "compute": "computation",
    "network": "communication",
    "data": "data loading",
    "peers": "waiting for stragglers",
    "idle": "idle workers",
    "evaluating": "evaluation",
    "translating": "final translation",
    "saving": "checkpoint pauses",
    "profiling": "profiling",
    "other": "idle and coordination",
}


def percent(fraction: float | None) -> str:
    """Return a fraction as whole percent, or with a decimal where it is less than one."""
    if fraction is None:
        return UNKNOWN
    return f"{fraction:.1%}" if 0 < fraction < 0.0095 else f"{fraction:.0%}"


def bits_text(bytes_per_second: float) -> str:
    """Return a link's speed as links are called: ``100 Mbit/s``."""
    bits = bytes_per_second * 8
    for factor, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits >= factor:
            return f"{bits / factor:g} {name}"
    return f"{bits:g} bit/s"
