"""A hand-written TensorFlow loop for AlexNet: `tf.nn`, NHWC, one `tf.function` call a step.

Momentum is TensorFlow's own kernel. Pixels stay uint8 in memory and are normalised batch by batch, as for images that do not fit as
float32. With bf16, convolutions, products and what is between them use bfloat16 copies; weights, updates and the loss stay float32.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from workload import Timer, Workload, read_workload

CONVOLUTIONS = ((4, "VALID", True), (1, "SAME", True), (1, "SAME", False), (1, "SAME", False), (1, "SAME", True))
"""Stride, padding and following pool of each layer. The first one's input is padded beforehand: explicit paddings, which `conv2d` would
take, leave the fast kernels (measured: in bfloat16 more than ten times slower)."""


def initial_values(work: Workload) -> list[np.ndarray]:
    """Return the initial weights in TensorFlow's layouts.

    HWIO, [in, out], features in the order height, width, channel.
    """
    weights = [values.transpose(2, 3, 1, 0) if values.ndim == 4 else values.T for values in work.initial.values()]
    first_dense = next(position for position, values in enumerate(work.initial.values()) if values.ndim == 2)
    dense = list(work.initial.values())[first_dense]
    weights[first_dense] = dense.reshape(len(dense), 256, 6, 6).transpose(2, 3, 1, 0).reshape(-1, len(dense))
    return [np.ascontiguousarray(values) for values in weights]


def forward(weights: list[tf.Tensor], x_bhwc: tf.Tensor) -> tf.Tensor:
    """Return the logits, in the type of weights and examples."""
    x, rest = tf.pad(x_bhwc, [[0, 0], [2, 2], [2, 2], [0, 0]]), iter(weights)
    for stride, padding, pooled in CONVOLUTIONS:
        x = tf.nn.conv2d(x, next(rest), stride, padding)
        x = tf.nn.relu(tf.nn.bias_add(x, next(rest)))
        x = tf.nn.max_pool2d(x, 3, 2, "VALID") if pooled else x
    x = tf.reshape(x, [-1, 6 * 6 * 256])
    for _ in range(2):
        x = tf.nn.relu(tf.nn.dropout(x, 0.5) @ next(rest) + next(rest))
    return x @ next(rest) + next(rest)


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    tf.random.set_seed(work.seed)  # dropout
    images, labels = tf.constant(work.images), tf.constant(work.labels)
    mean, std = (tf.reshape(tf.constant(values), [-1, 1, 1]) for values in (work.data.info.mean, work.data.info.std))
    weights = [tf.Variable(values) for values in initial_values(work)]
    slots = [tf.Variable(tf.zeros_like(weight)) for weight in weights]
    low = tf.bfloat16 if work.precision == "bf16" else tf.float32

    @tf.function(input_signature=[tf.TensorSpec([work.batch_size], tf.int32)])
    def step(batch: tf.Tensor) -> tf.Tensor:
        inputs = (tf.cast(tf.gather(images, batch), tf.float32) / 255 - mean) / std
        x_bhwc = tf.cast(tf.transpose(inputs, [0, 2, 3, 1]), low)
        with tf.GradientTape() as tape:
            logits = tf.cast(forward([tf.cast(weight, low) for weight in weights], x_bhwc), tf.float32)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, batch), logits))
        for weight, slot, gradient in zip(weights, slots, tape.gradient(loss, weights), strict=True):
            tf.raw_ops.ResourceApplyMomentum(
                var=weight.handle, accum=slot.handle, lr=work.learning_rate, grad=gradient, momentum=work.momentum
            )
        return loss

    batches, losses = [tf.constant(batch) for batch in work.order()], []

    def run(begin: int, end: int) -> None:
        losses.extend(step(batch).numpy() for batch in batches[begin:end])

    run(0, 1)
    timer.first_step()
    run(1, work.warmup)
    timer.begin()
    run(work.warmup, work.updates)
    timer.end()
    timer.report(work, np.array(losses))


main()
