"""The Transformer on TensorFlow.

Shapes: logits_btv [batch, target time, pieces]; targets_bt [batch, time].
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from ...data.columns import LENGTHS
from ..base import ForwardContext
from ..layers.tf import SequenceLayers
from . import TARGET, empty_cache, forward_functions

__all__ = ["decode_step", "empty_cache", "encode", "example_sums", "forward", "translation_loss"]
Tensors = Mapping[str, tf.Tensor]
Context = ForwardContext[tf.Tensor]
forward, encode, decode_step = forward_functions(SequenceLayers)


def translation_loss(logits_btv: tf.Tensor, targets: Tensors, context: Context) -> tf.Tensor:
    """Return Σ over the target's tokens of −log softmax, with smoothed labels: [batch]."""
    pieces, smoothing = logits_btv.shape[2], context.settings.smoothing
    # A matrix of labels takes one pass over memory; the kernel then computes loss and gradient together.
    labels_btv = tf.one_hot(targets[TARGET], pieces, on_value=1.0 - smoothing + smoothing / pieces, off_value=smoothing / pieces)
    losses_bt = tf.nn.softmax_cross_entropy_with_logits(labels_btv, logits_btv)
    return tf.reduce_sum(tf.where(_inside(targets), losses_bt, 0.0), axis=1)


def example_sums(logits_btv: tf.Tensor, targets: Tensors, context: Context) -> dict[str, tf.Tensor]:
    """Return each example's part of the sums except the loss: [batch] each."""
    inside_bt, tokens_bt = _inside(targets), targets[TARGET]
    losses_bt = tf.nn.sparse_softmax_cross_entropy_with_logits(tokens_bt, logits_btv)
    right_bt = (tf.argmax(logits_btv, axis=2, output_type=tf.int32) == tokens_bt) & inside_bt
    return {
        "nll_sum": tf.reduce_sum(tf.where(inside_bt, losses_bt, 0.0), axis=1),
        "correct_tokens": tf.reduce_sum(tf.cast(right_bt, tf.int32), axis=1),
    }


def _inside(targets: Tensors) -> tf.Tensor:
    """Return the mask of the targets without padding, boolean [batch, time]."""
    return tf.sequence_mask(targets[TARGET + LENGTHS], tf.shape(targets[TARGET])[1])
