"""Decoding with a model on TensorFlow, piece by piece, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...data.columns import LENGTHS
from ..decoding_functions import CachedStepper, DecodingFunctions

NUMBERS = tf.TensorSpec([None], tf.int32)


class TfStepper(CachedStepper):
    """A stepper of functions that read parameters at each call, traced once."""

    def __init__(self, functions: DecodingFunctions, source: str, pieces: int, device: str) -> None:
        super().__init__(pieces, shape_of)
        self._device, checks = device, self._checks

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
        self._rows = [self._traced(taken, structure, NUMBERS) for structure in (cache, memory)]

    def _traced(self, function: Callable[..., Any], *signature: Any) -> Any:
        def placed(*arguments: Any) -> Any:
            with tf.device(self._device):
                return function(*arguments)

        return tf.function(placed, input_signature=signature, autograph=False).get_concrete_function()

    def _begun(self, padded_bs: NDArray[np.int64], lengths_b: NDArray[np.int64]) -> tuple[Any, Any]:
        memory, cache = self._begin(tf.constant(padded_bs, tf.int32), tf.constant(lengths_b, tf.int32))
        return self._checks.memory(memory, len(padded_bs)), self._checks.cache(cache, len(padded_bs))

    def _taken(self, structures: Sequence[Any], rows_n: NDArray[np.int64]) -> list[Any]:
        rows = tf.constant(rows_n, tf.int32)
        return [take(structure, rows) for take, structure in zip(self._rows, structures, strict=False)]

    def _stepped(self, tokens_n: NDArray[np.int64]) -> tuple[NDArray[np.float32], Any]:
        result = self._step(tf.constant(tokens_n, tf.int32), tf.constant(self._position), self._memory, self._cache)
        log_probabilities_nv, cache = self._checks.step(result, len(tokens_n), self._cache)
        return np.array(log_probabilities_nv), cache  # a writable copy


def shape_of(value: Any) -> Sequence[int | None] | None:
    """Return a tensor's shape, None for anything else; see `DecodingChecks`."""
    if not isinstance(value, tf.Tensor):
        return None
    return [] if value.shape.rank is None else list(value.shape.as_list())


def _check_growth(before: tf.Tensor, after: tf.Tensor) -> None:
    if after.dtype != before.dtype or not before.shape.is_compatible_with(after.shape):
        raise UsageError(
            f"model: the function 'decode_step' was given a cache with {before.dtype.name} {before.shape} in it and returned"
            f" {after.dtype.name} {after.shape}; the same is needed, save in a dimension that is 0 in what 'empty_cache' returns"
        )


def _growing(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([size or None for size in spec.shape.as_list()], spec.dtype)
