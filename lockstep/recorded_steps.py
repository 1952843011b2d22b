"""How far apart two recordings' changes of weights are, block by block of large tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .recorded import Recorded, blocks, matches
from .rounding import UNIT

Array = NDArray[Any]
Blocks = Callable[[], Iterator[tuple[Array, Array]]]


@dataclass(frozen=True)
class Fit:
    """The norm of values, the norm of their difference to others, and a factor that explains it."""

    distance: float
    norm: float
    factor: float | None

    @property
    def relative(self) -> float:
        """The difference, relative to the norm."""
        return self.distance / max(self.norm, 1e-300) if self.distance else 0.0


NOTHING = Fit(math.inf, 1.0, None)


def fit(first: Recorded, second: Recorded) -> Fit:
    """Return how two tensors fit in the best order of axes."""
    return min((_fit(_of_arrays(a, b)) for _, a, b in matches(first, second)), key=lambda mine: mine.distance, default=NOTHING)


def fit_of_steps(before: tuple[Recorded, Recorded], after: tuple[Recorded, Recorded]) -> Fit:
    """Return how the changes of a weight fit on two sides, in the best order of axes."""
    both = zip(matches(*before), matches(*after), strict=False)
    steps = (_fit(_of_steps((a, b), (x, y))) for (_, a, b), (_, x, y) in both if a.shape == x.shape)
    return min(steps, key=lambda mine: mine.distance, default=NOTHING)


def _of_arrays(a: Array, b: Array) -> Blocks:
    return lambda: ((x, y) for x, y in blocks(a, b))


def _of_steps(before: tuple[Array, Array], after: tuple[Array, Array]) -> Blocks:
    return lambda: ((x - a, y - b) for a, b, x, y in blocks(*before, *after))


def _fit(read: Blocks) -> Fit:
    square = product = apart = 0.0
    for a, b in read():
        square += float(a @ a)
        product += float(a @ b)
        apart += float(np.square(a - b).sum())
    factor = product / square if square else 0.0
    left = math.sqrt(sum(float(np.square(b - factor * a).sum()) for a, b in read())) if apart else 0.0
    apart, norm = math.sqrt(apart) if not math.isnan(apart) else math.inf, math.sqrt(square)
    return Fit(apart, norm, factor if left <= 1e-3 * apart else None)


def rounding_of(weight: Recorded, norm: float) -> float:
    """Return what rounding of a weight in float32 adds to its step, relative to the step."""
    return 8 * UNIT * weight.line.norm / max(norm, 1e-300)


def farthest(ways: Sequence[tuple[Recorded, Fit]], limit: float, limit_of_weight: float, updates: int) -> Recorded | None:
    """Return the weight whose way over some updates differs most, None if rounding explains all."""
    rounding = 8 * UNIT * updates
    off = [(mine, way) for mine, way in ways if way.distance > limit_of_weight * way.norm + rounding * mine.line.norm]
    distance, norm, size = (
        math.sqrt(sum(number**2 for number in numbers))
        for numbers in ([way.distance for _, way in ways], [way.norm for _, way in ways], [mine.line.norm for mine, _ in ways])
    )
    if not off and distance <= limit * norm + rounding * size:
        return None
    return max(off or ways, key=lambda entry: entry[1].relative)[0]
