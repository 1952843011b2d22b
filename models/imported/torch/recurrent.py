"""Recurrent layers as operations of an exported graph, with dropout between them.

torch.export would unroll them to a fixed length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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


def rnn(
    x: torch.Tensor, h0: torch.Tensor, weights: list[torch.Tensor], layers: int, bidirectional: bool, nonlinearity: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for nn.RNN, as `gru`. `nonlinearity`: tanh or relu."""
    raise NotImplementedError


def _rnn_shapes(
    x: torch.Tensor, h0: torch.Tensor, weights: list[torch.Tensor], layers: int, bidirectional: bool, nonlinearity: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _gru_shapes(x, h0, weights, layers, bidirectional)


def lstm(
    x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, weights: list[torch.Tensor], layers: int, bidirectional: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stand for nn.LSTM, as `gru`; with a projection, `weights` has five tensors for each layer."""
    raise NotImplementedError


def _lstm_shapes(
    x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, weights: list[torch.Tensor], layers: int, bidirectional: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, last = _gru_shapes(x, h0, weights, layers, bidirectional)
    return y, last, torch.empty_like(c0)


torch.library.custom_op("crosstrain::gru", gru, mutates_args=()).register_fake(_gru_shapes)
torch.library.custom_op("crosstrain::rnn", rnn, mutates_args=()).register_fake(_rnn_shapes)
torch.library.custom_op("crosstrain::lstm", lstm, mutates_args=()).register_fake(_lstm_shapes)


@contextmanager
def as_operations(module: torch.nn.Module) -> Iterator[None]:
    """Within the block, recurrent layers are operations, and no layer works in place."""
    changed: list[tuple[torch.nn.Module, str, Any]] = []
    try:
        for part in module.modules():
            if getattr(part, "inplace", False) is True:
                changed.append((part, "inplace", True))
                part.inplace = False
            if isinstance(part, torch.nn.RNNBase):
                changed.append((part, "forward", part.__dict__.get("forward")))
                part.forward = partial(_recurrent, part, _as_operation)
        yield
    finally:
        for part, attribute, value in changed:
            if value is None:
                delattr(part, attribute)
            else:
                setattr(part, attribute, value)


def drop_between_layers(part: torch.nn.RNNBase) -> None:
    """Have a recurrent layer drop by F.dropout, where torch draws inside a single operation."""
    part.forward = partial(_recurrent, part, _by_torch)


Layers = Callable[[torch.nn.RNNBase, torch.Tensor, Sequence[torch.Tensor], range], tuple[torch.Tensor, ...]]


def _recurrent(part: torch.nn.RNNBase, run: Layers, x: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
    """Run a recurrent layer, with dropout between its parts as nn.RNNBase documents it."""
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"model: it cannot be translated: a packed sequence enters {type(part).__name__}. Pad the rows, and mask them.")
    x_btf = x if x.ndim == 3 else x.unsqueeze(0 if part.batch_first else 1)
    x_tbf = x_btf.transpose(0, 1) if part.batch_first else x_btf
    initial = () if state is None else state if isinstance(state, tuple) else (state,)
    states = [value if value.ndim == 3 else value.unsqueeze(1) for value in initial] or _zeros(part, x_tbf)
    drops = part.dropout > 0 and part.training
    ranges = [range(layer, layer + 1) for layer in range(part.num_layers)] if drops else [range(part.num_layers)]
    directions = 2 if part.bidirectional else 1
    ends: list[Sequence[torch.Tensor]] = []
    for layers in ranges:
        if layers.start:
            x_tbf = torch.nn.functional.dropout(x_tbf, part.dropout, training=True)
        begins = [value[layers.start * directions : layers.stop * directions] for value in states]
        x_tbf, *last = run(part, x_tbf, begins, layers)
        ends.append(last)
    y = x_tbf.transpose(0, 1) if part.batch_first else x_tbf
    lasts = [torch.cat(values) if len(values) > 1 else values[0] for values in zip(*ends, strict=True)]
    if x.ndim == 2:
        y, lasts = y.squeeze(0 if part.batch_first else 1), [value.squeeze(1) for value in lasts]
    return y, tuple(lasts) if isinstance(part, torch.nn.LSTM) else lasts[0]


def _zeros(part: torch.nn.RNNBase, x_tbf: torch.Tensor) -> list[torch.Tensor]:
    count = part.num_layers * (2 if part.bidirectional else 1)
    widths = [part.proj_size or part.hidden_size, part.hidden_size]
    return [x_tbf.new_zeros(count, x_tbf.shape[1], width) for width in widths[: 2 if isinstance(part, torch.nn.LSTM) else 1]]


def _weights(part: torch.nn.RNNBase, layers: range) -> list[list[torch.Tensor]]:
    directions = 2 if part.bidirectional else 1
    return list(part.all_weights)[layers.start * directions : layers.stop * directions]


def _as_operation(part: torch.nn.RNNBase, x_tbf: torch.Tensor, states: Sequence[torch.Tensor], layers: range) -> tuple[torch.Tensor, ...]:
    zeros = [] if part.bias else [x_tbf.new_zeros(part.weight_hh_l0.shape[0])] * 2
    weights = [weight for layer in _weights(part, layers) for weight in (*layer[:2], *zeros, *layer[2:])]
    operations = torch.ops.crosstrain
    if isinstance(part, torch.nn.LSTM):
        result = operations.lstm(x_tbf, *states, weights, len(layers), part.bidirectional)
    elif isinstance(part, torch.nn.GRU):
        result = operations.gru(x_tbf, *states, weights, len(layers), part.bidirectional)
    else:
        result = operations.rnn(x_tbf, *states, weights, len(layers), part.bidirectional, part.nonlinearity)
    return tuple(result)


def _by_torch(part: torch.nn.RNNBase, x_tbf: torch.Tensor, states: Sequence[torch.Tensor], layers: range) -> tuple[torch.Tensor, ...]:
    weights = [weight for layer in _weights(part, layers) for weight in layer]
    function = getattr(torch, part.mode.lower())  # torch.lstm, gru, rnn_tanh or rnn_relu
    state: Any = tuple(states) if isinstance(part, torch.nn.LSTM) else states[0]
    result = function(x_tbf, state, weights, part.bias, len(layers), 0.0, part.training, part.bidirectional, False)
    return tuple(result)
