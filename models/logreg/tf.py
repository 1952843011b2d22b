"""Logistic regression on TensorFlow. Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes]."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from ..base import ForwardContext

__all__ = ["forward"]


def forward(parameters: Mapping[str, tf.Tensor], x_bchw: tf.Tensor, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
    """Return logits_bk. The weight keeps its canonical layout [out, in]; the product transposes it on the fly."""
    weight_ki = parameters["dense.weight"]
    x_bi = tf.reshape(x_bchw, [-1, weight_ki.shape[1]])
    return tf.nn.bias_add(tf.linalg.matmul(x_bi, weight_ki, transpose_b=True), parameters["dense.bias"])
