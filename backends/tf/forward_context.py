"""The context of each forward pass: the model's buffers, and dropout that depends on nothing but the step it is drawn for.

No random state is kept from step to step, so that a resumed run draws what an uninterrupted one would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...core.job import Job
from ...models.base import ForwardContext, ModelSpec
from ...models.dropout_masks import drawn_rate, keep_mask_of_shape, refused_dropout
from ..tensor_functions import TensorFunctions
from .precision import low_format

__all__ = ["TENSORS", "Buffers", "Context", "Dropout", "ForwardContexts", "dropped"]

Buffers = Mapping[str, tf.Tensor]
Context = ForwardContext[tf.Tensor]

TENSORS = TensorFunctions(
    lambda array: tf.constant(array.astype(np.int32) if np.issubdtype(array.dtype, np.integer) else array),
    lambda tensor: tensor.numpy(),
)
"""Tensors as forward functions are given them, and back."""


FIRST_STEP_OF_NO_RUN = 1 << 40
"""Sets the draws of an update's micro-batches apart from each other, and from those of any update."""


class ForwardContexts:
    """Makes the contexts of one worker. `rank` sets its draws apart from those of others at the same step."""

    def __init__(self, job: Job, spec: ModelSpec, rank: int) -> None:
        self._seed, self._rank, self._shared_masks = job.seed, rank, job.deterministic
        self._low = low_format(job.precision)
        self._name, self._settings = spec.name, spec.settings
        self.dropout = spec.dropout

    def evaluation(self, buffers: Buffers) -> Context:
        """Return the context of a pass that does not train."""
        return ForwardContext(training=False, buffers=buffers, compute=self._low, settings=self._settings)

    def training(self, buffers: Buffers, step: tf.Tensor | None, indices: tf.Tensor, micro_batch: tf.Tensor | None = None) -> Context:
        """Return the context of update `step` (int64 scalar; None is enough for a model without dropout) on the examples at `indices`.

        `micro_batch` int32 is their number among the micro-batches of the update, which each draw for themselves; None where it has one.
        """
        context: Context = ForwardContext(training=True, buffers=buffers, compute=self._low, settings=self._settings)
        context.dropout = self._dropout(step, indices, micro_batch) if self.dropout else refused_dropout(self._name)
        return context

    def _dropout(self, step: tf.Tensor, indices: tf.Tensor, micro_batch: tf.Tensor | None) -> Dropout:
        """Return the function of a context, in ops."""
        if micro_batch is not None and not self._shared_masks:
            step = step + tf.cast(micro_batch, tf.int64) * FIRST_STEP_OF_NO_RUN
        return Dropout(partial(self._shared_mask if self._shared_masks else self._drawn_mask, step, indices))

    def _drawn_mask(
        self, step: tf.Tensor, indices: tf.Tensor, static: tf.TensorShape, shape: tf.Tensor, rate: float, layer: int
    ) -> tf.Tensor:
        """Draw by TensorFlow's Philox, with (seed, rank, layer) and the step as its key."""
        mixed = np.random.SeedSequence([self._seed, self._rank, layer]).generate_state(1, np.uint64).view(np.int64)
        key = tf.stack([tf.constant(mixed[0]), step])
        if static.rank == 2:
            return tf.random.stateless_uniform(shape, key, alg="philox") >= rate
        return _half_words(key, shape, rate)

    def _shared_mask(
        self, step: tf.Tensor, indices: tf.Tensor, static: tf.TensorShape, shape: tf.Tensor, rate: float, layer: int
    ) -> tf.Tensor:
        """Take the masks that are the same for every backend and number of workers."""

        def mask(step: np.int64, indices: NDArray[np.int32], shape: NDArray[np.int32]) -> NDArray[np.bool_]:
            return keep_mask_of_shape(self._seed, int(step), layer, indices, shape.tolist(), rate)

        return tf.ensure_shape(tf.numpy_function(mask, [step, indices, shape], tf.bool), static)


class Dropout:
    """Drops in the pass of one update. `mask` returns what is kept, in ops, from a static and a dynamic shape, a rate and a layer."""

    def __init__(self, mask: Callable[[tf.TensorShape, tf.Tensor, float, int], tf.Tensor]) -> None:
        self._mask = mask

    def __call__(self, x: tf.Tensor, rate: float, layer: int) -> tf.Tensor:
        """Return x with elements zeroed and the others scaled; see `ForwardContext`."""
        return dropped(x, self.kept(x.shape, tf.shape(x), rate, layer), rate)

    def kept(self, static: tf.TensorShape, shape: tf.Tensor, rate: float, layer: int) -> tf.Tensor:
        """Return what is kept of a tensor of a shape, boolean."""
        return self._mask(static, shape, drawn_rate(rate), layer)


def dropped(x: tf.Tensor, kept: tf.Tensor, rate: float) -> tf.Tensor:
    """Return x with what is not kept zeroed, and the rest divided by 1 − `rate`."""
    return tf.where(kept, x * tf.cast(1.0 / (1.0 - drawn_rate(rate)), x.dtype), tf.zeros([], x.dtype))


def _half_words(key: tf.Tensor, shape: tf.Tensor, rate: float) -> tf.Tensor:
    """Return what is kept, boolean: an element for each half word of Philox, to 1 in 2¹⁷ of `rate`; half the time of a number each."""
    size = tf.reduce_prod(shape)
    drawn = tf.random.stateless_uniform([(size + 3) // 4], key, minval=None, maxval=None, dtype=tf.uint64, alg="philox")
    halves = tf.reshape(tf.bitcast(drawn, tf.uint16), [-1])[:size]
    return tf.reshape(halves >= tf.constant(round(rate * 2**16), tf.uint16), shape)
