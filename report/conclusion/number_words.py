"""Numbers as the sentences of a conclusion have them."""

from __future__ import annotations

__all__ = ["counted", "ratio_text", "times_text"]


def counted(count: int, what: str) -> str:
    """Return a number of things: ``1 run``, ``12 runs``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def times_text(value: float) -> str:
    """Return a ratio with its sign: ``1.84 ×``."""
    return f"{ratio_text(value)} ×"


def ratio_text(value: float | None) -> str:
    """Return a ratio with three digits, and with four where it would look like 1 otherwise; empty for None."""
    if value is None:
        return ""
    return f"{value:.3g}" if value >= 10 else f"{value:.3f}" if 0 < abs(value - 1.0) < 0.005 else f"{value:.2f}"
