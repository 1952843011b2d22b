"""A model's pass in float64, layer by layer, as a tape for every framework."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.job import Job
from ..data.base import IMAGE
from ..models.base import ForwardContext, ModelSpec
from ..models.dropout_masks import drawn_rate, keep_mask_of_shape
from ..models.imported.description import ImportedSpec
from ..models.layers.reference import Call, ReferenceLayers, ReferenceSequenceLayers, Tape, Value, record
from .losses import loss_of

Array = NDArray[Any]
LAYERS = {"cnn": ReferenceLayers, "alexnet": ReferenceLayers, "resnet18": ReferenceLayers, "transformer": ReferenceSequenceLayers}


def has_reference(spec: ModelSpec) -> bool:
    """Return whether a model consists of layers, or nodes, that are known in float64."""
    if isinstance(spec, ImportedSpec):
        return bool(spec.settings.is_keras or spec.settings.has_graph)
    return spec.name in LAYERS


def tape_of(
    job: Job,
    spec: ModelSpec,
    state: Mapping[str, Array],
    columns: Mapping[str, Array],
    target: Mapping[str, Array],
    indices: Array,
    step: int,
) -> tuple[Tape, Call]:
    """Return the tape of a training pass, and the loss as its last layer."""
    parameters = {name.removeprefix("parameters/"): value for name, value in state.items() if name.startswith("parameters/")}
    buffers = {name.removeprefix("buffers/"): value for name, value in state.items() if name.startswith("buffers/")}

    def dropout(ones: Array, rate: float, layer: int) -> Array:
        rate = drawn_rate(rate)
        return keep_mask_of_shape(job.seed, step, layer, indices, ones.shape, rate) / (1.0 - rate)

    context: ForwardContext[Array] = ForwardContext(True, buffers, settings=spec.settings, dropout=dropout)
    network = import_module(f"crosstrain.models.{spec.name}").network
    kind = LAYERS[spec.name]

    def carried_out(tape: Tape) -> Any:
        layers = kind(parameters, context, tape)
        if spec.inputs == (IMAGE,):
            return network(layers, Value(columns[IMAGE].astype(np.float64)))
        return network(layers, columns, spec.settings)

    tape, logits = record(carried_out)
    total, slope = loss_of(spec, logits.array, target)
    loss = Call("loss", "loss", (), {}, (logits,), (), {"output": total, "slope of input 0": slope}, None)
    tape.backward(logits, slope[0])
    return tape, loss


def arrays_of(tape: Tape, loss: Call) -> dict[str, Array]:
    """Return the inputs, results and slopes of a tape, float32, for `backends.replay`."""
    arrays: dict[str, Array] = {"loss/input 0": loss.inputs[0].array.astype(np.float32)}
    for number, call in enumerate(tape.layers):
        for place, value in enumerate(call.inputs):
            arrays[f"{number}/input {place}"] = value.array.astype(np.float32)
        for place, value in enumerate(call.outputs):
            arrays[f"{number}/result {place}"] = value.array.astype(np.float32)
        for place, slope in enumerate(call.slopes):
            arrays[f"{number}/slope {place}"] = slope.astype(np.float32)
    return arrays
