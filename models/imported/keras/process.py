"""The process that reads a user's Keras model; `Request` as JSON on standard input.

``python -m crosstrain.models.imported.keras.process`` writes the model's description and initial values into the request's folder, and
prints null, or the problem, as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....core.errors import UsageError
from ....data.columns import LENGTHS
from .. import describing
from ..describing import EXAMPLES, output_problem, refuse_probabilities
from ..description import BUFFER, CONSTANTS, PARAMETER, Description, write_values
from ..reference import Reference, read_reference
from ..requests import Request, answer_request
from .calls import Call
from .library import dropping_by, keras_on, noting_draws, usable_framework
from .models import built, carried, constant, tensors_of, trained


def main() -> None:
    """Answer one request."""
    answer_request(lambda content: answer(msgspec.json.decode(content, type=Request)))


def answer(request: Request) -> str | None:
    """Write what is asked for; return what is wrong with the model, or None."""
    return describing.answer(_KerasModels(usable_framework(read_reference(request.reference))), request)


class _KerasModels:
    """The `Describer` of Keras models."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._keras: Any = None
        self._on_framework: Any = None

    def build(self, reference: Reference, request: Request) -> Call:
        """Import and build the model. Raises UsageError."""
        self._keras = keras_on(self._framework)
        self._on_framework = import_module(f"{__package__.rpartition('.')[0]}.{self._framework}.keras_passes")
        return built(self._keras, reference, msgspec.structs.asdict(request), request.seed)

    def initial(self, model: Call) -> dict[str, NDArray[Any]]:
        """Return initial values by name, after `PARAMETER` or `BUFFER`."""
        named = [(PARAMETER, trained(model.model)), (BUFFER, carried(model.model))]
        return {
            prefix + name: self._keras.ops.convert_to_numpy(weight.value) for prefix, weights in named for name, weight in weights.items()
        }

    def describe(self, reference: Reference, call: Call, request: Request, folder: Path) -> Description:
        """Try the model. Raises UsageError."""
        keras, model = self._keras, call.model
        parameters, buffers = trained(model), carried(model)
        _refuse_parts(reference, model)
        arrays = tensors_of(keras, request.data)
        tensors = [arrays[name] for name in call.tensors]
        scope = keras.StatelessScope()
        with scope:
            outputs = call(*tensors, training=False)
        if changed := [weight.path for weight in model.weights if scope.get_current_value(weight) is not None]:
            raise UsageError(f"model: {reference.text} changes {changed[0]!r} outside of training. Change it only if training is True.")
        write_values(
            folder / CONSTANTS, {str(place): keras.ops.convert_to_numpy(weight.value) for place, weight in enumerate(constant(model))}
        )
        result = keras.ops.convert_to_numpy(outputs) if keras.ops.is_tensor(outputs) else outputs
        if problem := output_problem(result, request.outputs, np.ndarray):
            raise UsageError(f"model: {reference.text} {problem}")
        refuse_probabilities(reference, result)
        shapes = self._trained_once(reference, call, tensors)
        fewer = self._trained_once(reference, call, [tensor[: EXAMPLES - 1] for tensor in tensors])
        of_tensorflow = "tensorflow" in reference.imports()
        problem_on_torch = f"model: {reference.text} imports tensorflow; write `import keras`, which runs on both frameworks."
        pieces = sum(int(arrays[name].sum()) for name in call.tensors if name.endswith(LENGTHS)) or EXAMPLES
        return Description(
            inputs=call.columns,
            has_loss=False,
            measured=False,
            parameters={name: tuple(weight.shape) for name, weight in parameters.items()},
            buffers={name: tuple(weight.shape) for name, weight in buffers.items()},
            kernels=[],
            dropouts=[_batch_axis(reference, *pair) for pair in zip(shapes, fewer, strict=True)],
            multiply_adds=self._multiply_adds(call, tensors) // pieces,
            sources={},
            problems={"torch": problem_on_torch} if of_tensorflow else {},
        )

    def _multiply_adds(self, call: Call, tensors: Sequence[Any]) -> int:
        with self._keras.StatelessScope():
            return int(self._on_framework.multiply_adds(lambda: call(*tensors, training=False)))

    def _trained_once(self, reference: Reference, call: Call, tensors: Sequence[Any]) -> list[tuple[int, ...]]:
        """Make a training pass without its updates, and return the shapes of what is dropped in.

        Raises UsageError for what a run cannot train, repeat or save.
        """
        keras, weights = self._keras, trained(call.model)
        shapes: list[tuple[int, ...]] = []

        def drop(x: Any, rate: float) -> Any:
            shapes.append(tuple(int(size) for size in x.shape))
            return x

        scope = keras.StatelessScope(collect_losses=True)
        with scope, dropping_by(drop), noting_draws() as draws:
            unused = self._on_framework.without_gradient(
                lambda: call(*tensors, training=True), [weight.value for weight in weights.values()]
            )
        if draws:
            raise UsageError(
                f"model: {reference.text} draws random numbers by {draws[0]} while it trains, which a run cannot repeat."
                " Use keras.layers.Dropout, or --augment."
            )
        if names := [name for name, is_unused in zip(weights, unused, strict=True) if is_unused]:
            listed = f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
            raise UsageError(f"model: its result does not depend on {listed} of {reference.text}. Freeze them: trainable=False.")
        if scope.losses:
            raise UsageError(f"model: {reference.text} adds losses by add_loss, which a run does not train with. Leave them out.")
        if assigned := [name for name, weight in weights.items() if scope.get_current_value(weight) is not None]:
            raise UsageError(f"model: a training step of {reference.text} assigns a value to {assigned[0]!r}, which is trained. Freeze it.")
        for weight in constant(call.model):
            if scope.get_current_value(weight) is not None:
                raise UsageError(
                    f"model: a training step changes {weight.path!r} of {reference.text}, which is {weight.dtype}. Make it float32."
                )
        return shapes


