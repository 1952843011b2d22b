"""Print as JSON a backend's messages for decoding functions with invalid results.

``python decoding_mistakes.py BACKEND``
"""

import json
import os
import sys
from importlib import import_module

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")

import numpy as np

from crosstrain.backends.decoding_functions import DecodingFunctions
from crosstrain.core.errors import UsageError
from crosstrain.models.decoding import Decoding, decode

PIECES = 7
SOURCES = [np.array([4, 5, 2]), np.array([6, 2]), np.array([5, 2])]


def stepper(backend, functions):
    module = import_module(f"crosstrain.backends.{backend}.decoding")
    if backend == "tf":
        return module.TfStepper(functions, "source", PIECES, "CPU:0")
    return module.TorchStepper(functions, "source", PIECES, import_module("torch").device("cpu"))


def numbers(backend):
    values = np.arange(PIECES, dtype=np.int32)
    return import_module("tensorflow").constant(values) if backend == "tf" else import_module("torch").from_numpy(values)


def mistakes(logits_v):
    """Yield by name the three functions with one mistake in them, and those without."""

    def encode(inputs):
        return inputs["source"], (inputs["source_lengths"], ())

    def empty_cache(memory):
        return (memory[1][0] * 0,)

    def decode_step(tokens_b, position, memory, cache):
        return (tokens_b[:, None] * 0 + 1) * logits_v, (tokens_b,)

    right = {"encode": encode, "empty_cache": empty_cache, "decode_step": decode_step}
    step = lambda change: {**right, "decode_step": lambda *arguments: change(*decode_step(*arguments))}  # noqa: E731
    yield "nothing", right
    yield "memory of a mapping", {**right, "encode": lambda inputs: inputs}
    yield "memory with a number", {**right, "encode": lambda inputs: (*encode(inputs), 3)}
    yield "memory of nothing", {**right, "encode": lambda inputs: None}
    yield "memory of one example", {**right, "encode": lambda inputs: (logits_v[None], encode(inputs)[1])}
    yield "memory without a batch", {**right, "encode": lambda inputs: (logits_v[0], encode(inputs)[1])}
    yield "cache of a list", {**right, "empty_cache": lambda memory: [memory[0]]}
    yield "cache of a text", {**right, "empty_cache": lambda memory: ("nothing",)}
    yield "cache of another form", step(lambda logits, cache: (logits, (*cache, *cache)))
    yield "a number in the new cache", step(lambda logits, cache: (logits, 3))
    yield "logits alone", step(lambda logits, cache: logits)
    yield "three values", step(lambda logits, cache: (logits, cache, cache))
    yield "logits of three dimensions", step(lambda logits, cache: (logits[:, None], cache))
    yield "logits of one dimension", step(lambda logits, cache: (logits[:, 0], cache))
    yield "too few logits", step(lambda logits, cache: (logits[:, 1:], cache))
    yield "logits of one row", step(lambda logits, cache: (logits_v[None], cache))
    yield "no logits", step(lambda logits, cache: (None, cache))


def catch_message(backend, functions):
    try:
        decode(stepper(backend, DecodingFunctions(**functions)), SOURCES, Decoding(beam=2, extra_length=2))
    except UsageError as error:
        return str(error)
    return None


if __name__ == "__main__":
    print(json.dumps({name: catch_message(sys.argv[1], functions) for name, functions in mistakes(numbers(sys.argv[1]))}))
