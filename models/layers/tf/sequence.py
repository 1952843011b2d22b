"""The layers of sequences on TensorFlow; what each computes, `sequence_protocol` says.

Only widths have to be known when the function is traced: batch and time may have any size, so that one trace serves all lengths. Products
take inputs and weights in `context.compute`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import tensorflow as tf

from ....data.text import PADDING
from ...base import ForwardContext
from ..masks import refuse_mask
from ..position_codes import frequencies

__all__ = ["SequenceLayers"]

EPSILON = 1e-6
"""Added to the variance of layer normalisation."""

OUT_OF_REACH = -1e9
"""Added to the score of a key that is not attended to: its share is 0 in float32."""


class SequenceLayers:
    """The layers of one forward pass; each takes the name under which its parameters are found."""

    def __init__(self, parameters: Mapping[str, tf.Tensor], context: ForwardContext[tf.Tensor]) -> None:
        self._parameters = parameters
        self._context = context

    def embedding(self, tokens_bt: tf.Tensor, name: str) -> tf.Tensor:
        """Return x_btd."""
        weight_vd = self._parameters[f"{name}.weight"]
        scale_bt1 = tf.cast(tokens_bt != PADDING, tf.float32)[..., None] * math.sqrt(weight_vd.shape[1])
        return tf.gather(weight_vd, tokens_bt) * scale_bt1

    def positions(self, x_btd: tf.Tensor, start: tf.Tensor | int = 0) -> tf.Tensor:
        """Add the code of each position, counted from `start`; angles are float64, as those of other frameworks."""
        places = tf.cast(tf.range(tf.shape(x_btd)[1]) + start, tf.float64)
        angles = places[:, None] * frequencies(x_btd.shape[2])
        return tf.cast(x_btd, tf.float32) + tf.cast(tf.concat([tf.sin(angles), tf.cos(angles)], axis=1), tf.float32)

    def shifted(self, tokens_bt: tf.Tensor, first: int) -> tf.Tensor:
        """Return the tokens moved a place to the right."""
        return tf.pad(tokens_bt, [[0, 0], [1, 0]], constant_values=first)[:, : tf.shape(tokens_bt)[1]]

    def attended(self, lengths_b: tf.Tensor, tokens_bt: tf.Tensor) -> tf.Tensor:
        """Return the mask, boolean [batch, 1, 1, time]."""
        return (tf.range(tf.shape(tokens_bt)[1]) < lengths_b[:, None])[:, None, None, :]

    def layer_norm(self, x_btd: tf.Tensor, name: str) -> tf.Tensor:
        """Normalise each position, float32."""
        x_btd = tf.cast(x_btd, tf.float32)
        mean_bt1 = tf.reduce_mean(x_btd, axis=2, keepdims=True)
        centred_btd = x_btd - mean_bt1
        scale_bt1 = tf.math.rsqrt(tf.reduce_mean(tf.square(centred_btd), axis=2, keepdims=True) + EPSILON)
        return centred_btd * scale_bt1 * self._parameters[f"{name}.weight"] + self._parameters[f"{name}.bias"]

    def linear(self, x_btd: tf.Tensor, name: str, *, low: bool = False) -> tf.Tensor:
        """Multiply by the weight."""
        y_bto = self._product(x_btd, name)
        return y_bto if low else tf.cast(y_bto, tf.float32)

    def dense(self, x_btd: tf.Tensor, name: str) -> tf.Tensor:
        """Multiply by the weight and add the bias, float32."""
        return tf.cast(self._product(x_btd, name, biased=True), tf.float32)

    def dense_relu(self, x_btd: tf.Tensor, name: str, *, low: bool = False) -> tf.Tensor:
        """Return max(0, dense)."""
        y_bto = tf.nn.relu(self._product(x_btd, name, biased=True))
        return y_bto if low else tf.cast(y_bto, tf.float32)

    def heads(self, x_btd: tf.Tensor, parts: int, count: int) -> tuple[tf.Tensor, ...]:
        """Return so many x_bhte."""
        batch, time = tf.shape(x_btd)[0], tf.shape(x_btd)[1]
        split = tf.reshape(x_btd, [batch, time, parts, count, x_btd.shape[2] // (parts * count)])
        return tuple(tf.unstack(tf.transpose(split, [2, 0, 3, 1, 4]), num=parts))

    def attention(
        self,
        query_bhqe: tf.Tensor,
        key_bhke: tf.Tensor,
        value_bhke: tf.Tensor,
        mask: tf.Tensor | None,
        rate: float,
        layer: int,
        *,
        causal: bool = False,
        low: bool = False,
    ) -> tf.Tensor:
        """Attend, and put the heads side by side: [batch, query, width]."""
        query_bhqe, key_bhke, value_bhke = self._low(query_bhqe), self._low(key_bhke), self._low(value_bhke)
        _, count, _, width = query_bhqe.shape
        scores_bhqk = tf.cast(tf.matmul(query_bhqe * tf.cast(width**-0.5, query_bhqe.dtype), key_bhke, transpose_b=True), tf.float32)
        if mask is not None:
            refuse_mask(mask.dtype.name, layer)
        if causal:
            earlier_qk = tf.range(tf.shape(key_bhke)[2]) <= tf.range(tf.shape(query_bhqe)[2])[:, None]
            mask = earlier_qk if mask is None else mask & earlier_qk
        if mask is not None:
            scores_bhqk += tf.where(mask, 0.0, OUT_OF_REACH)
        shares_bhqk = tf.nn.softmax(scores_bhqk)
        if rate:
            shares_bhqk = self._context.dropout(shares_bhqk, rate, layer)
        mixed_bhqe = tf.matmul(self._low(shares_bhqk), value_bhke)
        shape = tf.shape(mixed_bhqe)
        mixed_bqd = tf.reshape(tf.transpose(mixed_bhqe, [0, 2, 1, 3]), [shape[0], shape[2], count * width])
        return mixed_bqd if low else tf.cast(mixed_bqd, tf.float32)

    def appended(self, before: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
        """Return one time after the other."""
        return tf.concat([before, new], axis=2)

    def dropout(self, x_btd: tf.Tensor, rate: float, layer: int) -> tf.Tensor:
        """Drop at random while training."""
        return self._context.dropout(x_btd, rate, layer) if rate else x_btd

    def logits(self, x_btd: tf.Tensor, name: str) -> tf.Tensor:
        """Return logits_btv, float32."""
        return self.linear(x_btd, name)

    def _product(self, x_btd: tf.Tensor, name: str, *, biased: bool = False) -> tf.Tensor:
        """Multiply by a weight [out, in], in the number format of products. As a matrix: a product of three dimensions is slower."""
        weight_oi = self._low(self._parameters[f"{name}.weight"])
        outputs, inputs = weight_oi.shape
        y_no = tf.linalg.matmul(tf.reshape(self._low(x_btd), [-1, inputs]), weight_oi, transpose_b=True)
        if biased:
            y_no = tf.nn.bias_add(y_no, self._low(self._parameters[f"{name}.bias"]))
        return tf.reshape(y_no, tf.concat([tf.shape(x_btd)[:2], [outputs]], axis=0))

    def _low(self, x: tf.Tensor) -> tf.Tensor:
        """Return x in the number format of products."""
        return x if self._context.compute is None else tf.cast(x, self._context.compute)
