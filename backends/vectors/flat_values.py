"""A model's parameters and buffers as one flat vector, and by name on the same memory."""

from __future__ import annotations

import numpy as np

from ...models.base import Array, ModelSpec
from .state_memory import cut

__all__ = ["FlatValues"]


class FlatValues:
    """`vector` float32 has the parameters in the order of the spec, then the buffers; `parameters` and `buffers` are views of it."""

    def __init__(self, spec: ModelSpec, vector: Array | None = None) -> None:
        """Take a vector [parameters + buffers], or memory of zeros."""
        self.vector: Array = np.zeros(spec.size + spec.buffers_size, np.float32) if vector is None else vector
        self.trained, self.tail = self.vector[: spec.size], self.vector[spec.size :]
        self.parameters, self.buffers = cut(self.trained, spec.parameters), cut(self.tail, spec.buffers)

    def set_initial(self, spec: ModelSpec, seed: int) -> None:
        """Write the model's initial values."""
        for views, values in ((self.parameters, spec.initial(seed)), (self.buffers, spec.initial_buffers())):
            for name, view in views.items():
                np.copyto(view, values[name])
