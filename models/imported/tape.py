"""What rounding may change of a tape's results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .graph import NodeOnTape

Array = NDArray[Any]
UNIT = 2.0**-24  # rounding of float32, relative
MOVES = 3  # passes from changed last bits
SIZE = "size of "
GRADIENT, MIN_SHARE = f"/{SIZE}gradient of ", 2.0**-4  # of the largest in its layer


def sizes_of(exact: Mapping[str, Array], moved: Iterable[Mapping[str, Array]], nodes: Sequence[NodeOnTape]) -> dict[str, Array]:
    """Return the magnitude of each result, as ``PLACE/size of RESULT``.

    Rounding changes a few `UNIT` of it. It is the root of the mean square of a result or, where terms cancel, about the sum of their
    absolute values: changed last bits of the inputs, `moved`, show the root of the sum of their squares, and a result has as many terms
    as there are inputs for it.
    """
    elements = {node.place: node.elements for node in nodes}
    spreads: dict[str, list[float]] = {}
    for results in moved:  # one at a time, as they are as large as the tape
        for name, result in results.items():
            if name in exact and (finite := np.isfinite(exact[name])).any():
                spreads.setdefault(name, []).append(float(np.mean(np.square(result[finite] - exact[name][finite]))))
    sizes: dict[str, Array] = {}
    for name, squares in spreads.items():
        place, _, tensor = name.partition("/")
        value = exact[name][np.isfinite(exact[name])]
        known = [square for square in squares if np.isfinite(square)]
        terms = max(elements[place] / exact[name].size, 1.0)
        spread = sum(known) / len(known) / UNIT**2 if known else 0.0
        sizes[f"{place}/{SIZE}{tensor}"] = np.sqrt(max(spread * terms, float(np.mean(np.square(value)))))
    largest: dict[str, float] = {}
    for name, size in sizes.items():
        if GRADIENT in name:
            place = name.partition("/")[0]
            largest[place] = max(largest.get(place, 0.0), float(size))
    for name in sizes:
        if GRADIENT in name:  # such as a bias's that cancels within its layer, as that of attention's keys does
            sizes[name] = np.maximum(sizes[name], MIN_SHARE * largest[name.partition("/")[0]])
    return sizes
