"""Many steps in one function that XLA compiles, their loop included: of one process, and of a model whose ops are small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ....data.sampler import Batches
from ....models.base import Array

__all__ = ["CompiledLoop"]

MOST_INDICES = 1 << 22
"""Of all batches of a call together: 16 MiB."""

Traced = Callable[..., tf.Tensor]

Step = Callable[..., tf.Tensor]
"""Makes an update in ops: from its examples' indices, int32 [size], and its scalars to the sum of the examples' losses."""


class CompiledLoop:
    """Carries out steps on batches of `size` examples, up to `most_steps` in a call.

    XLA compiles for one shape, so that a call is always as long, and ends early: what is compiled does not depend on how many steps a call
    has, nor do a step's results.
    """

    def __init__(self, function: Traced, size: int, capacity: int) -> None:
        self._function, self._size, self._capacity = function, size, capacity

    @classmethod
    def of(cls, step: Step, compiled: Callable[..., Traced | None], size: int, scalars: int, most_steps: int) -> CompiledLoop | None:
        """Return a loop of such steps, of which each has so many scalars; None where `compiled`, which hands them to XLA, cannot."""
        if not size:
            return None
        capacity = max(1, min(most_steps, MOST_INDICES // size))
        indices, rows, count = tf.TensorSpec([capacity, size], tf.int32), tf.TensorSpec([capacity, scalars]), tf.TensorSpec([], tf.int32)
        function = compiled(partial(_steps, step, capacity), indices, tf.TensorSpec([capacity]), rows, count)
        return None if function is None else cls(function, size, capacity)

    def parts(self, batches: Batches) -> Iterator[tuple[int, int, bool]]:
        """Cut consecutive batches into parts: the first's number, how many, and whether they are for this loop."""
        first = 0
        for fits, sizes in groupby((np.diff(batches.offsets) == self._size).tolist()):
            stop = first + len(list(sizes))
            while first < stop:
                count = min(self._capacity, stop - first) if fits else stop - first
                yield first, count, fits
                first += count

    def __call__(self, batches: Batches, scalars_ks: NDArray[np.float32]) -> Array:
        """Make a part's steps, and return their losses, float32 [k]; row i of `scalars_ks` is for step i."""
        count = len(batches)
        indices_kb = batches.indices[batches.offsets[0] : batches.offsets[-1]].reshape(count, self._size)
        given = (self._filled(array) for array in (indices_kb, batches.weights.astype(np.float32), scalars_ks))
        losses: Array = self._function(*given, tf.constant(count)).numpy()
        return losses[:count]

    def _filled(self, rows: Array | NDArray[np.int32]) -> tf.Tensor:
        """Return the rows as a tensor of as many as XLA compiled for, the rest of them ones."""
        filled = np.ones((self._capacity, *rows.shape[1:]), rows.dtype)
        filled[: len(rows)] = rows
        return tf.constant(filled)


def _steps(step: Step, capacity: int, indices_kb: tf.Tensor, weights_k: tf.Tensor, scalars_ks: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """In ops: carry out `count` steps; return their losses, and whatever for the others, float32 [capacity]."""

    def body(number: tf.Tensor, loss_sums: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        loss_sum = step(tf.gather(indices_kb, number), *tf.unstack(tf.gather(scalars_ks, number)))
        return number + 1, loss_sums.write(number, loss_sum)

    loss_sums = tf.TensorArray(tf.float32, size=capacity, element_shape=[])
    _, loss_sums = tf.while_loop(lambda number, _: number < count, body, (tf.constant(0), loss_sums))
    return loss_sums.stack() / weights_k
