"""A hand-written TensorFlow loop for the Transformer, fused: a `tf.function`, traced once for all lengths, runs many steps in a `tf.range`.

The sentences lie in memory as padded rows; a step gathers its own and cuts them to the longest. Weights are [in, out]. With bf16, products
are computed from bfloat16 copies; everything else, weights and updates stay float32.
Shapes: x_btd [batch, time, width]; of attention's heads x_bhte; logits_nv [positions, pieces].
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf
from translation_batches import indices_of_updates
from workload import Timer, Workload, read_workload

from crosstrain.data.text import BEGIN
from crosstrain.models.layers.position_codes import position_codes

EPSILON = 1e-6
STEPS_PER_CALL = 20


class Translator:
    """The model: its weights, and a forward pass."""

    def __init__(self, work: Workload) -> None:
        self._settings = work.spec.settings
        self._low = tf.bfloat16 if work.precision == "bf16" else tf.float32
        turned = {name: values.T if values.ndim == 2 and name != "embedding.weight" else values for name, values in work.initial.items()}
        self.weights = {name: tf.Variable(np.ascontiguousarray(values)) for name, values in turned.items()}
        longest = max(work.data.column("train", name).lengths.max() for name in ("source", "target"))
        self._codes = tf.constant(position_codes(int(longest), self._settings.width))

    def _product(self, x_btd: tf.Tensor, name: str) -> tf.Tensor:
        weight = tf.cast(self.weights[f"{name}.weight"], self._low)
        shape = tf.shape(x_btd)
        y = tf.reshape(tf.cast(x_btd, self._low), [-1, weight.shape[0]]) @ weight
        if f"{name}.bias" in self.weights:
            y = tf.nn.bias_add(y, tf.cast(self.weights[f"{name}.bias"], self._low))
        return tf.reshape(y, [shape[0], shape[1], weight.shape[1]])

    def _norm(self, x_btd: tf.Tensor, name: str) -> tf.Tensor:
        centred = x_btd - tf.reduce_mean(x_btd, 2, keepdims=True)
        scaled = centred * tf.math.rsqrt(tf.reduce_mean(tf.square(centred), 2, keepdims=True) + EPSILON)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _dropped(self, x: tf.Tensor, rate: float) -> tf.Tensor:
        return tf.nn.dropout(x, rate) if rate else x

    def _embedded(self, tokens_bt: tf.Tensor) -> tf.Tensor:
        width = self._settings.width
        inside_bt1 = tf.cast(tokens_bt != 0, tf.float32)[..., None] * math.sqrt(width)
        x_btd = tf.gather(self.weights["embedding.weight"], tokens_bt) * inside_bt1 + self._codes[: tf.shape(tokens_bt)[1]]
        return self._dropped(x_btd, self._settings.dropout_embedding)

    def _heads(self, x_btd: tf.Tensor, parts: int) -> list[tf.Tensor]:
        shape, count = tf.shape(x_btd), self._settings.heads
        split = tf.reshape(x_btd, [shape[0], shape[1], parts, count, self._settings.width // count])
        found: list[tf.Tensor] = tf.unstack(tf.transpose(split, [2, 0, 3, 1, 4]), num=parts)
        return found

    def _attended(self, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, bias: tf.Tensor, name: str) -> tf.Tensor:
        width = self._settings.width
        scale = tf.cast((width // self._settings.heads) ** -0.5, query.dtype)
        scores = tf.cast(tf.matmul(query * scale, key, transpose_b=True), tf.float32) + bias
        shares = self._dropped(tf.nn.softmax(scores), self._settings.dropout_attention)
        mixed = tf.transpose(tf.matmul(tf.cast(shares, self._low), value), [0, 2, 1, 3])
        shape = tf.shape(mixed)
        added = tf.cast(self._product(tf.reshape(mixed, [shape[0], shape[1], width]), f"{name}.output"), tf.float32)
        return self._dropped(added, self._settings.dropout_residual)

    def _self_attention(self, x_btd: tf.Tensor, bias: tf.Tensor, name: str) -> tf.Tensor:
        query, key, value = self._heads(self._product(self._norm(x_btd, f"{name}_norm"), f"{name}.query_key_value"), 3)
        return x_btd + self._attended(query, key, value, bias, name)

    def _cross_attention(self, x_btd: tf.Tensor, memory: tf.Tensor, bias: tf.Tensor, name: str) -> tf.Tensor:
        (query,) = self._heads(self._product(self._norm(x_btd, f"{name}_norm"), f"{name}.query"), 1)
        key, value = self._heads(self._product(memory, f"{name}.key_value"), 2)
        return x_btd + self._attended(query, key, value, bias, name)

    def _feed_forward(self, x_btd: tf.Tensor, name: str) -> tf.Tensor:
        inner = self._dropped(tf.nn.relu(self._product(self._norm(x_btd, f"{name}_norm"), f"{name}.inner")), self._settings.dropout_relu)
        return x_btd + self._dropped(tf.cast(self._product(inner, f"{name}.output"), tf.float32), self._settings.dropout_residual)

    def logits(self, source_bs: tf.Tensor, decoder_bt: tf.Tensor) -> tf.Tensor:
        """Return logits_nv."""
        padding = tf.where(source_bs != 0, 0.0, -1e9)[:, None, None, :]
        places = tf.range(tf.shape(decoder_bt)[1])
        later = tf.where(places <= places[:, None], 0.0, -1e9)
        memory, x_btd = self._embedded(source_bs), self._embedded(decoder_bt)
        for number in range(self._settings.layers):
            memory = self._self_attention(memory, padding, f"encoder.{number}.self_attention")
            memory = self._feed_forward(memory, f"encoder.{number}.feed_forward")
        memory = self._norm(memory, "encoder.norm")
        for number in range(self._settings.layers):
            x_btd = self._self_attention(x_btd, later, f"decoder.{number}.self_attention")
            x_btd = self._cross_attention(x_btd, memory, padding, f"decoder.{number}.cross_attention")
            x_btd = self._feed_forward(x_btd, f"decoder.{number}.feed_forward")
        x_nd = tf.reshape(self._norm(x_btd, "decoder.norm"), [-1, self._settings.width])
        table = tf.cast(self.weights["embedding.weight"], self._low)
        return tf.cast(tf.matmul(tf.cast(x_nd, self._low), table, transpose_b=True), tf.float32)

    def loss(self, source_bs: tf.Tensor, target_bt: tf.Tensor) -> tf.Tensor:
        """Return the mean over the target's tokens, with smoothed labels."""
        decoder_bt = tf.pad(target_bt, [[0, 0], [1, 0]], constant_values=BEGIN)[:, :-1]
        logits, target, smoothing = self.logits(source_bs, decoder_bt), tf.reshape(target_bt, [-1]), self._settings.smoothing
        pieces = logits.shape[1]
        labels = tf.one_hot(target, pieces, on_value=1.0 - smoothing + smoothing / pieces, off_value=smoothing / pieces)
        inside = tf.cast(target != 0, tf.float32)
        return tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(labels, logits) * inside) / tf.reduce_sum(inside)


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.random.set_seed(work.seed)  # dropout
    columns = [work.data.column("train", name) for name in ("source", "target")]
    source, target = (tf.constant(column.padded().astype(np.int32)) for column in columns)
    updates = indices_of_updates(work)
    longest = np.array([[column.lengths[indices].max() for column in columns] for indices in updates], dtype=np.int32)
    model = Translator(work)
    weights = list(model.weights.values())
    slots = [(tf.Variable(tf.zeros_like(weight)), tf.Variable(tf.zeros_like(weight))) for weight in weights]
    done = tf.Variable(0.0)
    vector, matrix = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, 2], tf.int32)

    @tf.function(input_signature=[vector, vector, matrix])
    def train(indices: tf.Tensor, offsets: tf.Tensor, longest_k2: tf.Tensor) -> tf.Tensor:
        count = tf.shape(longest_k2)[0]
        losses = tf.TensorArray(tf.float32, size=count)
        for step in tf.range(count):
            batch = indices[offsets[step] : offsets[step + 1]]
            source_bs = tf.gather(source, batch)[:, : longest_k2[step, 0]]
            target_bt = tf.gather(target, batch)[:, : longest_k2[step, 1]]
            with tf.GradientTape() as tape:
                loss = model.loss(source_bs, target_bt)
            done.assign_add(1.0)
            powers = {"beta1_power": 0.9**done, "beta2_power": work.beta2**done}
            for weight, (first, second), gradient in zip(weights, slots, tape.gradient(loss, weights), strict=True):
                tf.raw_ops.ResourceApplyAdam(
                    var=weight.handle,
                    m=first.handle,
                    v=second.handle,
                    lr=work.learning_rate,
                    beta1=0.9,
                    beta2=work.beta2,
                    epsilon=work.epsilon,
                    grad=tf.convert_to_tensor(gradient),
                    **powers,
                )
            losses = losses.write(step, loss)
        return losses.stack()

    losses = []

    def run(begin: int, end: int) -> None:
        for first in range(begin, end, STEPS_PER_CALL):
            part = updates[first : min(first + STEPS_PER_CALL, end)]
            offsets = np.cumsum([0, *map(len, part)]).astype(np.int32)
            losses.append(train(np.concatenate(part), offsets, longest[first : first + len(part)]).numpy())

    run(0, 1)
    timer.first_step()
    run(1, work.warmup)
    timer.begin()
    run(work.warmup, work.updates)
    timer.end()
    timer.report(work, np.concatenate(losses))


main()
