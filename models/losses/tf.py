"""Standard losses on TensorFlow, and what evaluations count besides.

Shapes: outputs [batch, classes] or [batch, …] like the target; y_b labels [batch].
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ...metrics.counts import BINS, ERROR_SUMS, LABEL_COUNTS, MAX_CLASSES, TOP
from ..objectives import CLASS_WEIGHTS, StandardLoss
from . import BINARY, MULTI_LABEL, SCORE_SCALE, TALLY


def weighted_cross_entropy(loss: StandardLoss, logits_bk: tf.Tensor, y_b: tf.Tensor, context: Any) -> tf.Tensor:
    """Return cross entropy with smoothed labels and weights of classes, by torch's formula."""
    share = loss.smoothing / loss.classes
    labels_bk = tf.one_hot(y_b, loss.classes, on_value=1.0 - loss.smoothing + share, off_value=share)
    if loss.class_weights:  # then labels do not sum to 1, as the gradient of TensorFlow's own cross entropy assumes
        labels_bk *= tf.constant(loss.class_weights, tf.float32)
    return -tf.reduce_sum(labels_bk * tf.nn.log_softmax(logits_bk), axis=1)


def binary_cross_entropy(loss: StandardLoss, logits: tf.Tensor, y_b: tf.Tensor, context: Any) -> tf.Tensor:
    """Return −log σ(logit) of class 1, −log(1 − σ(logit)) of class 0."""
    return tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(y_b, tf.float32), tf.reshape(logits, [-1]))


def multi_label(loss: StandardLoss, logits: tf.Tensor, y: tf.Tensor, context: Any) -> tf.Tensor:
    """Return the mean over classes of the binary cross entropy of each."""
    labels_bk = tf.one_hot(y, loss.classes) if loss.classes else tf.cast(_flat(loss, y), tf.float32)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels_bk, tf.reshape(logits, tf.shape(labels_bk))), axis=1)


def mse(loss: StandardLoss, outputs: tf.Tensor, target: tf.Tensor, context: Any) -> tf.Tensor:
    """Return the mean over outputs of (ŷ − y)²."""
    return tf.reduce_mean(tf.square(_flat(loss, outputs) - _flat(loss, target)), axis=1)


def mae(loss: StandardLoss, outputs: tf.Tensor, target: tf.Tensor, context: Any) -> tf.Tensor:
    """Return the mean over outputs of |ŷ − y|."""
    return tf.reduce_mean(tf.abs(_flat(loss, outputs) - _flat(loss, target)), axis=1)


def huber(loss: StandardLoss, outputs: tf.Tensor, target: tf.Tensor, context: Any) -> tf.Tensor:
    """Return the mean over outputs of e² / 2 for |e| ≤ δ, else δ (|e| − δ/2), of e = ŷ − y."""
    errors_bk = tf.abs(_flat(loss, outputs) - _flat(loss, target))
    near_bk = tf.minimum(errors_bk, loss.delta)
    return tf.reduce_mean(near_bk * near_bk / 2 + loss.delta * (errors_bk - near_bk), axis=1)


def _flat(loss: StandardLoss, x: tf.Tensor) -> tf.Tensor:
    """Return x as [batch, outputs]."""
    return tf.reshape(x, [-1, loss.outputs])


def example_sums(loss: StandardLoss, outputs: tf.Tensor, target: tf.Tensor, context: Any) -> dict[str, tf.Tensor]:
    """Return further parts of an objective's sums: [batch] each, and the tally's vector."""
    if loss.classes:
        return _of_labels(loss, outputs, target)
    counted = _of_label_sets if loss.name == MULTI_LABEL else _of_numbers
    return counted(_flat(loss, outputs), _flat(loss, target))


def _of_label_sets(logits_bk: tf.Tensor, target_bk: tf.Tensor) -> dict[str, tf.Tensor]:
    predicted_bk, actual_bk = logits_bk > 0, target_bk > 0
    right_bk = predicted_bk == actual_bk
    counted = (predicted_bk & actual_bk, predicted_bk, actual_bk, right_bk, tf.ones_like(right_bk))
    return {name: tf.math.count_nonzero(labels_bk, axis=1) for name, labels_bk in zip(LABEL_COUNTS, counted, strict=True)}


def _of_numbers(outputs_bk: tf.Tensor, target_bk: tf.Tensor) -> dict[str, tf.Tensor]:
    actual_bk = tf.cast(target_bk, tf.float64)
    errors_bk = tf.cast(outputs_bk, tf.float64) - actual_bk
    means = (tf.reduce_mean(tf.square(errors_bk), axis=1), tf.reduce_mean(tf.abs(errors_bk), axis=1))
    totals = [tf.reduce_sum(values_bk, axis=0) for values_bk in (tf.square(errors_bk), actual_bk, tf.square(actual_bk))]
    return {**dict(zip(ERROR_SUMS, means, strict=True)), TALLY: tf.concat(totals, axis=0)}


def _of_labels(loss: StandardLoss, outputs: tf.Tensor, y_b: tf.Tensor) -> dict[str, tf.Tensor]:
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
    """Return how many classes come before the right one; of equal logits the first leads."""
    right_b1 = tf.gather(logits_bk, y_b, batch_dims=1)[:, None]
    earlier_bk = tf.range(classes) < y_b[:, None]
    return tf.math.count_nonzero((logits_bk > right_b1) | ((logits_bk == right_b1) & earlier_bk), axis=1)


def _counts(numbers_n: tf.Tensor, size: int) -> tf.Tensor:
    """Return how often each number below `size` occurs, float64 [size].

    Sorting also works on GPUs with repeatable kernels, unlike tf.math.bincount.
    """
    bounds = tf.searchsorted(tf.sort(numbers_n), tf.range(size + 1))
    return tf.cast(bounds[1:] - bounds[:-1], tf.float64)
