"""Build Keras models, and name their weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....core.errors import TrainerError, UsageError, raised
from ..building import constructed, constructor_arguments, facts_of, found
from ..describing import batch_in_words, example_arrays
from ..reference import Reference
from ..requests import DataFacts
from .calls import Call
from .library import initial_values_by

_PROBABILITIES = ("softmax", "sigmoid", "log_softmax", "log_sigmoid")


def built(keras: Any, reference: Reference, request: Mapping[str, Any], seed: int) -> Call:
    """Build the model of a `Request` with the initial values of a seed, and call it once.

    Some models are complete only then. An activation of its last layer that makes probabilities of logits is taken off. Raises UsageError.
    """
    arguments, data = request["arguments"], request["data"]
    with initial_values_by(keras, seed):
        _forget_import(reference)  # a model that is built at import has the format of floats, and the values, of its time
        value = found(reference)
        if isinstance(value, keras.Model):
            if arguments:
                raise UsageError(
                    f"model: {reference.text} is a model that is built already, and takes no argument {next(iter(arguments))!r}."
                )
            model = value
        else:
            if not callable(value):
                raise UsageError(
                    f"model: {reference.text} is {type(value).__name__}, not a Keras model, its class, or a function that returns one."
                )
            facts = facts_of(data, request["outputs"])
            if "shape" in facts:
                channels, *size = facts["shape"]
                facts["shape"] = (*size, channels)  # as Keras has them
            model = constructed(reference, value, constructor_arguments(reference, value, arguments, facts))
        if not isinstance(model, keras.Model):
            raise UsageError(f"model: {reference.text} returned {type(model).__name__}, not a Keras model.")
        if next((column.dtype for column in data.columns if column.name == data.target), "") != "float32":
            _use_logits(keras, model, reference)
        call = Call(keras, model, data, reference.text)
        _call_once(keras, call, data, reference)
        return call


def tensors_of(keras: Any, data: DataFacts) -> dict[str, Any]:
    """Return made-up values of every column, by name."""
    return {name: keras.ops.convert_to_tensor(array) for name, array in example_arrays(data).items()}


def _call_once(keras: Any, call: Call, data: DataFacts, reference: Reference) -> None:
    tensors = tensors_of(keras, data)
    try:
        call(*(tensors[name] for name in call.tensors), training=False)
    except TrainerError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"model: {reference.text} fails on {batch_in_words(data, call.columns, example_arrays(data))}: {raised(error)}."
        ) from error


def _forget_import(reference: Reference) -> None:
    name = Path(reference.place).stem if reference.kind == "file" else reference.place
    if name.partition(".")[0] != "keras":
        sys.modules.pop(name, None)


def _use_logits(keras: Any, model: Any, reference: Reference) -> None:
    """Take off the last layer's activation if it makes probabilities: losses take logits."""
    outputs = getattr(model, "outputs", None)
    layer: Any = outputs[0]._keras_history.operation if outputs and len(outputs) == 1 else None
    layer = layer.layers[-1] if isinstance(layer, keras.Sequential) else layer
    activation = getattr(getattr(layer, "activation", None), "__name__", "")
    if activation not in _PROBABILITIES and not isinstance(layer, keras.layers.Softmax):
        return
    if not isinstance(layer, keras.layers.Dense | keras.layers.Activation) or len(layer._inbound_nodes) > 1:
        what = activation or "Softmax"
        raise UsageError(
            f"model: {reference.text} ends with {what} of the layer {layer.name!r}, and losses take logits. Leave the {what} out."
        )
    layer.activation = keras.activations.linear


def trained(model: Any) -> dict[str, Any]:
    """Return the weights that training changes, by path."""
    return {weight.path: weight for weight in model.trainable_weights}


def constant(model: Any) -> list[Any]:
    """Return the weights that are no floats, which training never changes."""
    return [weight for weight in model.non_trainable_weights if not str(weight.dtype).startswith("float")]


def carried(model: Any) -> dict[str, Any]:
    """Return the weights without a gradient, by path: float buffers, and frozen weights."""
    return {weight.path: weight for weight in model.non_trainable_weights if str(weight.dtype).startswith("float")}
