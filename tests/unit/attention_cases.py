"""Run a backend's attention layers on random inputs and save inputs and outputs.

``python attention_cases.py BACKEND SEED FILE`` writes an npz file. It also holds the messages for invalid masks and unexpected dropout.
"""

import os
import sys
from importlib import import_module

import numpy as np

from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.models.base import ForwardContext, ModelSpec, ParameterSpec

KINDS = [(masked, causal, training) for masked in (False, True) for causal in (False, True) for training in (False, True)]
RATE = 0.25


def drawn(draw):
    """Return random query, key, value and mask; each query may attend to the first key."""
    batch, heads, queries, more, width = draw.integers([1, 1, 1, 0, 1], [4, 4, 6, 4, 5])
    keys = queries + more
    query, key, value = (draw.standard_normal((batch, heads, time, width)).astype(np.float32) for time in (queries, keys, keys))
    sizes = [draw.choice([1, size]) for size in (batch, heads, queries)]
    mask = draw.random((*sizes, keys)) < 0.5
    mask[..., 0] = True
    return query, key, value, mask


def catch_message(function):
    try:
        function()
    except UsageError as error:
        return str(error)
    return ""


def training_context(backend):
    """Return the context of a training pass of a model without dropout."""
    job, spec = Job(model="logreg"), ModelSpec("plain", (ParameterSpec("w", (2, 2)),))
    contexts = import_module(f"crosstrain.backends.{backend}.model").ForwardContexts
    return contexts(job, spec, 0).training({}, None, None) if backend == "tf" else contexts(job, spec, 0, {}, None).training(0, None, 0)


def main(backend, seed, file):
    functions = import_module(f"crosstrain.backends.{backend}.model").TENSORS
    layers = import_module(f"crosstrain.models.layers.{backend}").SequenceLayers
    draw, results = np.random.default_rng(int(seed)), {}
    for number in range(20):
        query, key, value, mask = drawn(draw)
        results |= {f"{number}/query": query, f"{number}/key": key, f"{number}/value": value, f"{number}/mask": mask}
        tensors = [functions.tensor(array) for array in (query, key, value, mask)]
        for masked, causal, training in KINDS:
            context = ForwardContext(training, dropout=lambda x, rate, layer: x * (1 + rate))
            arguments = (*tensors[:3], tensors[3] if masked else None, RATE if training else 0.0, 0)
            results[f"{number}/{masked}/{causal}/{training}"] = functions.array(layers({}, context).attention(*arguments, causal=causal))
    query, key, value, mask = map(functions.tensor, drawn(draw))
    context = ForwardContext(False)
    for kind in ("float32", "int32"):
        numbers = import_module("tensorflow").cast(mask, kind) if backend == "tf" else mask.to(getattr(import_module("torch"), kind))
        results[f"message for {kind}"] = catch_message(
            lambda numbers=numbers: layers({}, context).attention(query, key, value, numbers, 0.0, 5)
        )
    context = training_context(backend)
    results["message for dropout"] = catch_message(lambda: context.dropout(query, 0.1, 3))
    results["message for no dropout"] = catch_message(lambda: context.dropout(query, 0.0, 3))
    np.savez(file, **results)


if __name__ == "__main__":
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    main(*sys.argv[1:])
