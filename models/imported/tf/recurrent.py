"""Recurrent layers on TensorFlow; x [time, batch, features].

Their operations are those of `models.imported.torch.recurrent`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from .operations import Pass, canonical, operation

Step = Callable[[tf.Tensor, list[tf.Tensor]], list[tf.Tensor]]  # (projected input, state) -> new state, the output first


def _scanned(projected_tbg: tf.Tensor, state: list[tf.Tensor], step: Step, backwards: bool) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return all outputs [time, batch, width] and the last state."""
    time = tf.shape(projected_tbg)[0]
    inputs = tf.TensorArray(projected_tbg.dtype, time).unstack(projected_tbg)
    outputs = tf.TensorArray(projected_tbg.dtype, time)

    def body(number: tf.Tensor, outputs: tf.TensorArray, *state: tf.Tensor) -> tuple[Any, ...]:
        place = time - 1 - number if backwards else number
        new = step(inputs.read(place), list(state))
        return number + 1, outputs.write(place, new[0]), *new

    _, outputs, *last = tf.while_loop(lambda number, *_: number < time, body, (0, outputs, *state))
    return outputs.stack(), list(last)


def _layers(
    x_tbf: tf.Tensor,
    states: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    layers: int,
    bidirectional: bool,
    cell: Callable[..., Step],
    bias: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Run all layers and directions.

    `states`: initial values [layers · directions, batch, width] of each part of the state.
    """
    directions = 2 if bidirectional else 1
    count = len(weights) // (layers * directions)
    ends: list[list[tf.Tensor]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            input_weight, hidden_weight, input_bias, hidden_bias, *projection = weights[count * place : count * (place + 1)]
            projected = tf.einsum("tbf,gf->tbg", x_tbf, input_weight) + bias(input_bias, hidden_bias)
            y, last = _scanned(projected, [state[place] for state in states], cell(hidden_weight, hidden_bias, *projection), direction == 1)
            y.set_shape([x_tbf.shape[0], x_tbf.shape[1], hidden_weight.shape[1]])
            outputs.append(y)
            ends.append(last)
        x_tbf = outputs[0] if directions == 1 else tf.concat(outputs, -1)
    return x_tbf, [tf.stack(parts) for parts in zip(*ends, strict=True)]


@operation("crosstrain.gru.default")
def _gru(run: Pass, x: Any, h0: Any, weights: Sequence[Any], layers: int, bidirectional: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute a GRU: gates r, z, n, with n = tanh(x_n + r · (W_hn h + b_hn)).

    https://docs.pytorch.org/docs/stable/generated/torch.nn.GRU.html
    """

    def cell(hidden_weight: tf.Tensor, hidden_bias: tf.Tensor) -> Step:
        def step(projected_bg: tf.Tensor, state: list[tf.Tensor]) -> list[tf.Tensor]:
            (hidden,) = state
            hidden_r, hidden_z, hidden_n = tf.split(tf.matmul(hidden, hidden_weight, transpose_b=True) + hidden_bias, 3, -1)
            input_r, input_z, input_n = tf.split(projected_bg, 3, -1)
            reset, update = tf.sigmoid(input_r + hidden_r), tf.sigmoid(input_z + hidden_z)
            candidate = tf.tanh(input_n + reset * hidden_n)
            return [candidate + update * (hidden - candidate)]

        return step

    y, (last,) = _layers(canonical(x), [canonical(h0)], weights, layers, bidirectional, cell, lambda input_bias, _: input_bias)
    return y, last


def _both(input_bias: tf.Tensor, hidden_bias: tf.Tensor) -> tf.Tensor:
    return input_bias + hidden_bias


@operation("crosstrain.rnn.default")
def _rnn(
    run: Pass, x: Any, h0: Any, weights: Sequence[Any], layers: int, bidirectional: bool, nonlinearity: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute h = tanh(x_h + W_hh h), or with ReLU.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.RNN.html
    """
    activate = tf.tanh if nonlinearity == "tanh" else tf.nn.relu

    def cell(hidden_weight: tf.Tensor, hidden_bias: tf.Tensor) -> Step:
        return lambda projected_bh, state: [activate(projected_bh + tf.matmul(state[0], hidden_weight, transpose_b=True))]

    y, (last,) = _layers(canonical(x), [canonical(h0)], weights, layers, bidirectional, cell, _both)
    return y, last


@operation("crosstrain.lstm.default")
def _lstm(
    run: Pass, x: Any, h0: Any, c0: Any, weights: Sequence[Any], layers: int, bidirectional: bool
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Compute an LSTM: gates i, f, g, o, and a projection h = W_hr h.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html
    """

    def cell(hidden_weight: tf.Tensor, hidden_bias: tf.Tensor, projection: tf.Tensor | None = None) -> Step:
        def step(projected_bg: tf.Tensor, state: list[tf.Tensor]) -> list[tf.Tensor]:
            hidden, memory = state
            entering, kept, candidate, shown = tf.split(projected_bg + tf.matmul(hidden, hidden_weight, transpose_b=True), 4, -1)
            memory = tf.sigmoid(kept) * memory + tf.sigmoid(entering) * tf.tanh(candidate)
            output = tf.sigmoid(shown) * tf.tanh(memory)
            return [output if projection is None else tf.matmul(output, projection, transpose_b=True), memory]

        return step

    y, (last, cells) = _layers(canonical(x), [canonical(h0), canonical(c0)], weights, layers, bidirectional, cell, _both)
    return y, last, cells
