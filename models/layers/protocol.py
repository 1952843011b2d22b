"""Interfaces of every framework's layers, and specs of their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..base import ForwardContext, ParameterSpec


class _Pass(Protocol):
    _parameters: Mapping[str, Any]
    _context: ForwardContext[Any]

    def __init__(self, parameters: Mapping[str, Any], context: ForwardContext[Any]) -> None:
        self._parameters, self._context = parameters, context


class NetworkLayers(_Pass, Protocol):
    """Image layers of one forward pass; those with weights take their parameters' name.

    Images enter through `images` and have any layout until `flatten`, `dense` or `logits`; features are in canonical order. A batch may be
    empty.
    """

    def images(self, x_bchw: Any) -> Any:
        """Convert canonical images [b, c, h, w] to the layout of the other layers."""

    def enlarge(self, x: Any, height: int, width: int) -> Any:
        """Resize bilinearly, with half-pixel centres; edges are extended."""

    def conv(self, x: Any, name: str, stride: int = 1, padding: int = 0) -> Any:
        """Cross-correlate, padded with zeros; add the bias if there is one."""

    def conv_pool(self, x: Any, name: str, kernel: int, stride: int, padding: int = 0) -> Any:
        """Apply convolution, bias, ReLU and max pooling.

        Bias and ReLU may come last, on fewer elements.
        """

    def relu(self, x: Any) -> Any:
        """Return max(x, 0); x itself may be overwritten."""

    def max_pool(self, x: Any, kernel: int, stride: int, padding: int = 0) -> Any:
        """Take the maximum of each window that fits within the padding."""

    def average_pool(self, x: Any, side: int) -> Any:
        """Average to `side` × `side` pixels.

        Output i of n covers pixels ⌊i·n/side⌋ … ⌈(i+1)·n/side⌉ − 1.
        """

    def flatten(self, x: Any) -> Any:
        """Return images as features [b, c·h·w]."""

    def dense(self, x: Any, name: str) -> Any:
        """Multiply features (or an image, as features) by the weight and add the bias."""

    def dropout(self, x_bf: Any, rate: float, layer: int) -> Any:
        """Drop at random while training; `layer` numbers the model's dropout layers."""
        return self._context.dropout(x_bf, rate, layer)

    def batch_norm(self, x: Any, name: str) -> Any:
        """Normalise each channel by the batch while training, else by the running statistics."""

    def logits(self, x_bk: Any) -> Any:
        """Return the last layer's result as float32."""


class SequenceNetworkLayers(_Pass, Protocol):
    """Sequence layers of one forward pass; those with weights take their parameters' name.

    Shapes: tokens_bt [batch, time]; x_btd [batch, time, width]; heads x_bhte [batch, heads, time, width of a head]. Batch and time may be
    empty. Results at padding are undefined and reach no other position.
    Matrix products use the context's number format. Results are float32, except with `low`, which keeps the format of products for a
    following product; `heads`, `appended` and `dropout` keep their input's format. `rate` is a dropout's probability, `layer` its number
    within the model.
    """

    def embedding(self, tokens_bt: Any, name: str) -> Any:
        """Return x_btd: rows of ``<name>.weight`` [pieces, width] times √width, zeros for padding."""

    def positions(self, x_btd: Any, start: Any = 0) -> Any:
        """Add the codes sin(p·f_i), then cos(p·f_i), of positions p counted from `start`.

        f_i = 10000^(−i / (width/2 − 1)), i from 0 to width/2 − 1 (Vaswani et al. 2017, in tensor2tensor's layout).
        """

    def shifted(self, tokens_bt: Any, first: int) -> Any:
        """Shift the tokens one place to the right, with `first` at the beginning."""

    def attended(self, lengths_b: Any, tokens_bt: Any) -> Any:
        """Return the boolean mask for `attention` of positions within their example, True to attend."""

    def layer_norm(self, x_btd: Any, name: str) -> Any:
        """Normalise each position to mean 0 and variance 1 (plus 1e-6), then scale and shift."""

    def linear(self, x_btd: Any, name: str, *, low: bool = False) -> Any:
        """Multiply by ``<name>.weight`` [out, in]: x_bto."""
        y_bto = self._product(x_btd, name)
        return y_bto if low else self._float32(y_bto)

    def dense(self, x_btd: Any, name: str) -> Any:
        """Multiply by ``<name>.weight`` [out, in] and add ``<name>.bias``."""
        return self._float32(self._product(x_btd, name, biased=True))

    def dense_relu(self, x_btd: Any, name: str, *, low: bool = False) -> Any:
        """Return max(0, `dense`)."""

    def heads(self, x_btd: Any, parts: int, count: int) -> tuple[Any, ...]:
        """Split the width into `parts`, and each into `count` heads: a tuple of x_bhte."""

    def attention(
        self,
        query_bhqe: Any,
        key_bhke: Any,
        value_bhke: Any,
        mask: Any,
        rate: float,
        layer: int,
        *,
        causal: bool = False,
        low: bool = False,
    ) -> Any:
        """Return softmax(query · key / √e) · value, heads concatenated, [batch, query, width].

        `mask`: from `attended`, or any boolean that broadcasts to [batch, heads, query time, key time], True to attend; None for all keys.
        `causal`: query i also attends only to keys up to i. Dropout applies to the softmax. Each query needs a key. Raises UsageError for
        other masks.
        """

    def appended(self, before: Any, new: Any) -> Any:
        """Concatenate two x_bhte of one format along time."""

    def dropout(self, x_btd: Any, rate: float, layer: int) -> Any:
        """Drop at random while training."""
        return self._context.dropout(x_btd, rate, layer) if rate else x_btd

    def logits(self, x_btd: Any, name: str) -> Any:
        """Multiply by ``<name>.weight`` [pieces, width]: logits_btv."""
        return self.linear(x_btd, name)

    def _product(self, x_btd: Any, name: str, *, biased: bool = False) -> Any:
        """Return the product with a weight, plus the bias, in the format of products."""

    def _float32(self, x: Any) -> Any:
        """Return x as float32."""


