"""A hand-written fused TensorFlow loop: thousands of steps in a `tf.range`.

Its input are the batches' indices. The variant `xla` compiles the loop (`jit_compile`).
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from workload import Timer, read_workload

STEPS_PER_CALL = 2000


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)  # measured: one thread hands out small ops faster than two
    inputs, labels = tf.constant(work.inputs), tf.constant(work.labels)
    weight, bias = tf.Variable(work.weight.T), tf.Variable(work.bias)
    rate = tf.constant(work.learning_rate)

    @tf.function(input_signature=[tf.TensorSpec([None, work.batch_size], tf.int32)], jit_compile=work.variant == "xla")
    def train(indices_kb: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, size=tf.shape(indices_kb)[0])
        for step in tf.range(tf.shape(indices_kb)[0]):
            batch = indices_kb[step]
            with tf.GradientTape() as tape:
                logits = tf.gather(inputs, batch) @ weight + bias
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, batch), logits))
            weight_gradient, bias_gradient = tape.gradient(loss, [weight, bias])
            weight.assign_sub(rate * weight_gradient)
            bias.assign_sub(rate * bias_gradient)
            losses = losses.write(step, loss)
        return losses.stack()

    order, losses = work.order(), []

    def run(begin: int, end: int) -> None:
        for first in range(begin, end, STEPS_PER_CALL):
            losses.append(train(tf.constant(order[first : min(first + STEPS_PER_CALL, end)])).numpy())

    run(0, work.warmup)  # one call, of the length of those that count, since XLA compiles for each length again
    timer.first_step()
    timer.begin()
    run(work.warmup, work.updates)
    timer.end()
    timer.report(work, np.concatenate(losses))


main()
