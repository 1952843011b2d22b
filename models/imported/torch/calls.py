"""How columns of data become the arguments of a module's forward, or of its method ``loss``.

docs/your-own-model.md has the table of what a parameter gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ....core.errors import UsageError
from ....data.columns import LENGTHS
from ..requests import DataFacts, InputColumn

MASK = "mask"
Kind = Literal["values", "lengths", "mask", "attention_mask"]


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of forward: `columns` side by side, or what is made of one's lengths.

    `positional`: it cannot be passed by its name, or precedes all that are.
    """

    parameter: str
    columns: tuple[str, ...]
    kind: Kind = "values"
    positional: bool = True

    def value(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the argument for a batch, from tensors by name."""
        values = [tensors[name] for name in self.columns]
        if self.kind == "values":
            return values[0] if len(values) == 1 else torch.cat([x if x.ndim == 2 else x[:, None] for x in values], 1)
        lengths = tensors[self.columns[0] + LENGTHS]
        if self.kind == "lengths":
            return lengths
        inside = torch.arange(values[0].shape[1], device=lengths.device) < lengths[:, None]
        return inside.to(torch.int64) if self.kind == "attention_mask" else inside


def arguments_of(forward: Callable[..., Any], data: DataFacts, reference: str) -> list[Argument]:
    """Return what the parameters of forward get from the data's input columns.

    Raises UsageError for parameters that are no column, and columns that are no parameter.
    """
    parameters = [part for part in inspect.signature(forward).parameters.values() if part.kind is not part.VAR_KEYWORD]
    columns = {column.name: column for column in data.inputs}
    known: dict[str, tuple[tuple[str, ...], Kind]] = _from_lengths(data) | {name: ((name,), "values") for name in columns}
    matched = {part.name: known[part.name] for part in parameters if part.name in known}
    open_parameters = [part for part in parameters if part.name not in known]
    required = [part.name for part in open_parameters if part.default is part.empty and part.kind is not part.VAR_POSITIONAL]
    if any(kind == "values" for _, kind in matched.values()):
        only = None
    else:
        only = required.pop(0) if required else next((part.name for part in open_parameters), None)
    if required or (only is None and not matched):
        wrong = required[0] if required else "no parameter"
        raise UsageError.of(f"model: parameter of forward of {reference}", wrong, _listed(known), known)
    if only is not None:
        matched[only] = _side_by_side(list(columns.values()), reference), "values"
    arguments: list[Argument] = []
    for part in parameters:
        if part.name in matched:
            positional = part.kind is not part.KEYWORD_ONLY and len(arguments) == parameters.index(part)
            arguments.append(Argument(part.name, *matched[part.name], positional))
    return arguments


def _from_lengths(data: DataFacts) -> dict[str, tuple[tuple[str, ...], Kind]]:
    """Return the parameters that are made of a varying column's lengths, by name."""
    varying = [column.name for column in data.inputs if column.varies]
    made: dict[str, tuple[tuple[str, ...], Kind]] = {}
    for name in varying:
        prefixes = [f"{name}_", ""] if len(varying) == 1 else [f"{name}_"]
        for prefix in prefixes:
            made |= {f"{prefix}{kind}": ((name,), kind) for kind in ("lengths", "mask", "attention_mask")}
    return made


def _listed(known: Mapping[str, Any]) -> str:
    return f"{', '.join(known)}, or a single parameter of any name"


def _side_by_side(columns: Sequence[InputColumn], reference: str) -> tuple[str, ...]:
    names = tuple(column.name for column in columns)
    alike = all(column.dtype == "float32" and not column.varies and len(column.shape) <= 1 for column in columns)
    if len(columns) > 1 and not alike:
        shown = ", ".join(f"{column.name} ({column.dtype})" for column in columns)
        raise UsageError(
            f"model: forward of {reference} has one parameter for the columns {shown}, which cannot be joined; name its parameters after"
            " them."
        )
    return names


def has_loss(module: torch.nn.Module) -> bool:
    """Return whether a module's class has a method ``loss(self, columns)``."""
    method = getattr(type(module), "loss", None)
    return inspect.isfunction(method) and list(inspect.signature(method).parameters)[1:] == ["columns"]


def outputs_of(result: Any) -> Any:
    """Return the outputs in what forward returned.

    They are its ``logits``, the only element of a tuple, or all of it.
    """
    if isinstance(result, Mapping):
        return result.get("logits", result)
    if isinstance(result, tuple) and len(result) == 1:
        return result[0]
    return getattr(result, "logits", result)


class Call:
    """Calls a module with tensors of columns, in the order of `tensors`.

    `columns`: what it reads, in the data's order. The result is that of forward; of a module with its own `loss`, losses [batch, 1], after
    which an evaluation has the outputs if `measured`.
    """

    def __init__(self, module: torch.nn.Module, data: DataFacts, reference: str, *, measured: bool = False) -> None:
        self.module, self.measured = module, measured
        self.has_loss = has_loss(module)
        self._arguments = [] if self.has_loss and not measured else arguments_of(module.forward, data, reference)
        read = {name for argument in self._arguments for name in argument.columns}
        self.columns = [column.name for column in data.columns if self.has_loss or column.name in read]
        self.tensors = data.tensors(self.columns)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the result for a batch. Raises UsageError for losses of another shape."""
        named = dict(zip(self.tensors, tensors, strict=True))
        if not self.has_loss:
            outputs: torch.Tensor = self._forward(named)
            return outputs
        losses = self.module.loss(named)
        rows = tensors[0].shape[0]
        if not isinstance(losses, torch.Tensor) or losses.ndim > 1:
            shown = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise UsageError(f"model: its method loss returned {shown}; one loss per example, [batch], or their mean is needed.")
        losses_b1 = (losses.expand(rows) if losses.ndim == 0 else losses)[:, None]
        return losses_b1 if self.module.training or not self.measured else torch.cat([losses_b1, self._forward(named)], 1)

    def outputs(self, *tensors: torch.Tensor) -> Any:
        """Return what forward returns for a batch."""
        return self._forward(dict(zip(self.tensors, tensors, strict=True)))

    def _forward(self, named: Mapping[str, torch.Tensor]) -> Any:
        positional = [argument.value(named) for argument in self._arguments if argument.positional]
        by_name = {argument.parameter: argument.value(named) for argument in self._arguments if not argument.positional}
        return outputs_of(self.module(*positional, **by_name))
