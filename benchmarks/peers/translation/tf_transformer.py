"""A hand-written fused TensorFlow loop for the Transformer: many steps in a `tf.range`.

One `tf.function` with one trace for all lengths. The padded sentences stay in memory; the loop gathers a batch and cuts it to its longest
sentence. In bf16 only products have inputs and weights in it, and everything else stays float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from text_batches import BEGIN, indices_of, positions
from workload import Timer, Workload, read_workload

STEPS_PER_CALL = 10
EPSILON = 1e-6


class Model:
    """The forward pass, on variables in the order in which it needs them."""

    def __init__(self, work: Workload) -> None:
        self.own, self.low = work.spec.settings, tf.bfloat16 if work.precision == "bf16" else tf.float32
        self.variables = [tf.Variable(values.T if _turned(name) else values) for name, values in work.initial.items()]
        self.positions = tf.constant(positions(work))
        self._left: Iterator[tf.Variable] = iter(())

    def logits(self, source: tf.Tensor, lengths: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
        """Return the logits of each position of the target."""
        self._left = iter(self.variables)
        embedding = next(self._left)
        mask = tf.where(tf.sequence_mask(lengths, tf.shape(source)[1])[:, None, None, :], 0.0, -1e9)
        memory = self._stack(self._embedded(embedding, source), mask, None)
        shifted = tf.pad(target, [[0, 0], [1, 0]], constant_values=BEGIN)[:, :-1]
        places = tf.range(tf.shape(target)[1])
        causal = tf.where(places <= places[:, None], 0.0, -1e9)
        decoded = self._stack(self._embedded(embedding, shifted), causal, (memory, mask))
        return tf.cast(self._product(decoded, embedding, turned=True), tf.float32)

    def _embedded(self, embedding: tf.Variable, tokens: tf.Tensor) -> tf.Tensor:
        x = tf.gather(embedding, tokens) * math.sqrt(self.own.width)
        return _dropped(x + self.positions[: tf.shape(tokens)[1]], self.own.dropout_embedding)

    def _stack(self, x: tf.Tensor, mask: tf.Tensor, crossed: tuple[tf.Tensor, tf.Tensor] | None) -> tf.Tensor:
        """Run the layers of the encoder, or of the decoder where there is what it is `crossed` with."""
        for _ in range(self.own.layers):
            query, key, value = self._heads(self._product(self._norm(x), next(self._left)), 3)
            x += _dropped(self._attention(query, key, value, mask), self.own.dropout_residual)
            if crossed is not None:
                memory, inside = crossed
                (query,) = self._heads(self._product(self._norm(x), next(self._left)), 1)
                key, value = self._heads(self._product(memory, next(self._left)), 2)
                x += _dropped(self._attention(query, key, value, inside), self.own.dropout_residual)
            inner = tf.nn.relu(self._dense(self._norm(x)))
            x += _dropped(tf.cast(self._dense(_dropped(inner, self.own.dropout_relu)), tf.float32), self.own.dropout_residual)
        return self._norm(x)

    def _norm(self, x: tf.Tensor) -> tf.Tensor:
        centred = x - tf.reduce_mean(x, axis=2, keepdims=True)
        scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centred), axis=2, keepdims=True) + EPSILON)
        weight, bias = next(self._left), next(self._left)
        return centred * scale * weight + bias

    def _product(self, x: tf.Tensor, weight: tf.Variable, *, turned: bool = False) -> tf.Tensor:
        """Multiply as matrices, in the format of products."""
        inputs, outputs = reversed(weight.shape) if turned else weight.shape
        rows = tf.reshape(tf.cast(x, self.low), [-1, inputs])
        product = tf.matmul(rows, tf.cast(weight, self.low), transpose_b=turned)
        return tf.reshape(product, [tf.shape(x)[0], tf.shape(x)[1], outputs])

    def _dense(self, x: tf.Tensor) -> tf.Tensor:
        product = self._product(x, next(self._left))
        return tf.nn.bias_add(product, tf.cast(next(self._left), self.low))

    def _heads(self, x: tf.Tensor, parts: int) -> list[tf.Tensor]:
        batch, time = tf.shape(x)[0], tf.shape(x)[1]
        split = tf.reshape(x, [batch, time, parts, self.own.heads, self.own.width // self.own.heads])
        return tf.unstack(tf.transpose(split, [2, 0, 3, 1, 4]), num=parts)

    def _attention(self, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        scale = tf.cast(math.sqrt(self.own.heads / self.own.width), query.dtype)
        scores = tf.cast(tf.matmul(query * scale, key, transpose_b=True), tf.float32) + mask
        shares = _dropped(tf.nn.softmax(scores), self.own.dropout_attention)
        mixed = tf.transpose(tf.matmul(tf.cast(shares, self.low), value), [0, 2, 1, 3])
        together = tf.reshape(mixed, [tf.shape(mixed)[0], tf.shape(mixed)[1], self.own.width])
        return tf.cast(self._product(together, next(self._left)), tf.float32)


def _turned(name: str) -> bool:
    """Whether a weight is held [in, out], as TensorFlow's layers hold it."""
    return name.endswith((".query_key_value.weight", ".query.weight", ".key_value.weight", ".output.weight", ".inner.weight"))


