"""Decoding with a model on TensorFlow, piece by piece, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...data.columns import LENGTHS
from ..decoding_functions import DecodingChecks, DecodingFunctions

NUMBERS = tf.TensorSpec([None], tf.int32)


class TfStepper:
    """A `models.decoding.search.Stepper` of functions that read parameters at each call, traced once. Raises UsageError."""

    def __init__(self, functions: DecodingFunctions, source: str, pieces: int, device: str) -> None:
        self._device = device
        self._checks = checks = DecodingChecks(shape_of, pieces)

        def begun(source_bs: tf.Tensor, lengths_b: tf.Tensor) -> tuple[Any, Any]:
            memory = checks.memory(functions.encode({source: source_bs, f"{source}{LENGTHS}": lengths_b}), None)
            return memory, checks.cache(functions.empty_cache(memory), None)

        def stepped(tokens_n: tf.Tensor, position: tf.Tensor, memory: Any, cache: Any) -> tuple[tf.Tensor, Any]:
            logits_nv, after = checks.step(functions.decode_step(tokens_n, position, memory, cache), None, cache)
            tf.nest.map_structure(_check_growth, cache, after)
            return tf.nn.log_softmax(tf.cast(logits_nv, tf.float32)), after

        def taken(structure: Any, rows: tf.Tensor) -> Any:
            return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), structure)

        self._begin = self._traced(begun, tf.TensorSpec([None, None], tf.int32), NUMBERS)
        memory, cache = tf.nest.map_structure(_growing, self._begin.structured_outputs)
        self._step = self._traced(stepped, NUMBERS, tf.TensorSpec([], tf.int32), memory, cache)
        self._memory_rows, self._cache_rows = self._traced(taken, memory, NUMBERS), self._traced(taken, cache, NUMBERS)
        self._memory: Any = None
        self._cache: Any = None
        self._position = 0
        self._sentence_n = np.zeros(0, np.int64)

    def _traced(self, function: Callable[..., Any], *signature: Any) -> Any:
        def placed(*arguments: Any) -> Any:
            with tf.device(self._device):
                return function(*arguments)

        return tf.function(placed, input_signature=signature, autograph=False).get_concrete_function()

    def begin(self, sources: Sequence[NDArray[np.integer]]) -> None:
        """See `Stepper.begin`."""
        lengths = [len(source) for source in sources]
        padded_bs = np.zeros((len(sources), max(lengths)), np.int32)
        for row, source in zip(padded_bs, sources, strict=True):
            row[: len(source)] = source
        memory, cache = self._begin(tf.constant(padded_bs), tf.constant(lengths, tf.int32))
        self._memory, self._cache = self._checks.memory(memory, len(sources)), self._checks.cache(cache, len(sources))
        self._position, self._sentence_n = 0, np.arange(len(sources))

    def advance(self, tokens_n: NDArray[np.int64], rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Stepper.advance`."""
        if not np.array_equal(rows_n, np.arange(len(self._sentence_n))):
            rows = tf.constant(rows_n.astype(np.int32))
            self._cache = self._cache_rows(self._cache, rows)
            sentence_n = self._sentence_n[rows_n]
            if not np.array_equal(sentence_n, self._sentence_n):  # hypotheses of one sentence have one memory
                self._memory = self._memory_rows(self._memory, rows)
            self._sentence_n = sentence_n
        tokens, position = tf.constant(tokens_n.astype(np.int32)), tf.constant(self._position)
        found = self._step(tokens, position, self._memory, self._cache)
        log_probabilities_nv, self._cache = self._checks.step(found, len(tokens_n), self._cache)
        self._position += 1
        return np.array(log_probabilities_nv)  # a writable copy


def shape_of(found: Any) -> Sequence[int | None] | None:
    """Return a tensor's shape, None for anything else; see `DecodingChecks`."""
    if not isinstance(found, tf.Tensor):
        return None
    sizes: list[int | None] = [] if found.shape.rank is None else found.shape.as_list()
    return sizes


def _check_growth(before: tf.Tensor, after: tf.Tensor) -> None:
    if after.dtype != before.dtype or not before.shape.is_compatible_with(after.shape):
        raise UsageError(
            f"model: the function 'decode_step' was given a cache with {before.dtype.name} {before.shape} in it and returned"
            f" {after.dtype.name} {after.shape}; the same is needed, save in a dimension that is 0 in what 'empty_cache' returns"
        )


def _growing(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([size or None for size in spec.shape.as_list()], spec.dtype)
