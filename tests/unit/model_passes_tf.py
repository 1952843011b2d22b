"""Run the cases with TensorFlow; write logits, gradients and new buffers to FILE (npz).

``python model_passes_tf.py FILE``
"""

import os
import sys
from dataclasses import replace
from functools import cache

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")

import numpy as np
import tensorflow as tf
from model_cases import CASES, EMPTY, SINGLE, dropout_mask, thinned

from crosstrain.core.plugins import forward_plugin, load
from crosstrain.models.base import ForwardContext


def tensors(values):
    return {name: tf.convert_to_tensor(value) for name, value in values.items()}


@cache
def functions(case, compute):
    """Return a case's training and evaluation pass as traced functions, for any batch size."""
    forward = load(forward_plugin(case.model, "tf"), "forward").forward

    def dropout(x_bi, rate, layer):
        return x_bi * tf.constant(dropout_mask(layer, case.batch, x_bi.shape[1], rate), x_bi.dtype) / (1 - rate)

    images, labels = tf.TensorSpec([None, *case.shape]), tf.TensorSpec([None], tf.int32)

    @tf.function(autograph=False)
    def train(parameters, buffers, x, y):
        context = ForwardContext(True, buffers, compute, dropout)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(list(parameters.values()))
            logits = forward(parameters, x, context)
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        return logits, tape.gradient(loss, parameters), context.updated

    @tf.function(autograph=False)
    def evaluate(parameters, buffers, x):
        return forward(parameters, x, ForwardContext(False, buffers))

    shapes = {parameter.name: parameter.shape for parameter in case.spec.parameters}
    buffers = {name: value.shape for name, value in case.spec.initial_buffers().items()}
    signatures = tuple({name: tf.TensorSpec(shape) for name, shape in part.items()} for part in (shapes, buffers))
    return train.get_concrete_function(*signatures, images, labels), evaluate.get_concrete_function(*signatures, images)


def passes(case, compute=None):
    # the masks of AlexNet's dropout are constants of its graph; other models have one graph for all batch sizes
    train, evaluate = functions(case if case.model == "alexnet" else replace(case, batch=1, raised=0.0), compute)
    x, y = case.examples
    state = tensors(case.parameters), tensors(case.buffers)
    trained, gradients, updated = train(*state, tf.constant(x), tf.constant(y))
    yield "trained", trained
    yield "evaluated", evaluate(*state, tf.constant(x))
    yield from ((f"gradient/{name}", thinned(gradient)) for name, gradient in gradients.items())
    yield from ((f"buffer/{name}", value) for name, value in updated.items())


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(2)
    results = {f"{case}/{key}": np.asarray(value) for case in CASES + EMPTY + SINGLE for key, value in passes(case)}
    low = next(value for key, value in passes(CASES[0], tf.bfloat16) if key == "trained")
    np.savez(sys.argv[1], **results, **{"bf16/trained": np.asarray(low)})