def _refuse_parts(reference: Reference, model: Any) -> None:
    """Raise UsageError for weights and layers that a run cannot train with."""
    if not model.trainable_weights:
        raise UsageError(f"model: {reference.text} has no parameter to train.")
    for weight in (*trained(model).values(), *carried(model).values()):
        if str(weight.dtype) != "float32":
            raise UsageError(f"model: the weight {weight.path!r} of {reference.text} is {weight.dtype}; float32 is needed.")
    if any("train_step" in vars(kind) and not kind.__module__.startswith("keras.") for kind in type(model).__mro__):
        raise UsageError(f"model: {reference.text} has a train_step of its own, which a run does not call. Leave it out.")
    if bound := [weight.path for weight in model.trainable_weights if weight.constraint is not None]:
        raise UsageError(f"model: the weight {bound[0]!r} of {reference.text} has a constraint, which a run does not keep. Leave it out.")
    paths = [weight.path for weight in model.weights]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise UsageError(f"model: {reference.text} has two weights with the path {twice!r}. Give its layers names of their own.")
    for layer in model._flatten_layers():
        if layer.compute_dtype not in ("float32", None):
            raise UsageError(f"model: the layer {layer.name!r} of {reference.text} computes in {layer.compute_dtype}; float32 is needed.")
        if layer.losses:
            raise UsageError(
                f"model: the layer {layer.name!r} of {reference.text} adds a loss of its own, such as a regularizer's, which a run does not"
                " train with. Leave it out; --weight-decay has the effect of an L2 regularizer."
            )


def _batch_axis(reference: Reference, shape: tuple[int, ...], shape_of_fewer: tuple[int, ...]) -> int:
    """Return the examples' axis in a tensor, −1 where an example has several rows."""
    for axis in range(min(2, len(shape))):
        if (shape[axis], shape_of_fewer[axis]) == (EXAMPLES, EXAMPLES - 1):
            return axis
    if math.prod(shape) * (EXAMPLES - 1) != math.prod(shape_of_fewer) * EXAMPLES:
        raise UsageError(f"model: {reference.text} drops in a tensor of shape {shape}, which does not follow the number of examples.")
    return -1


if __name__ == "__main__":
    main()
