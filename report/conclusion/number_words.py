"""Numbers and differences as the sentences of a conclusion have them."""

from __future__ import annotations

from collections.abc import Sequence

from ..comparison.comparability import Difference

__all__ = ["counted", "differing", "interval_text", "ratio_text", "times_text"]


def counted(count: int, what: str) -> str:
    """Return a number of things: ``1 run``, ``12 runs``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def differing(faults: Sequence[Difference]) -> str:
    """Return in which values settings differ: `` (budget 9,600 examples and 19,200 examples)``; empty for no setting."""
    values = {one.label: " and ".join(dict.fromkeys(value for value in one.values if value is not None)) for one in faults}
    return f" ({'; '.join(f'{label} {text}' for label, text in values.items())})" if values else ""


def interval_text(low: str, high: str, *, widened: bool) -> str:
    """Return an interval with its name; a star says that it is wider than by scatter alone (see the caveats)."""
    return f"95 % CI{'*' * widened} {low}–{high}"


def times_text(value: float) -> str:
    """Return a ratio with its sign: ``1.84 ×``."""
    return f"{ratio_text(value)} ×"


def ratio_text(value: float | None) -> str:
    """Return a ratio with three digits, and with four where it would look like 1 otherwise; empty for None."""
    if value is None:
        return ""
    return f"{value:.3g}" if value >= 10 else f"{value:.3f}" if 0 < abs(value - 1.0) < 0.005 else f"{value:.2f}"
