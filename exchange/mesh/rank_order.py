"""The one order of summation: rank after rank, element by element, so that equal inputs give equal sums to the bit on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["add_in_rank_order"]


def add_in_rank_order(parts: Sequence[NDArray[Any]], into: NDArray[Any]) -> None:
    """Write ((parts[0] + parts[1]) + parts[2]) + … into `into`, which may be one of the parts.

    All have the same shape and type. The first part is overwritten, unless it is the only one.
    """
    total, *others = parts
    if not others:
        if total is not into:
            np.copyto(into, total)
        return
    for part in others[:-1]:
        np.add(total, part, out=total)
    np.add(total, others[-1], out=into)
