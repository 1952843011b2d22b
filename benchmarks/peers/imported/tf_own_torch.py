"""A hand-written TensorFlow loop for examples/own_torch: `tf.nn`, NHWC, one call a step.

Kernels are held as [h, w, in, out]; running statistics are variables, as in the module.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from workload import Timer, read_workload

MOMENTUM, EPSILON = 0.1, 1e-5
BLOCKS = ((0, 1, False), (1, 2, True), (2, 2, True))
"""Number, stride, and whether the shortcut has a convolution."""


class Network:
    """The network with its variables by the module's names."""

    def __init__(self, values: dict[str, np.ndarray], buffers: dict[str, np.ndarray]) -> None:
        self.weights = {name: tf.Variable(value.transpose(2, 3, 1, 0) if value.ndim == 4 else value) for name, value in values.items()}
        self.buffers = {name: tf.Variable(value, trainable=False) for name, value in buffers.items()}

    def _conv_norm(self, x_bhwc: tf.Tensor, conv: str, norm: str, stride: int = 1) -> tf.Tensor:
        kernel = self.weights[f"{conv}.weight"]
        if kernel.shape[0] == 3 and stride == 2:  # torch pads both sides, which SAME does not with an even size
            y = tf.nn.conv2d(tf.pad(x_bhwc, [[0, 0], [1, 1], [1, 1], [0, 0]]), kernel, stride, "VALID")
        else:
            y = tf.nn.conv2d(x_bhwc, kernel, stride, "SAME")
        scale, offset = self.weights[f"{norm}.weight"], self.weights[f"{norm}.bias"]
        y, mean, variance = tf.compat.v1.nn.fused_batch_norm(y, scale, offset, epsilon=EPSILON, is_training=True)
        for name, new in (("running_mean", mean), ("running_var", variance)):
            buffer = self.buffers[f"{norm}.{name}"]
            buffer.assign_add(MOMENTUM * (new - buffer))
        return y

    def logits(self, x_bhwc: tf.Tensor) -> tf.Tensor:
        """Return the logits of a training batch."""
        x = tf.nn.relu(self._conv_norm(x_bhwc, "stem.0", "stem.1"))
        for number, stride, has_shortcut in BLOCKS:
            block = f"blocks.{number}"
            y = tf.nn.relu(self._conv_norm(x, f"{block}.conv1", f"{block}.norm1", stride))
            y = self._conv_norm(y, f"{block}.conv2", f"{block}.norm2")
            x = tf.nn.relu(y + (self._conv_norm(x, f"{block}.shortcut.0", f"{block}.shortcut.1", stride) if has_shortcut else x))
        return tf.matmul(tf.reduce_mean(x, [1, 2]), self.weights["head.weight"], transpose_b=True) + self.weights["head.bias"]


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    inputs, labels = tf.constant(work.inputs_nchw.transpose(0, 2, 3, 1)), tf.constant(work.labels)
    network = Network(work.initial, work.spec.initial_buffers(work.seed))
    weights = list(network.weights.values())

    @tf.function(input_signature=[tf.TensorSpec([work.batch_size], tf.int32)])
    def step(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = network.logits(tf.gather(inputs, batch))
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, batch), logits))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(work.learning_rate * gradient)
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