def forward_of(layers: Callable[..., Any], network: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return the forward function of an image model: its `network` over a framework's `layers`."""

    def forward(parameters: Mapping[str, Any], x_bchw: Any, context: ForwardContext[Any]) -> Any:
        """Return logits_bk."""
        return network(context.layers(layers(parameters, context)), x_bchw)

    return forward


def convolved(side: int, kernel: int, stride: int = 1, padding: int = 0) -> int:
    """Return the number of window positions along `side` pixels, for convolutions and pools."""
    return (side + 2 * padding - kernel) // stride + 1


@dataclass(slots=True)
class LayerSpecs:
    """Collects `parameters`, `buffers` and `multiply_adds` of a `ModelSpec`, layer by layer.

    Names and initial values are torch's, so a torch module of the same architecture loads them; `linear` and `embedding` follow the
    Transformer's reference. For sequences `multiply_adds` is per piece: each weight counts once.
    """

    parameters: list[ParameterSpec] = field(default_factory=list)
    buffers: list[ParameterSpec] = field(default_factory=list)
    multiply_adds: int = 0

    def conv(self, name: str, channels: tuple[int, int], kernel: int, positions: int) -> None:
        """Add a convolution with a bias, from `channels[0]` to `channels[1]`.

        `positions`: output pixels.
        """
        inputs, outputs = channels
        bound = 1.0 / math.sqrt(inputs * kernel**2)
        self.parameters += [
            ParameterSpec(f"{name}.weight", (outputs, inputs, kernel, kernel), bound=bound),
            ParameterSpec(f"{name}.bias", (outputs,), bound=bound),
        ]
        self.multiply_adds += positions * outputs * inputs * kernel**2

    def conv_fan_out(self, name: str, channels: tuple[int, int], kernel: int, positions: int) -> None:
        """Add a convolution without bias, normal with variance 2 / fan out.

        He et al. 2015, for a ReLU.
        """
        inputs, outputs = channels
        deviation = math.sqrt(2.0 / (outputs * kernel**2))
        self.parameters.append(ParameterSpec(f"{name}.weight", (outputs, inputs, kernel, kernel), deviation=deviation))
        self.multiply_adds += positions * outputs * inputs * kernel**2

    def dense(self, name: str, inputs: int, outputs: int) -> None:
        """Add a dense layer with a bias, uniform in ±1/√(fan in)."""
        bound = 1.0 / math.sqrt(inputs)
        self.parameters += [
            ParameterSpec(f"{name}.weight", (outputs, inputs), bound=bound),
            ParameterSpec(f"{name}.bias", (outputs,), bound=bound),
        ]
        self.multiply_adds += inputs * outputs

    def linear(self, name: str, inputs: int, outputs: int, parts: int = 1, bias: bool = False) -> None:
        """Add `parts` stacked weights and a bias of 0.

        Uniform in ±√(6 / (inputs + outputs)) (Glorot and Bengio 2010).
        """
        self.parameters.append(ParameterSpec(f"{name}.weight", (parts * outputs, inputs), bound=math.sqrt(6.0 / (inputs + outputs))))
        if bias:
            self.parameters.append(ParameterSpec(f"{name}.bias", (parts * outputs,)))
        self.multiply_adds += parts * outputs * inputs

    def embedding(self, name: str, pieces: int, width: int, logits: bool = False) -> None:
        """Add a vector per piece with std width^−½, unit variance times √width.

        `logits`: also the output's weight.
        """
        self.parameters.append(ParameterSpec(f"{name}.weight", (pieces, width), deviation=width**-0.5))
        self.multiply_adds += pieces * width if logits else 0

    def layer_norm(self, name: str, width: int) -> None:
        """Add layer normalisation: scale 1, shift 0."""
        self.parameters += [ParameterSpec(f"{name}.weight", (width,), constant=1.0), ParameterSpec(f"{name}.bias", (width,))]

    def batch_norm(self, name: str, channels: int) -> None:
        """Add batch normalisation: scale 1, shift 0, running mean 0, running variance 1."""
        self.parameters += [ParameterSpec(f"{name}.weight", (channels,), constant=1.0), ParameterSpec(f"{name}.bias", (channels,))]
        self.buffers += [
            ParameterSpec(f"{name}.running_mean", (channels,)),
            ParameterSpec(f"{name}.running_var", (channels,), constant=1.0),
        ]
