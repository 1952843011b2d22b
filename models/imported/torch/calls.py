"""How columns of data become the arguments of a module's forward, or of its method ``loss``.

docs/your-own-model.md has the table of what a parameter gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....core.errors import UsageError
from ....data.columns import LENGTHS
from ..inputs import Argument, arguments_of
from ..requests import DataFacts


def value_of(argument: Argument, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return an argument for a batch, from tensors by name."""
    values = [tensors[name] for name in argument.columns]
    if argument.kind == "values":
        return values[0] if len(values) == 1 else torch.cat([x if x.ndim == 2 else x[:, None] for x in values], 1)
    lengths = tensors[argument.columns[0] + LENGTHS]
    if argument.kind == "lengths":
        return lengths
    inside = torch.arange(values[0].shape[1], device=lengths.device) < lengths[:, None]
    return inside.to(torch.int64) if argument.kind == "attention_mask" else inside


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
        self._arguments = (
            []
            if self.has_loss and not measured
            else arguments_of(inspect.signature(module.forward).parameters.values(), data, f"forward of {reference}")
        )
        read = {name for argument in self._arguments for name in argument.columns}
        self.columns = [column.name for column in data.columns if self.has_loss or column.name in read]
        self.tensors = data.tensors(self.columns)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the result for a batch. Raises UsageError for losses of another shape."""
        named = self._copied(tensors)
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
        return self._forward(self._copied(tensors))

    def _copied(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies by name, as a module may work in place on what it gets."""
        return {name: tensor.clone() for name, tensor in zip(self.tensors, tensors, strict=True)}

    def _forward(self, named: Mapping[str, torch.Tensor]) -> Any:
        positional = [value_of(argument, named) for argument in self._arguments if argument.positional]
        by_name = {argument.parameter: value_of(argument, named) for argument in self._arguments if not argument.positional}
        return outputs_of(self.module(*positional, **by_name))
