"""Logistic regression on TensorFlow.

Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes].
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from ..base import ForwardContext


def forward(parameters: Mapping[str, tf.Tensor], x_bchw: tf.Tensor, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
    """Return logits_bk; the weight keeps its canonical layout [out, in]."""
    weight_ki, bias_k = parameters["dense.weight"], parameters["dense.bias"]
    x_bi = tf.reshape(x_bchw, [-1, weight_ki.shape[1]])
    if context.compute is not None:
        x_bi, weight_ki, bias_k = (tf.cast(value, context.compute) for value in (x_bi, weight_ki, bias_k))
    return tf.cast(tf.nn.bias_add(tf.linalg.matmul(x_bi, weight_ki, transpose_b=True), bias_k), tf.float32)
