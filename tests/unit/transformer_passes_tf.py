"""``python transformer_passes_tf.py SEED FILE``: the cases with TensorFlow, to FILE (npz)."""

import os
import sys
from functools import cache

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")

import numpy as np
import tensorflow as tf
from transformer_cases import CASES, DROPPED, EMPTY, MORE_PADDING, PLAIN, STEP, Case, rates, result_formats

from crosstrain.backends.tf.model import ForwardContexts
from crosstrain.data.text import BEGIN
from crosstrain.models.base import ForwardContext
from crosstrain.models.layers.tf import SequenceLayers
from crosstrain.models.transformer import decode_step, empty_cache, encode
from crosstrain.models.transformer.tf import example_sums, forward, translation_loss

TOKENS = tf.TensorSpec([None, None], tf.int32)
LENGTHS = tf.TensorSpec([None], tf.int32)
INPUTS = {"source": TOKENS, "source_lengths": LENGTHS, "target": TOKENS, "target_lengths": LENGTHS}


def inputs_of(case, seed, padding=0):
    inputs = {name: tf.constant(value) for name, value in case.inputs(seed, padding).items()}
    return {name: tf.constant(value) for name, value in case.parameters(seed).items()}, inputs


@cache
def functions(model):
    """Return a training pass and an evaluation, traced once for all lengths and batches."""
    case = Case(model)
    contexts = ForwardContexts(case.job(), case.spec, 0)
    weights = {parameter.name: tf.TensorSpec(parameter.shape) for parameter in case.spec.parameters}

    @tf.function(autograph=False)
    def train(parameters, inputs, indices):
        context = contexts.training({}, tf.constant(STEP, tf.int64), indices)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(list(parameters.values()))
            logits = forward(parameters, inputs, context)
            losses = translation_loss(logits, inputs, context)
            total = tf.reduce_sum(losses)
        gradients = tape.gradient(total, parameters)
        return logits, losses, {name: tf.convert_to_tensor(gradient) for name, gradient in gradients.items()}

    @tf.function(autograph=False)
    def evaluate(parameters, inputs):
        context = contexts.evaluation({})
        logits = forward(parameters, inputs, context)
        return logits, example_sums(logits, inputs, context)

    return train.get_concrete_function(weights, INPUTS, LENGTHS), evaluate.get_concrete_function(weights, INPUTS)


def passes(case, seed, train, evaluate, padding=0):
    parameters, inputs = inputs_of(case, seed, padding)
    logits, losses, gradients = train(parameters, inputs, tf.constant(case.indices))
    yield "trained", logits
    yield "losses", losses
    yield from ((f"gradient/{name}", gradient) for name, gradient in gradients.items())
    logits, sums = evaluate(parameters, inputs)
    yield "evaluated", logits
    yield from ((f"sum/{name}", value) for name, value in sums.items())


def decoded(case, seed):
    """Return logits of the targets' positions, decoded stepwise by one function."""
    parameters, inputs = inputs_of(case, seed)
    settings = case.spec.settings
    layers = SequenceLayers(parameters, ForwardContext(False, settings=settings))
    memory = encode(layers, inputs["source"], inputs["source_lengths"], settings)
    step = tf.function(lambda *state: decode_step(layers, *state, settings), autograph=False, reduce_retracing=True)
    tokens, cache, logits_by_step = tf.fill([case.batch], BEGIN), empty_cache(memory), []
    for position in range(inputs["target"].shape[1]):
        logits, cache = step(tokens, tf.constant(position), memory, cache)
        logits_by_step.append(logits)
        tokens = inputs["target"][:, position]
    return tf.stack(logits_by_step, 1)


def low(case, seed):
    parameters, inputs = inputs_of(case, seed)
    return forward(parameters, inputs, ForwardContexts(case.job("bf16"), case.spec, 0).evaluation({}))


def formats(case, seed):
    parameters, inputs = inputs_of(case, seed)
    layers = SequenceLayers(parameters, ForwardContexts(case.job("bf16"), case.spec, 0).evaluation({}))
    x_btd = layers.embedding(inputs["source"], "embedding")
    for name, value in result_formats(layers, x_btd, inputs["source"], inputs["source_lengths"]):
        yield f"format/{name}", value.dtype.name
        yield f"layer/{name}", tf.cast(value, tf.float32)


def dropped(seed):
    """Return means of ones after dropout, by mask and number of dimensions, one per rate."""
    for shared in (False, True):
        for dimensions, shape in DROPPED.items():
            indices = tf.range(shape[0])
            context = ForwardContexts(CASES[1].job(deterministic=shared), CASES[1].spec, 0).training(
                {}, tf.constant(STEP, tf.int64), indices
            )
            yield (
                f"dropped/{shared}/{dimensions}",
                tf.stack([tf.reduce_mean(context.dropout(tf.ones(shape), rate, 0)) for rate in rates(seed)]),
            )


if __name__ == "__main__":
    seed, results = int(sys.argv[1]), {}
    tf.config.threading.set_intra_op_parallelism_threads(2)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # each pass runs once or twice
    for case in (*CASES, EMPTY):
        train, evaluate = functions(case.model)
        results |= {f"{case}/{key}": value for key, value in passes(case, seed, train, evaluate)}
        if case.batch:
            results |= {f"{case}/padded/{key}": value for key, value in passes(case, seed, train, evaluate, MORE_PADDING)}
            results |= {f"{case}/decoded": decoded(case, seed)}
    results |= {f"{PLAIN}/low": low(PLAIN, seed)}
    results |= {**dict(dropped(seed)), **dict(formats(PLAIN, seed))}
    np.savez(sys.argv[2], **{key: value if isinstance(value, str) else value.numpy() for key, value in results.items()})
