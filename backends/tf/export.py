"""Export for plain TensorFlow: a SavedModel that serves, or a checkpoint of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ...core.plugins import forward_plugin, load
from ...data.columns import LENGTHS
from ...data.preprocessing import normal_table
from ...data.text import BEGIN, END, PADDING
from ...models.base import ForwardContext
from ...models.decoding import GREEDY
from ..decoding_functions import DecodingChecks, DecodingFunctions
from ..export import Export
from .decoding import shape_of
from .model import Context


def export(request: Export) -> None:
    """Write the requested format."""
    if request.format == "tf-checkpoint":
        tf.train.Checkpoint(**_variables({**request.parameters, **request.buffers})).write(str(request.folder / "weights"))
    elif request.model.objective.translation is not None:
        translating = _Translating(request)
        tf.saved_model.save(translating, str(request.folder), signatures={"serving_default": translating.signature()})
    else:
        model = _Served(request)
        tf.saved_model.save(model, str(request.folder), signatures=model.signatures())


def _variables(arrays: Mapping[str, np.ndarray]) -> dict[str, tf.Variable]:
    return {name: tf.Variable(np.asarray(array), name=name, trainable=False) for name, array in arrays.items()}


class _Exported(tf.Module):  # type: ignore[misc]
    def __init__(self, request: Export) -> None:
        super().__init__(name=request.model.name)
        self._functions = load(forward_plugin(request.model_name, "tf"), "forward")
        self._spec = request.model
        self.parameters = _variables(request.parameters)
        self.buffers = _variables(request.buffers)

    def _values(self) -> tuple[dict[str, tf.Tensor], Context]:
        parameters, buffers = (
            {name: tf.convert_to_tensor(variable) for name, variable in variables.items()} for variables in (self.parameters, self.buffers)
        )
        return parameters, ForwardContext(training=False, buffers=buffers, settings=self._spec.settings)


class _Served(_Exported):
    def __init__(self, request: Export) -> None:
        super().__init__(request)
        self._tables = list(normal_table(request.mean, request.std))

    def signatures(self) -> dict[str, tf.types.experimental.GenericFunction]:
        shape = [None, *self._spec.input_shape]
        images, pixels = (tf.TensorSpec(shape, kind, name="images") for kind in (tf.float32, tf.uint8))
        normalised = tf.function(self._logits, input_signature=[images])
        return {"serving_default": normalised, "pixels": tf.function(self._logits_of_pixels, input_signature=[pixels])}

    def _logits(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        parameters, context = self._values()
        return {"logits": self._functions.forward(parameters, images, context)}

    def _logits_of_pixels(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        channels = [tf.gather(table, tf.cast(images[:, number], tf.int32)) for number, table in enumerate(self._tables)]
        return self._logits(tf.stack(channels, axis=1))


class _Translating(_Exported):
    def signature(self) -> tf.types.experimental.GenericFunction:
        return tf.function(self._translated, input_signature=[tf.TensorSpec([None, None], tf.int32, name="pieces")], autograph=False)

    def _translated(self, pieces: tf.Tensor) -> dict[str, tf.Tensor]:
        functions, (parameters, context) = DecodingFunctions.from_module(self._functions), self._values()
        quality, extra = self._spec.objective.translation, GREEDY.extra_length
        if quality is None:
            raise ValueError(f"{self._spec.name!r} translates nothing")
        lengths_b = tf.math.count_nonzero(pieces != PADDING, axis=1, dtype=tf.int32)
        total = tf.shape(pieces)[1] + extra
        checks = DecodingChecks(shape_of, self._spec.logits_per_position)
        inputs = {quality.source: pieces, quality.source + LENGTHS: lengths_b}
        memory = checks.memory(functions.encode(parameters, inputs, context), None)

        def step(place: tf.Tensor, before_b: tf.Tensor, done_b: tf.Tensor, written: tf.TensorArray, cache: Any) -> tuple[Any, ...]:
            result = functions.decode_step(parameters, before_b, place, memory, cache, context)
            logits_bv, cache = checks.step(result, None, cache)
            numbers_v = tf.range(tf.shape(logits_bv)[1])
            scores_bv = tf.where((numbers_v == PADDING) | (numbers_v == BEGIN), -np.inf, logits_bv)
            piece_b = tf.argmax(scores_bv, axis=1, output_type=tf.int32)
            piece_b = tf.where(done_b | (place >= lengths_b + extra), PADDING, piece_b)
            return place + 1, piece_b, (piece_b == END) | (piece_b == PADDING), written.write(place, piece_b), cache

        cache = checks.cache(functions.empty_cache(memory), None)
        begin_b = tf.fill(tf.shape(lengths_b), BEGIN)
        written = tf.TensorArray(tf.int32, size=total, element_shape=[None], clear_after_read=False)
        written = written.unstack(tf.zeros(tf.stack([total, tf.shape(pieces)[0]]), tf.int32))
        first = tf.constant(0), begin_b, tf.zeros(tf.shape(lengths_b), tf.bool), written, cache
        grows = tf.nest.map_structure(lambda tensor: tf.TensorShape([size or None for size in tensor.shape.as_list()]), cache)
        shapes = tf.TensorShape([]), tf.TensorShape([None]), tf.TensorShape([None]), tf.TensorShape(None), grows
        unfinished = lambda place, _before, done_b, *_: (place < total) & ~tf.reduce_all(done_b)  # noqa: E731
        last = tf.while_loop(unfinished, step, first, shape_invariants=shapes)
        return {"pieces": tf.transpose(last[3].stack())}
