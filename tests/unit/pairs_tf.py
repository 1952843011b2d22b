"""``python pairs_tf.py FILE``: results and gradients of the convolutions, by our layer and by TensorFlow's own, to FILE (npz)."""

import sys

import numpy as np
import tensorflow as tf
from pair_cases import PAIR_CASES

from crosstrain.models.base import ForwardContext
from crosstrain.models.layers import tf as layers


def computed(case, convolve):
    x, weight, bias, gradient = (tf.constant(array) for array in case.arrays())
    watched = {"x": x, "weight": weight} | ({"bias": bias} if case.biased else {})

    @tf.function(input_signature=[tf.TensorSpec([None, *x.shape[1:]], x.dtype)])
    def y_bchw(x):
        images = layers.Layers({}, ForwardContext(training=True)).images(x)
        y_bhwc = convolve(images, weight, bias if case.biased else None)
        return tf.transpose(y_bhwc, [0, 3, 1, 2])[: tf.shape(x)[0]]

    with tf.GradientTape() as tape:
        tape.watch(list(watched.values()))
        y = y_bchw(x)
    yield "y", y
    yield from tape.gradient(y, watched, gradient).items()


def ours(x_bhwc, weight, bias):
    parameters = {"conv.weight": weight} | ({} if bias is None else {"conv.bias": bias})
    return layers.Layers(parameters, ForwardContext(training=True)).conv(x_bhwc, "conv")


def plain(x_bhwc, weight, bias):
    y_bhwc = tf.nn.conv2d(x_bhwc, tf.transpose(weight, [2, 3, 1, 0]), 1, "VALID")
    return y_bhwc if bias is None else tf.nn.bias_add(y_bhwc, bias)


if __name__ == "__main__":
    in_pairs, taken = layers._conv_in_pairs, []
    layers._conv_in_pairs = lambda *arguments: taken.append(1) or in_pairs(*arguments)
    results = {}
    for name, case in PAIR_CASES.items():
        for whose, convolve in (("ours", ours), ("plain", plain)):
            results |= {f"{name}/{whose}/{key}": value.numpy() for key, value in computed(case, convolve)}
    np.savez(sys.argv[1], taken=np.array(len(taken)), **results)
