"""How far off is a prediction? What the model's predictions were judged on, and the band that follows from it.

``validation.toml`` is written by ``python -m benchmarks.prediction``: measured runs, none of them among those fitted.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["VALIDATION_FILE", "Point", "Validation", "ValidationGroup", "band_factor", "read_validation"]

VALIDATION_FILE = Path(__file__).with_name("validation.toml")

COVERED = 0.9
"""The band covers this share of the points that were judged (nearest rank)."""


@dataclass(frozen=True, slots=True)
class Point:
    """A run that was predicted from others: examples per second, of all workers together."""

    nodes: int
    bandwidth_bits_per_second: float
    batch_size: int
    measured_examples_per_second: float
    predicted_examples_per_second: float

    @property
    def error(self) -> float:
        """How far the prediction is from what was measured, as a fraction of that; 0 or more."""
        return abs(self.predicted_examples_per_second / self.measured_examples_per_second - 1)

    @property
    def factor(self) -> float:
        """The larger of predicted and measured over the smaller."""
        return math.exp(abs(math.log(self.predicted_examples_per_second / self.measured_examples_per_second)))


@dataclass(frozen=True, slots=True)
class ValidationGroup:
    """Predictions for one backend and mode, by a model fitted to `fitted_on` (runs in words)."""

    backend: str
    mode: str
    workload: str
    fitted_on: tuple[str, ...]
    points: tuple[Point, ...]

    @property
    def median_error(self) -> float:
        """The median of the points' errors, a fraction."""
        return median(point.error for point in self.points)

    @property
    def largest_error(self) -> float:
        """The largest of them."""
        return max(point.error for point in self.points)

    @property
    def factor(self) -> float:
        """A factor, at least 1, within which `COVERED` of the points lie."""
        factors = sorted(point.factor for point in self.points)
        return factors[math.ceil(COVERED * len(factors)) - 1]


@dataclass(frozen=True, slots=True)
class Validation:
    """All that was judged, and when and where."""

    measured_on: str
    machine: str
    judged: tuple[ValidationGroup, ...]

    def of(self, backend: str, mode: str, runs: int) -> ValidationGroup | None:
        """Return what was judged for the backend, the mode and the number of runs fitted; None where nothing was."""
        found = [judged for judged in self.judged if (judged.backend, judged.mode, len(judged.fitted_on)) == (backend, mode, runs)]
        return found[0] if found else None


def read_validation(path: Path = VALIDATION_FILE) -> Validation:
    """Read the table."""
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    return Validation(values["measured_on"], values["machine"], tuple(_judged(group) for group in values["judged"]))


def _judged(group: Mapping[str, Any]) -> ValidationGroup:
    points = tuple(Point(**point) for point in group["points"])
    return ValidationGroup(group["backend"], group["mode"], group["workload"], tuple(group["fitted_on"]), points)


def band_factor(judged: ValidationGroup, nodes: int, bits_per_second: float | None) -> tuple[float, float]:
    """Return (factor, doublings): measured times are expected between predicted ÷ factor and × factor.

    Within the nodes and bandwidths that were judged it is the factor of the points there. Each doubling beyond them, of nodes and of
    bandwidth in either direction, multiplies by it once more: a rule of caution, not a measurement.
    """
    doublings = max(0.0, math.log2(nodes / max(point.nodes for point in judged.points)))
    if bits_per_second is not None and nodes > 1:
        bandwidths: Sequence[float] = [point.bandwidth_bits_per_second for point in judged.points]
        doublings += max(0.0, math.log2(bits_per_second / max(bandwidths)), math.log2(min(bandwidths) / bits_per_second))
    return judged.factor ** (1 + doublings), doublings
