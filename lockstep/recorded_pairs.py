"""Which weights and gradients of two recordings belong together, by values, order and names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from ..recorder.recording import BIAS_SUM, KERAS_ROLES, role
from .recorded import Recorded, Recording, difference, fits, in_another_order, is_near

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


def add_biases(first: Recording, second: Recording) -> None:
    """Add the two biases of a recurrent layer where the other recording has their sum alone.

    The gradient of the sum is either's.
    """
    for side, theirs in ((first, second), (second, first)):
        if any(role(mine.line.name).startswith(BIAS_SUM) for parts in theirs.updates.values() for mine in parts.get("before", [])):
            for parts in side.updates.values():
                for part in ("before", "after", "gradient"):
                    parts[part] = [
                        _summed(mine, parts[part], part) for mine in parts.get(part, []) if "bias_hh" not in role(mine.line.name)
                    ]


def _summed(mine: Recorded, tensors: Sequence[Recorded], part: str) -> Recorded:
    if "bias_ih" not in role(mine.line.name):
        return mine
    name = mine.line.name.replace("bias_ih", BIAS_SUM)
    partner = next((known for known in tensors if known.line.name == mine.line.name.replace("bias_ih", "bias_hh")), None)
    if part == "gradient" or partner is None or mine.array is None or partner.array is None:
        return Recorded(msgspec.structs.replace(mine.line, name=name), mine.array, mine.sketches, mine.rows)
    array = mine.array.astype(np.float64) + partner.array
    norm, mean = float(np.linalg.norm(array)), float(array.mean())
    line = msgspec.structs.replace(mine.line, name=name, norm=norm, mean=mean, least=float(array.min()), most=float(array.max()))
    return Recorded(line, array, (), None)
