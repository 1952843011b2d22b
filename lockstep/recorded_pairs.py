"""Which weights and gradients of two recordings belong together, by values, order and names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..recorder.recording import KERAS_ROLES, role
from .recorded import Recorded, difference, fits, in_another_order, is_near

SAME = 1e-3  # largest relative difference of weights that are the same ones
Pair = tuple[Recorded, Recorded]


def aligned_weights(first: Sequence[Recorded], second: Sequence[Recorded]) -> list[Pair]:
    """Return pairs of weights: of equal values, then those left by their order and shape."""
    partners: dict[int, Recorded] = {}
    left = list(second)
    for choose in (_equal, _next):
        for mine in first:
            if id(mine) not in partners and (place := choose(mine, left)) is not None:
                partners[id(mine)] = left.pop(place)
    return [(mine, partners[id(mine)]) for mine in first if id(mine) in partners]


def _equal(mine: Recorded, left: Sequence[Recorded]) -> int | None:
    """Return the place of the weight with equal values, if possible of the same role."""
    near = [(role(theirs.line.name) != role(mine.line.name), place) for place, theirs in enumerate(left) if is_near(mine, theirs, SAME)]
    best: tuple[float, bool, int] | None = None
    for is_another, place in sorted(near):
        apart = round(difference(mine, left[place]), 6)
        if apart < SAME and (best is None or (apart, is_another, place) < best):
            best = apart, is_another, place
        if best is not None and not best[0]:
            break  # no later place comes before
    if best is not None:
        return best[2]
    turned = [
        (role(theirs.line.name) != role(mine.line.name), place) for place, theirs in enumerate(left) if in_another_order(mine, theirs)
    ]
    return min(turned)[1] if turned else None


def _next(mine: Recorded, left: Sequence[Recorded]) -> int | None:
    """Return the place of the next weight of the same shape, if possible of the same role."""
    places = [(role(theirs.line.name) != role(mine.line.name), place) for place, theirs in enumerate(left) if fits(mine, theirs)]
    return min(places)[1] if places else None


def named_weights(tensors: Iterable[Recorded], weights: Sequence[str]) -> dict[str, Recorded]:
    """Return tensors by the names of weights that theirs stand for.

    A name without the first parts of a weight's, or with Keras's words, stands for it if only one fits.
    """
    plain = {name: _plain(name) for name in weights}
    known: dict[str, Recorded] = {}
    for mine in tensors:
        name, wanted = mine.line.name, _plain(mine.line.name)
        exact = [name] if name in plain else []
        same = exact or [weight for weight, text in plain.items() if text == wanted]
        ends = same or [weight for weight, text in plain.items() if text.endswith("." + wanted)]
        if len(ends) == 1:
            known.setdefault(ends[0], mine)
    return known


def _plain(name: str) -> str:
    parts = re.split(r"[./]", name)
    return ".".join([*parts[:-1], KERAS_ROLES.get(parts[-1], parts[-1])])
