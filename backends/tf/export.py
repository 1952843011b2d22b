"""A trained model as plain TensorFlow reads it: a SavedModel that serves, or a checkpoint of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from ...core.plugins import forward_plugin, load
from ...data.normalisation import normal_table
from ...models.base import ForwardContext
from ..export import Export

__all__ = ["export"]


def export(request: Export) -> None:
    """Write the format that is asked for."""
    _WRITERS[request.format](request)


def _saved_model(request: Export) -> None:
    model = _Served(request)
    signatures = {"serving_default": model.normalised_signature(), "pixels": model.pixels_signature()}
    tf.saved_model.save(model, str(request.folder), signatures=signatures)


def _checkpoint(request: Export) -> None:
    tf.train.Checkpoint(**_variables({**request.parameters, **request.buffers})).write(str(request.folder / "weights"))


_WRITERS: Mapping[str, Callable[[Export], None]] = {"savedmodel": _saved_model, "tf-checkpoint": _checkpoint}


def _variables(arrays: Mapping[str, np.ndarray]) -> dict[str, tf.Variable]:
    return {name: tf.Variable(np.asarray(array), name=name, trainable=False) for name, array in arrays.items()}


class _Served(tf.Module):  # type: ignore[misc]
    """The model's forward pass over its trained values. Images are [batch, channels, height, width] of any batch size."""

    def __init__(self, request: Export) -> None:
        super().__init__(name=request.model.name)
        self._run = load(forward_plugin(request.model_name, "tf"), "forward").forward
        self._settings = request.model.settings
        self._shape = [None, *request.model.input_shape]
        self.parameters = _variables(request.parameters)
        self.buffers = _variables(request.buffers)
        self._tables = list(normal_table(request.mean, request.std))

    def normalised_signature(self) -> tf.types.experimental.GenericFunction:
        """Return the function of normalised images, float32."""
        return tf.function(self._logits, input_signature=[tf.TensorSpec(self._shape, tf.float32, name="images")])

    def pixels_signature(self) -> tf.types.experimental.GenericFunction:
        """Return the function of pixels, uint8, which normalises them to the bit as the trainer's datasets do."""
        return tf.function(self._logits_of_pixels, input_signature=[tf.TensorSpec(self._shape, tf.uint8, name="images")])

    def _logits(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        parameters = {name: tf.convert_to_tensor(variable) for name, variable in self.parameters.items()}
        buffers = {name: tf.convert_to_tensor(variable) for name, variable in self.buffers.items()}
        return {"logits": self._run(parameters, images, ForwardContext(training=False, buffers=buffers, settings=self._settings))}

    def _logits_of_pixels(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        channels = [tf.gather(table, tf.cast(images[:, number], tf.int32)) for number, table in enumerate(self._tables)]
        return self._logits(tf.stack(channels, axis=1))
