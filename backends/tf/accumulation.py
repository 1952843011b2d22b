"""An update's gradient from micro-batches, computed one after another, in ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

__all__ = ["accumulated"]

Compute = Callable[..., Sequence[tf.Tensor]]
"""From the first example of a micro-batch, the one behind its last, its number, int32, and the sums so far to what is added to them."""


def accumulated(compute: Compute, size: tf.Tensor, most: int, zeros: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the sums of what `compute` gives of each of at most `most` micro-batches of a batch of `size` examples.

    They are those of `Batches.in_micro_batches`: k = min(most, size), at least 1, which begin at ⌊size·j / k⌋. `zeros` have the shapes of
    the sums. Beside these there is what one micro-batch gives, and no more.
    """
    count = tf.minimum(most, tf.maximum(size, 1))

    def border(number: tf.Tensor) -> tf.Tensor:
        whole = tf.cast(size, tf.int64) * tf.cast(number, tf.int64)
        return tf.cast(whole // tf.cast(count, tf.int64), tf.int32)

    def body(number: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
        found = compute(border(number), border(number + 1), number, *sums)
        return number + 1, *(total + one for total, one in zip(sums, found, strict=True))

    _, *sums = tf.while_loop(lambda number, *_: number < count, body, (tf.constant(0), *zeros), parallel_iterations=1)
    return list(sums)
