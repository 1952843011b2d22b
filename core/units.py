"""Quantities as users type them: ``100mbit``, ``500steps``, ``30s``, ``accuracy>=0.9``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

MAX_AMOUNT = 1_000_000_000  # of updates, examples, seconds …: a product of two fits 64 bits
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
_BANDWIDTH_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_MAX_BITS_PER_SECOND = 1e15  # a thousand times the fastest link


def decimal_number(text: str) -> float:
    """Return the number of a decimal text. Raises ValueError, also for ``0_1``, unlike `float`."""
    number = float(text) if _NUMBER.fullmatch(text := text.strip()) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is no decimal number")
    return number


def parse_bandwidth(text: str) -> float:
    """Return bits per second for ``100mbit`` or ``1.5gbit`` (decimal). Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(k|m|g)?bit", text.strip().lower(), re.ASCII)
    if not match or float(match[1]) <= 0:
        raise ValueError("a positive number with kbit, mbit or gbit, such as 100mbit")
    bits_per_second = float(match[1]) * _BANDWIDTH_UNITS[f"{match[2] or ''}bit"]
    if bits_per_second > _MAX_BITS_PER_SECOND:
        raise ValueError(f"at most {_MAX_BITS_PER_SECOND / 1e9:.0f}gbit")
    return bits_per_second


def bandwidth_text(bits_per_second: float) -> str:
    """Return a link's speed as typed, in the largest exact unit: ``1kbit``, ``1.5gbit``."""
    for unit, size in sorted(_BANDWIDTH_UNITS.items(), key=lambda item: -item[1]):
        amount = bits_per_second / size
        if amount >= 1 and float(repr(amount)) * size == bits_per_second:
            return f"{Decimal(repr(amount)).normalize():f}{unit}"
    return f"{Decimal(repr(bits_per_second)).normalize():f}bit"


@dataclass(frozen=True, slots=True)
class Cadence:
    """An interval between events, in epochs, steps or seconds; ``end``: after the last step."""

    amount: float
    unit: Literal["epochs", "steps", "seconds", "end"]

    @classmethod
    def parse(cls, text: str) -> Cadence:
        """Read ``1epoch``, ``500steps``, ``30s`` or ``end``. Raises ValueError with what is allowed."""
        allowed = "an interval such as 1epoch, 500steps or 30s, or end"
        text = text.strip().lower()
        if text == "end":
            return cls(0, "end")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(epochs?|steps?|s|seconds?)", text, re.ASCII)
        if not match or float(match[1]) <= 0:
            raise ValueError(allowed)
        unit: Literal["epochs", "steps", "seconds"]
        unit = "epochs" if match[2].startswith("epoch") else "steps" if match[2].startswith("step") else "seconds"
        amount = float(match[1])
        if amount > MAX_AMOUNT:
            raise ValueError(f"{allowed}; of at most {MAX_AMOUNT} {unit}")
        if unit != "seconds" and amount != int(amount):
            raise ValueError(f"a whole number of {unit}, or {allowed}")
        return cls(amount, unit)


@dataclass(frozen=True, slots=True)
class Target:
    """A target of an evaluation metric, such as ``accuracy>=0.9`` or ``loss<=0.3``."""

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
        """The target as it is typed."""
        return f"{self.metric}{self.comparison}{self.value:g}"

    def reached(self, value: float) -> bool:
        """Return whether `value` reaches the target (a NaN never does)."""
        return value >= self.value if self.comparison == ">=" else value <= self.value
