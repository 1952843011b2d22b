"""What rounding may change of a tape's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .graph import NodeOnTape

Array = NDArray[Any]
UNIT = 2.0**-24  # rounding of float32, relative
MOVES = 3  # passes from changed last bits
SIZE = "size of "


def sizes_of(exact: Mapping[str, Array], moved: Sequence[Mapping[str, Array]], nodes: Sequence[NodeOnTape]) -> dict[str, Array]:
    """Return the magnitude of each result, as ``PLACE/size of RESULT``.

    Rounding changes a few `UNIT` of it. It is the root of the mean square of a result or, where terms cancel, about the sum of their
    absolute values: changed last bits of the inputs, `moved`, show the root of the sum of their squares, and a result has as many terms
    as there are inputs for it.
    """
    elements = {node.place: node.elements for node in nodes}
    sizes: dict[str, Array] = {}
    for name in moved[0]:
        if name in exact and exact[name].size:
            place, _, tensor = name.partition("/")
            finite = np.isfinite(exact[name])
            if not finite.any():
                continue
            value = exact[name][finite]
            spread = np.mean([np.mean(np.square(result[name][finite] - value)) for result in moved]) / UNIT**2
            terms = max(elements[place] / exact[name].size, 1.0)
            sizes[f"{place}/{SIZE}{tensor}"] = np.sqrt(max(float(spread) * terms, float(np.mean(np.square(value)))))
    return sizes
