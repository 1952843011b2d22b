"""Gradients of both sides, compared by sums over their elements.

Of large models, copies in float64 would fill the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rounding import UNIT
from .updates import BLOCK, PARAMETER, Rule, State, gradient_of

Array = NDArray[Any]
MAX_LEFT = 1e-3  # of squared differences that a multiple of something explains
MIN_SHARE_OF_DECAY = 1e-3  # of the largest difference, below which a parameter does not count


@dataclass(frozen=True)
class Sums:
    """Sums of products of A's gradients, B's, their difference B − A, and the weights."""

    count: int = 0
    first: float = 0.0  # of squares, as are the following three
    second: float = 0.0
    apart: float = 0.0
    weights: float = 0.0
    apart_by_first: float = 0.0
    apart_by_weights: float = 0.0

    @property
    def relative(self) -> float:
        """‖B − A‖ / ‖A‖."""
        return math.sqrt(self.apart / max(self.first, 1e-300))

    @property
    def scale(self) -> float | None:
        """The factor of A's gradients that B has, if that explains their difference."""
        factor = self.apart_by_first / max(self.first, 1e-300)
        return 1.0 + factor if self.apart - factor * self.apart_by_first <= MAX_LEFT * self.apart else None

    @property
    def share_of_weights(self) -> tuple[float, float, float]:
        """The multiple of the weights by which gradients differ, what it leaves, its deviation.

        What it leaves is a sum of squares; the deviation is a standard one.
        """
        if not self.weights:
            return 0.0, 0.0, 0.0
        factor = self.apart_by_weights / self.weights
        left = max(self.apart - factor * self.apart_by_weights, 0.0)
        return factor, left, math.sqrt(left / max(self.count - 1, 1) / self.weights)


def total(parts: Iterable[Sums]) -> Sums:
    """Return the sums over several parameters."""
    rows = [astuple(part) for part in parts]
    return Sums(*map(sum, zip(*rows, strict=True))) if rows else Sums()


def compared(state: State, measured: Sequence[Mapping[str, Array]], rules: Sequence[Rule | None] = (None, None)) -> dict[str, Sums]:
    """Return the sums of each parameter's gradients by both rules, or of what was measured."""
    return {name: _sums(state, name, (measured[0][name], measured[1][name]), rules) for name in measured[0]}


def _sums(state: State, name: str, values: tuple[Array, Array], rules: Sequence[Rule | None]) -> Sums:
    weights, flat = state[PARAMETER + name].reshape(-1), [value.reshape(-1) for value in values]
    sums = np.zeros(6)
    for part in blocks(weights.size):
        weight = weights[part].astype(np.float64)
        first, second = (
            array[part].astype(np.float64) if rule is None else gradient_of(rule, name, weight, array[part])
            for rule, array in zip(rules, flat, strict=True)
        )
        apart = second - first
        sums += [first @ first, second @ second, apart @ apart, weight @ weight, apart @ first, apart @ weight]
    return Sums(weights.size, *sums.tolist())


def extra_decay(sums: Mapping[str, Sums]) -> float | None:
    """Return the multiple of the weights by which gradients differ, if that explains it all."""
    largest = max(math.sqrt(part.apart) for part in sums.values())
    differing = total(part for part in sums.values() if math.sqrt(part.apart) > MIN_SHARE_OF_DECAY * largest)
    factor, left, _ = differing.share_of_weights
    return factor if factor and left <= MAX_LEFT * differing.apart else None


def relative_of_all(first: Mapping[str, Array], second: Mapping[str, Array]) -> float:
    """Return ‖first − second‖ / ‖second‖ of all arrays together."""
    difference = norm = 0.0
    for name, value in second.items():
        one_side, exact_side = first[name].reshape(-1), value.reshape(-1)
        for part in blocks(value.size):
            exact = exact_side[part].astype(np.float64)
            apart = one_side[part] - exact
            difference, norm = difference + float(apart @ apart), norm + float(exact @ exact)
    return math.sqrt(difference / max(norm, 1e-300))


def with_changed_bits(state: State, seed: int | tuple[int, int], units: float) -> dict[str, Array]:
    """Return a state whose weights are moved up or down by so many units of 2⁻²⁴ at random."""
    draw = np.random.default_rng(seed)
    factors = 1.0 + units * UNIT * np.array([-1.0, 1.0])
    return {name: _moved(value, draw, factors) if name.startswith(PARAMETER) else value for name, value in state.items()}


def _moved(value: Array, draw: np.random.Generator, factors: Array) -> Array:
    signs = draw.integers(0, 2, value.size, np.int8)
    moved, flat = np.empty(value.size, np.float32), value.reshape(-1)
    for part in blocks(value.size):
        moved[part] = flat[part] * factors[signs[part]]
    return moved.reshape(value.shape)


def blocks(size: int) -> Iterator[slice]:
    """Yield slices that fit a processor's cache."""
    return (slice(start, start + BLOCK) for start in range(0, size, BLOCK))
