"""Recurrent layers as single operations of an exported graph.

torch.export would unroll them to a fixed length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ....core.errors import UsageError


def gru(
    x: torch.Tensor, h0: torch.Tensor, weights: list[torch.Tensor], layers: int, bidirectional: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for nn.GRU on x [time, batch, features] in exported graphs; never computed by torch."""
    raise NotImplementedError


def _gru_shapes(
    x: torch.Tensor, h0: torch.Tensor, weights: list[torch.Tensor], layers: int, bidirectional: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], x.shape[1], h0.shape[2] * (2 if bidirectional else 1)), torch.empty_like(h0)


def lstm(
    x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, weights: list[torch.Tensor], layers: int, bidirectional: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stand for nn.LSTM on x [time, batch, features] in exported graphs.

    torch never computes it.
    """
    raise NotImplementedError


def _lstm_shapes(
    x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, weights: list[torch.Tensor], layers: int, bidirectional: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = h0.shape[2] * (2 if bidirectional else 1)
    return x.new_empty(x.shape[0], x.shape[1], width), torch.empty_like(h0), torch.empty_like(c0)


torch.library.custom_op("crosstrain::gru", gru, mutates_args=()).register_fake(_gru_shapes)
torch.library.custom_op("crosstrain::lstm", lstm, mutates_args=()).register_fake(_lstm_shapes)


@contextmanager
def as_operations(module: torch.nn.Module) -> Iterator[None]:
    """Within the block, each recurrent layer is one operation, and no layer works in place.

    Raises UsageError for unsupported layers.
    """
    changed: list[tuple[torch.nn.Module, str, Any]] = []
    try:
        for name, part in module.named_modules():
            if getattr(part, "inplace", False) is True:
                changed.append((part, "inplace", True))
                part.inplace = False
            if isinstance(part, torch.nn.RNNBase):
                _refuse_unsupported(name, part)
                changed.append((part, "forward", None))
                part.forward = (_lstm_forward if isinstance(part, torch.nn.LSTM) else _gru_forward).__get__(part)
        yield
    finally:
        for part, attribute, value in changed:
            if value is None:
                delattr(part, attribute)
            else:
                setattr(part, attribute, value)


def _refuse_unsupported(name: str, part: torch.nn.RNNBase) -> None:
    kind = type(part).__name__
    if not isinstance(part, torch.nn.GRU | torch.nn.LSTM):
        raise UsageError(f"model: it cannot be translated: the layer {name!r} is a {kind}. Use nn.GRU or nn.LSTM.")
    if part.dropout:
        raise UsageError(
            f"model: it cannot be translated: the {kind} {name!r} has dropout between its layers. Use one layer each, and nn.Dropout."
        )
    if part.proj_size:
        raise UsageError(f"model: it cannot be translated: the {kind} {name!r} has a projection (proj_size).")


def _initial(part: torch.nn.RNNBase, x_tbf: torch.Tensor) -> torch.Tensor:
    return x_tbf.new_zeros(part.num_layers * (2 if part.bidirectional else 1), x_tbf.shape[1], part.hidden_size)


def _weights(part: torch.nn.RNNBase) -> list[torch.Tensor]:
    zeros = torch.zeros(part.weight_hh_l0.shape[0])
    return [weight for layer in part.all_weights for weight in (layer if part.bias else [*layer, zeros, zeros])]


def _gru_forward(self: torch.nn.GRU, x: torch.Tensor, h0: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    x_tbf = x.transpose(0, 1) if self.batch_first else x
    y_tbh, last = torch.ops.crosstrain.gru(
        x_tbf, _initial(self, x_tbf) if h0 is None else h0, _weights(self), self.num_layers, self.bidirectional
    )
    return (y_tbh.transpose(0, 1) if self.batch_first else y_tbh), last


def _lstm_forward(
    self: torch.nn.LSTM, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    x_tbf = x.transpose(0, 1) if self.batch_first else x
    h0, c0 = (_initial(self, x_tbf), _initial(self, x_tbf)) if state is None else state
    y_tbh, last, cells = torch.ops.crosstrain.lstm(x_tbf, h0, c0, _weights(self), self.num_layers, self.bidirectional)
    return (y_tbh.transpose(0, 1) if self.batch_first else y_tbh), (last, cells)
