"""Quantities with units as people type them: ``100mbit``, ``1epoch``, ``500steps``, ``30s``, ``accuracy>=0.9``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["Cadence", "Target", "parse_bandwidth"]

_BANDWIDTH_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_bandwidth(text: str) -> float:
    """Return bits per second for ``100mbit``, ``1.5gbit``, ``800kbit`` (decimal prefixes, as `tc` and link speeds use them).

    Raises ValueError with what is allowed.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(k|m|g)?bit", text.strip().lower())
    if not match or float(match[1]) <= 0:
        raise ValueError("a positive number with kbit, mbit or gbit, such as 100mbit")
    return float(match[1]) * _BANDWIDTH_UNITS[f"{match[2] or ''}bit"]


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often something happens: every `amount` epochs, steps or seconds; ``end`` means once, after the last step."""

    amount: float
    unit: Literal["epochs", "steps", "seconds", "end"]

    @classmethod
    def parse(cls, text: str) -> Cadence:
        """Read ``1epoch``, ``2epochs``, ``500steps``, ``30s`` or ``end``. Raises ValueError with what is allowed."""
        allowed = "an interval such as 1epoch, 500steps or 30s, or end"
        text = text.strip().lower()
        if text == "end":
            return cls(0, "end")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(epochs?|steps?|s|seconds?)", text)
        if not match or float(match[1]) <= 0:
            raise ValueError(allowed)
        unit: Literal["epochs", "steps", "seconds"] = "seconds"
        if match[2].startswith("epoch"):
            unit = "epochs"
        elif match[2].startswith("step"):
            unit = "steps"
        amount = float(match[1])
        if unit != "seconds" and amount != int(amount):
            raise ValueError(f"a whole number of {unit}, or {allowed}")
        return cls(amount, unit)


@dataclass(frozen=True, slots=True)
class Target:
    """A goal on an evaluation figure, such as ``accuracy>=0.9`` or ``loss<=0.3``."""

    metric: str
    comparison: Literal[">=", "<="]
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``METRIC>=NUMBER`` or ``METRIC<=NUMBER``. Raises ValueError with what is allowed."""
        match = re.fullmatch(r"\s*([a-z_]\w*)\s*(>=|<=)\s*([-+]?\d*\.?\d+(?:e[-+]?\d+)?)\s*", text, re.IGNORECASE)
        if not match:
            raise ValueError("METRIC>=NUMBER or METRIC<=NUMBER, such as accuracy>=0.9 or loss<=0.3")
        comparison: Literal[">=", "<="] = ">=" if match[2] == ">=" else "<="
        return cls(match[1].lower(), comparison, float(match[3]))

    def reached(self, value: float) -> bool:
        """Return whether `value` meets the goal (a NaN never does)."""
        return value >= self.value if self.comparison == ">=" else value <= self.value
