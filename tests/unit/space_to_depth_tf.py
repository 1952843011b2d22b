"""``python space_to_depth_tf.py FILE``: convolutions of our layer and TensorFlow, to a file."""

import sys

import tensorflow as tf
from space_to_depth_cases import save_all

from crosstrain.models.base import ForwardContext
from crosstrain.models.layers import tf as layers


def computed(case, convolve):
    x, weight, bias, gradient = (tf.constant(array) for array in case.arrays())
    watched = {"x": x, "weight": weight} | ({"bias": bias} if case.biased else {})

    @tf.function(input_signature=[tf.TensorSpec([None, *x.shape[1:]], x.dtype)])
    def y_bchw(x):
        images = layers.Layers({}, ForwardContext(training=True)).images(x)
        y_bhwc = convolve(images, weight, bias if case.biased else None, case.padding)
        return tf.transpose(y_bhwc, [0, 3, 1, 2])[: tf.shape(x)[0]]

    with tf.GradientTape() as tape:
        tape.watch(list(watched.values()))
        y = y_bchw(x)
    yield "y", y
    yield from tape.gradient(y, watched, gradient).items()


def ours(x_bhwc, weight, bias, padding):
    parameters = {"conv.weight": weight} | ({} if bias is None else {"conv.bias": bias})
    return layers.Layers(parameters, ForwardContext(training=True)).conv(x_bhwc, "conv", padding=padding)


def plain(x_bhwc, weight, bias, padding):
    y_bhwc = tf.nn.conv2d(x_bhwc, tf.transpose(weight, [2, 3, 1, 0]), 1, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
    return y_bhwc if bias is None else tf.nn.bias_add(y_bhwc, bias)


if __name__ == "__main__":
    save_all(sys.argv[1], layers, computed, ours, plain)
