"""ATen's loss functions on TensorFlow, for modules with a loss of their own.

https://docs.pytorch.org/docs/stable/nn.functional.html#loss-functions
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .operations import Pass, canonical, operation, promoted

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers of reductions


def _reduced(losses: tf.Tensor, reduction: int) -> tf.Tensor:
    return losses if reduction == NONE else tf.reduce_mean(losses) if reduction == MEAN else tf.reduce_sum(losses)


def _classes_last(x: tf.Tensor) -> tf.Tensor:
    """Move the classes of [classes] or [batch, classes, …] to the end."""
    return x if x.shape.rank < 3 else tf.transpose(x, [0, *range(2, x.shape.rank), 1])


def _of_labels(
    log_shares: tf.Tensor, labels: tf.Tensor, weight: tf.Tensor | None, reduction: int, ignored: int, smoothing: float
) -> tf.Tensor:
    """Return −log of the labels' shares [..., classes], without those that equal `ignored`."""
    kept = labels != tf.cast(ignored, labels.dtype)
    labels = tf.where(kept, labels, 0)
    weights = tf.cast(kept, log_shares.dtype) * (1.0 if weight is None else tf.gather(weight, labels))
    losses = -tf.gather(log_shares, labels, batch_dims=labels.shape.rank) * weights
    if smoothing:
        every = log_shares if weight is None else log_shares * weight
        uniform = -tf.reduce_mean(every, -1) * tf.cast(kept, log_shares.dtype)
        losses = (1.0 - smoothing) * losses + smoothing * uniform
    return tf.reduce_sum(losses) / tf.reduce_sum(weights) if reduction == MEAN else _reduced(losses, reduction)


@operation("aten.cross_entropy_loss.default")
def _cross_entropy(
    run: Pass,
    self: Any,
    target: Any,
    weight: tf.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tf.Tensor:
    """Compute it with `target` as labels, or as shares of the shape of `self`."""
    log_shares, wanted = tf.nn.log_softmax(_classes_last(canonical(self))), canonical(target)
    if not wanted.dtype.is_floating:
        return _of_labels(log_shares, wanted, weight, reduction, ignore_index, label_smoothing)
    shares = _classes_last(wanted) * (1.0 - label_smoothing) + label_smoothing / log_shares.shape[-1]
    return _reduced(-tf.reduce_sum(log_shares * shares * (1.0 if weight is None else weight), -1), reduction)


@operation("aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default")
def _nll(run: Pass, self: Any, target: Any, weight: tf.Tensor | None = None, reduction: int = MEAN, ignore_index: int = -100) -> tf.Tensor:
    return _of_labels(_classes_last(canonical(self)), canonical(target), weight, reduction, ignore_index, 0.0)


@operation("aten.mse_loss.default")
def _mse(run: Pass, self: Any, target: Any, reduction: int = MEAN) -> tf.Tensor:
    return _reduced(tf.math.squared_difference(*promoted(canonical(self), canonical(target))), reduction)


@operation("aten.l1_loss.default")
def _l1(run: Pass, self: Any, target: Any, reduction: int = MEAN) -> tf.Tensor:
    return _reduced(tf.abs(tf.subtract(*promoted(canonical(self), canonical(target)))), reduction)


@operation("aten.huber_loss.default", "aten.smooth_l1_loss.default")
def _huber(run: Pass, self: Any, target: Any, reduction: int = MEAN, delta: float = 1.0, beta: float | None = None) -> tf.Tensor:
    """Huber's loss: a square within ±δ; smooth L1 is the same over δ, called β, and L1 for 0."""
    distances = tf.abs(tf.subtract(*promoted(canonical(self), canonical(target))))
    if beta == 0:
        return _reduced(distances, reduction)
    width = delta if beta is None else beta
    losses = tf.where(distances < width, 0.5 * tf.square(distances), width * (distances - 0.5 * width))
    return _reduced(losses if beta is None else losses / width, reduction)


@operation("aten.binary_cross_entropy_with_logits.default")
def _binary_with_logits(
    run: Pass, self: Any, target: Any, weight: tf.Tensor | None = None, pos_weight: tf.Tensor | None = None, reduction: int = MEAN
) -> tf.Tensor:
    x, y = canonical(self), canonical(target)
    positive = tf.ones([], x.dtype) if pos_weight is None else pos_weight
    losses = tf.nn.weighted_cross_entropy_with_logits(tf.cast(y, x.dtype), x, positive)
    return _reduced(losses if weight is None else losses * weight, reduction)


@operation("aten.binary_cross_entropy.default")
def _binary(run: Pass, self: Any, target: Any, weight: tf.Tensor | None = None, reduction: int = MEAN) -> tf.Tensor:
    """Logarithms are at least −100, as in torch."""
    x, y = canonical(self), canonical(target)
    losses = -(y * tf.maximum(tf.math.log(x), -100.0) + (1.0 - y) * tf.maximum(tf.math.log1p(-x), -100.0))
    return _reduced(losses if weight is None else losses * weight, reduction)


@operation("aten.kl_div.default")
def _divergence(run: Pass, self: Any, target: Any, reduction: int = MEAN, log_target: bool = False) -> tf.Tensor:
    x, y = canonical(self), canonical(target)
    return _reduced(tf.exp(y) * (y - x) if log_target else tf.math.xlogy(y, y) - y * x, reduction)