def _dropped(x: tf.Tensor, rate: float) -> tf.Tensor:
    return tf.nn.dropout(x, rate) if rate else x


def adam_rates(work: Workload) -> np.ndarray:
    """Return the learning rate and ε of each update for TensorFlow's Adam op.

    float32 [updates, 2].
    """
    update = np.arange(1, work.updates + 1, dtype=np.float64)
    root = np.sqrt(1.0 - work.beta2**update)
    return np.stack([work.learning_rate * root / (1.0 - 0.9**update), work.epsilon * root], axis=1).astype(np.float32)


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.random.set_seed(work.seed)
    model = Model(work)
    columns = {name: work.data.column("train", name) for name in ("source", "target")}
    tokens = {name: tf.constant(column.padded().astype(np.int32)) for name, column in columns.items()}
    lengths = {name: tf.constant(column.lengths.astype(np.int32)) for name, column in columns.items()}
    moments = [(tf.Variable(tf.zeros(variable.shape)), tf.Variable(tf.zeros(variable.shape))) for variable in model.variables]
    pieces, smoothing = work.spec.logits_per_position, work.spec.settings.smoothing

    def batch_of(name: str, chosen: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        lengths_of_batch = tf.gather(lengths[name], chosen)
        return tf.gather(tokens[name], chosen)[:, : tf.reduce_max(lengths_of_batch)], lengths_of_batch

    def mean_loss(chosen: tf.Tensor) -> tf.Tensor:
        source, source_lengths = batch_of("source", chosen)
        target, target_lengths = batch_of("target", chosen)
        logits = model.logits(source, source_lengths, target)
        labels = tf.one_hot(target, pieces, on_value=1.0 - smoothing + smoothing / pieces, off_value=smoothing / pieces)
        losses = tf.nn.softmax_cross_entropy_with_logits(labels, logits)
        inside = tf.sequence_mask(target_lengths, tf.shape(target)[1])
        return tf.reduce_sum(tf.where(inside, losses, 0.0)) / tf.cast(tf.reduce_sum(target_lengths), tf.float32)

    signature = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, 2], tf.float32)]

    @tf.function(input_signature=signature)
    def train(examples: tf.Tensor, offsets: tf.Tensor, rates: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, size=tf.shape(rates)[0])
        for step in tf.range(tf.shape(rates)[0]):
            with tf.GradientTape() as tape:
                loss = mean_loss(examples[offsets[step] : offsets[step + 1]])
            gradients = tape.gradient(loss, model.variables)
            for variable, (first, second), gradient in zip(model.variables, moments, gradients, strict=True):
                tf.raw_ops.ResourceApplyAdam(
                    var=variable.handle,
                    m=first.handle,
                    v=second.handle,
                    beta1_power=0.0,
                    beta2_power=0.0,
                    lr=rates[step, 0],
                    beta1=0.9,
                    beta2=work.beta2,
                    epsilon=rates[step, 1],
                    grad=tf.convert_to_tensor(gradient),
                )
            losses = losses.write(step, loss)
        return losses.stack()

    indices, rates, losses = indices_of(work), adam_rates(work), []

    def run(begin: int, end: int) -> None:
        for first in range(begin, end, STEPS_PER_CALL):
            last = min(first + STEPS_PER_CALL, end)
            offsets = np.cumsum([0, *(len(chosen) for chosen in indices[first:last])], dtype=np.int32)
            losses.append(train(np.concatenate(indices[first:last]), offsets, rates[first:last]).numpy())

    run(0, work.warmup)
    timer.begin()
    run(work.warmup, work.updates)
    timer.end()
    counted = sum(int(columns["target"].lengths[chosen].sum()) for chosen in indices[work.warmup :])
    timer.report_text(work, counted, np.concatenate(losses))


main()
