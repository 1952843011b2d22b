"""Standard losses on TensorFlow, and what evaluations count besides.

Shapes: outputs [batch, classes] or [batch, …] like the target; y_b labels [batch].
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ...metrics.counts import BINS, MAX_CLASSES, TOP
from ..objectives import CLASS_WEIGHTS, StandardLoss
from . import BINARY, SCORE_SCALE, TALLY


def weighted_cross_entropy(loss: StandardLoss, logits_bk: tf.Tensor, y_b: tf.Tensor, context: Any) -> tf.Tensor:
    """Return cross entropy with smoothed labels and weights of classes, by torch's formula."""
    other = loss.smoothing / loss.classes
    labels_bk = tf.one_hot(y_b, loss.classes, on_value=1.0 - loss.smoothing + other, off_value=other)
    if loss.class_weights:  # then labels do not sum to 1, as the gradient of TensorFlow's own cross entropy assumes
        labels_bk *= tf.constant(loss.class_weights, tf.float32)
    return -tf.reduce_sum(labels_bk * tf.nn.log_softmax(logits_bk), axis=1)


def binary_cross_entropy(loss: StandardLoss, logits: tf.Tensor, y_b: tf.Tensor, context: Any) -> tf.Tensor:
    """Return −log σ(logit) of class 1, −log(1 − σ(logit)) of class 0."""
    return tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(y_b, tf.float32), tf.reshape(logits, [-1]))


def multi_label(loss: StandardLoss, logits_bk: tf.Tensor, y_b: tf.Tensor, context: Any) -> tf.Tensor:
    """Return the mean over classes of the binary cross entropy of each."""
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.one_hot(y_b, loss.classes), logits_bk), axis=1)


def example_sums(loss: StandardLoss, outputs: tf.Tensor, y_b: tf.Tensor, context: Any) -> dict[str, tf.Tensor]:
    """Return the further parts of an objective's sums: [batch] each, and the vector of the tally."""
    margins_b = tf.reshape(outputs, [-1]) if loss.name == BINARY else None
    predicted_b = tf.argmax(outputs, axis=1, output_type=tf.int32) if margins_b is None else tf.cast(margins_b > 0, tf.int32)
    parts, tallies = {"correct": predicted_b == y_b}, []
    if loss.class_weights:
        parts[CLASS_WEIGHTS] = tf.gather(tf.constant(loss.class_weights, tf.float64), y_b)
    if loss.classes > TOP:
        parts["in_top"] = _ranks(outputs, y_b, loss.classes) < TOP
    if loss.classes <= MAX_CLASSES:
        unmatched = tf.where(predicted_b == y_b, y_b, 3 * loss.classes)
        tallies.append(_counts(tf.concat([unmatched, loss.classes + predicted_b, 2 * loss.classes + y_b], axis=0), 3 * loss.classes))
    if loss.classes == 2:
        margins_b = outputs[:, 1] - outputs[:, 0] if margins_b is None else margins_b
        places_b = margins_b / (SCORE_SCALE + tf.abs(margins_b))
        places_b = tf.where(tf.math.is_nan(places_b), 0.0, places_b)
        bins_b = tf.clip_by_value(tf.cast((places_b + 1.0) * (BINS / 2), tf.int32), 0, BINS - 1)
        tallies.append(_counts(y_b * BINS + bins_b, 2 * BINS))
    return {**parts, TALLY: tf.concat(tallies, axis=0)} if tallies else parts


def _ranks(logits_bk: tf.Tensor, y_b: tf.Tensor, classes: int) -> tf.Tensor:
    """Return the number of classes before the right one; of equal logits the first class leads, as for argmax."""
    right_b1 = tf.gather(logits_bk, y_b, batch_dims=1)[:, None]
    earlier_bk = tf.range(classes) < y_b[:, None]
    return tf.math.count_nonzero((logits_bk > right_b1) | ((logits_bk == right_b1) & earlier_bk), axis=1)


def _counts(numbers_n: tf.Tensor, size: int) -> tf.Tensor:
    """Return how often each number below `size` occurs, float64 [size].

    Sorting also works on GPUs with repeatable kernels, unlike tf.math.bincount.
    """
    bounds = tf.searchsorted(tf.sort(numbers_n), tf.range(size + 1))
    return tf.cast(bounds[1:] - bounds[:-1], tf.float64)
