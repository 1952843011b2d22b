"""A hand-written fused TensorFlow loop for the small CNN: many steps in a `tf.range`.

NHWC, indices as input.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from workload import Timer, Workload, read_workload

STEPS_PER_CALL = 100


def initial_values(work: Workload) -> list[np.ndarray]:
    """Return the initial weights in TensorFlow's layouts.

    HWIO, [in, out], features in the order height, width, channel.
    """
    conv1, bias1, conv2, bias2, dense1, bias3, dense2, bias4 = work.initial.values()
    dense1 = dense1.reshape(len(dense1), 16, 7, 7).transpose(2, 3, 1, 0).reshape(784, len(dense1))
    return [conv1.transpose(2, 3, 1, 0), bias1, conv2.transpose(2, 3, 1, 0), bias2, dense1, bias3, dense2.T, bias4]


def forward(weights: list[tf.Variable], x_bhwc: tf.Tensor) -> tf.Tensor:
    """Return the logits."""
    conv1, bias1, conv2, bias2, dense1, bias3, dense2, bias4 = weights
    x = tf.nn.max_pool2d(tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x_bhwc, conv1, 1, "VALID"), bias1)), 2, 2, "VALID")
    x = tf.nn.max_pool2d(tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, conv2, 1, "SAME"), bias2)), 2, 2, "VALID")
    x = tf.nn.relu(tf.reshape(x, [-1, 784]) @ dense1 + bias3)
    return x @ dense2 + bias4


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    inputs, labels = tf.constant(work.inputs_nchw.transpose(0, 2, 3, 1)), tf.constant(work.labels)
    weights = [tf.Variable(values) for values in initial_values(work)]
    rate = tf.constant(work.learning_rate)

    @tf.function(input_signature=[tf.TensorSpec([None, work.batch_size], tf.int32)])
    def train(indices_kb: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, size=tf.shape(indices_kb)[0])
        for step in tf.range(tf.shape(indices_kb)[0]):
            batch = indices_kb[step]
            with tf.GradientTape() as tape:
                logits = forward(weights, tf.gather(inputs, batch))
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, batch), logits))
            for variable, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                variable.assign_sub(rate * gradient)
            losses = losses.write(step, loss)
        return losses.stack()

    order, losses = work.order(), []

    def run(begin: int, end: int) -> None:
        for first in range(begin, end, STEPS_PER_CALL):
            losses.append(train(tf.constant(order[first : min(first + STEPS_PER_CALL, end)])).numpy())

    run(0, work.warmup)
    timer.begin()
    run(work.warmup, work.updates)
    timer.end()
    timer.report(work, np.concatenate(losses))


main()
