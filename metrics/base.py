"""What a metric is: a function of sums over the examples of a split, and whether more of it is better.

An evaluation is a set of named float64 sums, to which each example contributes exactly once, whatever the number of workers. A metric
is computed from these sums alone, once, where they have been added up: so it does not depend on how the examples were shared out, which a
mean of the workers' means would.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["LOSS", "PERCENTAGES", "RESERVED_NAMES", "SHARES_OF_EXAMPLES", "Better", "Metric", "MetricInfo"]

Better = Literal["higher", "lower"]

MOST_SUMS, MOST_METRICS = 1000, 64
"""Of one model."""

PERCENTAGES = frozenset(("bleu", "chrf"))
"""Metrics from 0 to 100, of which people read two decimals."""

SHARES_OF_EXAMPLES = frozenset(("accuracy",))
"""Metrics that are the share of the examples whose class was guessed right: a single one has a standard error, √(p (1 − p) / n)."""

RESERVED_NAMES = frozenset(
    ("split", "step", "epoch", "time_seconds", "seconds", "examples", "loss", "updates_applied", "schema", "metrics")
)
"""Names that stand beside a metric's in the record of an evaluation, and mean something else there."""


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """What readers of a run need to know of a metric: `name` in files and options, `label` for people, and which way is `better`."""

    name: str
    label: str
    better: Better

    def improves(self, new: float, old: float | None) -> bool:
        """Return whether `new` is better than `old`. A NaN is never better, and anything else is better than a NaN or None."""
        if math.isnan(new):
            return False
        if old is None or math.isnan(old):
            return True
        return new > old if self.better == "higher" else new < old

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of some values, None where there is none but NaN."""
        best: float | None = None
        for value in values:
            if self.improves(value, best):
                best = value
        return best


@dataclass(frozen=True, slots=True)
class Metric(MetricInfo):
    """A metric of a model. `value` computes it from the named sums; `bounds` are its smallest and largest possible value, where it has any.

    Raises ValueError for a name that is no snake_case word or that means something else in the record of an evaluation, for a direction
    that is neither ``higher`` nor ``lower``, and for bounds that are not in order.
    """

    value: Callable[[Mapping[str, float]], float]
    bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", self.name) or self.name in RESERVED_NAMES:
            reserved = ", ".join(sorted(RESERVED_NAMES))
            raise ValueError(f"metric name: got {self.name!r}; allowed: a snake_case word of at most 64 characters, none of {reserved}")
        if self.better not in get_args(Better):
            raise ValueError(f"metric {self.name!r}: better is {self.better!r}; allowed: {', '.join(get_args(Better))}")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(
                f"metric {self.name!r}: its bounds are {self.bounds[0]:g} and {self.bounds[1]:g}; the first has to be the smaller"
            )

    @property
    def info(self) -> MetricInfo:
        """What is written down of it."""
        return MetricInfo(self.name, self.label, self.better)


LOSS = MetricInfo("loss", "loss", "lower")
"""The mean loss, which every model has beside its metrics."""
