"""A job's update rule on a flat vector in numpy, for backends that bring none of their own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...core.job import Job
from ...core.update_rules import EMA
from ...exchange.parameter_server.shards import Vector
from .update_formulas import UpdateFormulas

__all__ = ["VectorRule", "reset_slots"]

BLOCK_ELEMENTS = 2**16
"""Elements updated at once: what the formulas compute on their way stays in a second-level cache."""


class VectorRule:
    """The rule with the vector's memory; an `UpdateRule` of the parameter server, and of `backends.arrays`."""

    def __init__(self, job: Job, parameters: Vector) -> None:
        self.updates = 0
        self._formulas, self._parameters = UpdateFormulas(job), parameters
        self.slots: Mapping[str, Vector] = {name: np.zeros_like(parameters) for name in self._formulas.slots}
        reset_slots(self.slots, parameters)

    def step(self, gradient: Vector, lr: float) -> None:
        """Apply one update, and count it; the gradient is left as it is."""
        self.updates += 1
        factors = self._formulas.factors(lr, self.updates)
        for start in range(0, len(self._parameters), BLOCK_ELEMENTS):
            part = slice(start, start + BLOCK_ELEMENTS)
            slots = {name: vector[part] for name, vector in self.slots.items()}
            weights, found = self._formulas.updated(np, self._parameters[part], gradient[part], slots, factors)
            np.copyto(self._parameters[part], weights)
            for name, vector in slots.items():
                np.copyto(vector, found[name])


def reset_slots(slots: Mapping[str, Vector], parameters: Vector) -> None:
    """Give the slots the values that they have before the first update."""
    for name, vector in slots.items():
        np.copyto(vector, parameters if name == EMA else 0.0)
