"""The direct exchange by itself: a rank of exchange/mesh."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from place import Place, main

from crosstrain.exchange.mesh import Mesh


class MeshAdder:
    """Adds up a vector of zeros in place."""

    def __init__(self, place: Place) -> None:
        self._mesh = Mesh(place.task, 60.0, 10.0)
        self.barrier, self.close = self._mesh.barrier, self._mesh.close

    def prepare(self, elements: int) -> Callable[[int], None]:
        """Return what adds up so many elements."""
        vector = np.zeros(elements, np.float32)

        def run(iterations: int) -> None:
            for _ in range(iterations):
                self._mesh.all_reduce(vector)

        return run


main(MeshAdder)
