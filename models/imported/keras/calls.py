"""How columns of data become the inputs of a Keras model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ....core.errors import UsageError
from ....data.base import IMAGE
from ....data.columns import LENGTHS
from ..inputs import Argument, arguments_of
from ..requests import DataFacts


class Call:
    """Calls a model with tensors of columns, in the order of `tensors`.

    `columns`: what it reads, in the data's order. Images come channels first, and the model gets them channels last, without the channel
    where its input has none.
    """

    def __init__(self, keras: Any, model: Any, data: DataFacts, reference: str) -> None:
        self._keras, self.model = keras, model
        inputs = list(getattr(model, "inputs", None) or ())  # of a model that knows its inputs
        self._structure = model.input if inputs and not isinstance(model, keras.Sequential) else None
        self._ranks = [len(part.shape) for part in inputs]
        known = inspect.signature(model.call).parameters
        self._takes_training = bool(inputs) or "training" in known
        if inputs:
            parameters = [inspect.Parameter(_identifier(part.name), inspect.Parameter.POSITIONAL_OR_KEYWORD) for part in inputs]
        else:
            parameters = [part for name, part in known.items() if name not in ("training", "mask")]
        owner = f"the inputs of {reference}" if inputs else f"call of {reference}"
        self._arguments = arguments_of(parameters, data, owner)
        if inputs and len(self._arguments) < len(inputs):
            missing = next(part.name for part in parameters if part.name not in {argument.parameter for argument in self._arguments})
            raise UsageError(f"model: the input {missing!r} of {reference} is no column of the data.")
        if inputs:
            _refuse_rounding(inputs, self._arguments, data, reference)
        read = {name for argument in self._arguments for name in argument.columns}
        self.columns = [column.name for column in data.columns if column.name in read]
        self.tensors = data.tensors(self.columns)

    def __call__(self, *tensors: Any, training: bool) -> Any:
        """Return the result for a batch."""
        named = dict(zip(self.tensors, tensors, strict=True))
        values = [self._value(position, argument, named) for position, argument in enumerate(self._arguments)]
        if self._structure is not None:
            return self.model(self._keras.tree.pack_sequence_as(self._structure, values), training=training)
        positional = [value for argument, value in zip(self._arguments, values, strict=True) if argument.positional]
        by_name = {argument.parameter: value for argument, value in zip(self._arguments, values, strict=True) if not argument.positional}
        return self.model(*positional, **by_name, **({"training": training} if self._takes_training else {}))

    def _value(self, position: int, argument: Argument, tensors: Mapping[str, Any]) -> Any:
        ops = self._keras.ops
        values = [tensors[name] for name in argument.columns]
        if argument.kind == "values" and argument.columns == (IMAGE,):
            rank = self._ranks[position] if self._ranks else 4
            return values[0][:, 0] if rank == 3 and values[0].shape[1] == 1 else ops.transpose(values[0], (0, 2, 3, 1))
        if argument.kind == "values":
            return values[0] if len(values) == 1 else ops.concatenate([x if len(x.shape) == 2 else x[:, None] for x in values], 1)
        lengths = tensors[argument.columns[0] + LENGTHS]
        if argument.kind == "lengths":
            return lengths
        inside = ops.arange(ops.shape(values[0])[1], dtype=lengths.dtype) < lengths[:, None]
        return ops.cast(inside, "int32") if argument.kind == "attention_mask" else inside


def _refuse_rounding(inputs: Sequence[Any], arguments: Sequence[Argument], data: DataFacts, reference: str) -> None:
    """Raise UsageError for an input of whole numbers that gets others."""
    floats = {column.name for column in data.columns if column.dtype == "float32" or column.name == IMAGE}
    for part, argument in zip(inputs, arguments, strict=True):
        if argument.kind == "values" and floats & {*argument.columns} and "float" not in str(part.dtype):
            raise UsageError(f"model: the input {part.name!r} of {reference} is {part.dtype}, and gets float32. Leave its dtype out.")


def _identifier(name: str) -> str:
    return re.sub(r"\W|^(?=\d)", "_", name)
