"""Numbers, and quantities with units, as people type them: ``0.1``, ``100mbit``, ``1epoch``, ``500steps``, ``30s``, ``accuracy>=0.9``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

__all__ = ["MOST_AMOUNT", "Cadence", "Target", "bandwidth_text", "decimal_number", "parse_bandwidth"]

MOST_AMOUNT = 1_000_000_000
"""Of updates, epochs, examples of a batch, seconds between two events: the product of two of them is a 64-bit number still."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)

_BANDWIDTH_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_MOST_BITS_PER_SECOND = 1e15  # a thousand times the fastest link there is


def decimal_number(text: str) -> float:
    """Return the number that a text stands for: digits from 0 to 9, with a point, a sign or an exponent. Raises ValueError for any other.

    `float` would read 0_1 as 1, and the digits of every script.
    """
    number = float(text) if _NUMBER.fullmatch(text := text.strip()) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is no decimal number")
    return number


def parse_bandwidth(text: str) -> float:
    """Return bits per second for ``100mbit``, ``1.5gbit``, ``800kbit`` (decimal prefixes, as `tc` and link speeds use them).

    Raises ValueError with what is allowed.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(k|m|g)?bit", text.strip().lower(), re.ASCII)
    if not match or float(match[1]) <= 0:
        raise ValueError("a positive number with kbit, mbit or gbit, such as 100mbit")
    bits_per_second = float(match[1]) * _BANDWIDTH_UNITS[f"{match[2] or ''}bit"]
    if bits_per_second > _MOST_BITS_PER_SECOND:
        raise ValueError(f"at most {_MOST_BITS_PER_SECOND / 1e9:.0f}gbit")
    return bits_per_second


def bandwidth_text(bits_per_second: float) -> str:
    """Return a link's speed as it is typed, in the largest unit that there is one of and that says it exactly: ``1kbit``, ``1.5gbit``."""
    for unit, size in sorted(_BANDWIDTH_UNITS.items(), key=lambda item: -item[1]):
        amount = bits_per_second / size
        if amount >= 1 and float(repr(amount)) * size == bits_per_second:
            return f"{Decimal(repr(amount)).normalize():f}{unit}"
    return f"{Decimal(repr(bits_per_second)).normalize():f}bit"


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
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(epochs?|steps?|s|seconds?)", text, re.ASCII)
        if not match or float(match[1]) <= 0:
            raise ValueError(allowed)
        unit: Literal["epochs", "steps", "seconds"] = "seconds"
        if match[2].startswith("epoch"):
            unit = "epochs"
        elif match[2].startswith("step"):
            unit = "steps"
        amount = float(match[1])
        if amount > MOST_AMOUNT:
            raise ValueError(f"{allowed}; of at most {MOST_AMOUNT} {unit}")
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
        match = re.fullmatch(r"\s*([a-z_]\w*)\s*(>=|<=)\s*([-+]?\d*\.?\d+(?:e[-+]?\d+)?)\s*", text, re.ASCII | re.IGNORECASE)
        if not match:
            strict = re.fullmatch(r"\s*([a-z_]\w*)\s*([<>])\s*([-+.\de]+)\s*", text, re.ASCII | re.IGNORECASE)
            example = "accuracy>=0.9 or loss<=0.3" if strict is None else "{}{}={}".format(*strict.groups())
            raise ValueError(f"METRIC>=NUMBER or METRIC<=NUMBER, such as {example}")
        if not math.isfinite(float(match[3])):
            raise ValueError("a figure of a size that can be reached, such as loss<=0.3")
        comparison: Literal[">=", "<="] = ">=" if match[2] == ">=" else "<="
        return cls(match[1].lower(), comparison, float(match[3]))

    @property
    def text(self) -> str:
        """The goal as it is typed."""
        return f"{self.metric}{self.comparison}{self.value:g}"

    def reached(self, value: float) -> bool:
        """Return whether `value` meets the goal (a NaN never does)."""
        return value >= self.value if self.comparison == ">=" else value <= self.value
