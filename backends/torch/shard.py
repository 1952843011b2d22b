"""A shard of the flat parameter vector: the values, the rule's slots, and the version, changed together under one lock."""

from __future__ import annotations

import threading

import numpy as np
import torch

from ...core.job import Job
from ...models.base import Array
from .optimizers import make_rule, slot_names

__all__ = ["Shard", "bytes_of"]


class Shard:
    """Values [elements] float32 with their rule. The version is the number of updates applied (Adam's t)."""

    def __init__(self, values: Array, job: Job) -> None:
        self._values = torch.from_numpy(np.array(values, dtype=np.float32))
        self._rule = make_rule(job, [self._values])
        self._slots = slot_names(job)
        self._lock = threading.Lock()

    @property
    def elements(self) -> int:
        """Number of parameters in the shard."""
        return int(self._values.numel())

    @property
    def state_elements(self) -> int:
        """Number of elements of `export`'s vector."""
        return self.elements * (1 + len(self._slots))

    @property
    def version(self) -> int:
        """Number of updates applied."""
        return self._rule.updates

    def update(self, gradient: torch.Tensor, lr: float, read: int, out: torch.Tensor) -> tuple[int, int]:
        """Apply one update and copy the new values to `out`, all in one critical section.

        `read` is the version that the gradient was computed from. Returns (staleness, new version): staleness is the number of updates
        applied between that version and this update. The gradient is overwritten.
        """
        with self._lock:
            staleness = self._rule.updates - read
            self._rule.step([gradient], lr)
            out.copy_(self._values)
            return staleness, self._rule.updates

    def read(self, out: torch.Tensor) -> int:
        """Copy the values to `out` and return their version."""
        with self._lock:
            out.copy_(self._values)
            return self._rule.updates

    def export(self) -> tuple[Array, int]:
        """Return (values, then each slot, as one vector [state_elements]; version), as a copy."""
        with self._lock:
            flat: Array = torch.cat([self._values] + [self._rule.slots[slot][0] for slot in self._slots]).numpy()
            return flat, self._rule.updates

    def replace(self, flat: Array, version: int) -> None:
        """Take over what `export` gave."""
        pieces = np.split(flat, 1 + len(self._slots))
        with self._lock:
            for tensor, piece in zip([self._values] + [self._rule.slots[slot][0] for slot in self._slots], pieces, strict=True):
                tensor.copy_(torch.from_numpy(piece))
            self._rule.updates = version


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's memory as bytes, shared."""
    return memoryview(tensor.numpy()).cast("B")
