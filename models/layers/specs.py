"""Parameters, buffers and cost of the layers of a model, gathered in the order in which the layers are named.

Names are torch's (``<layer>.weight``, ``<layer>.bias``, ``<layer>.running_mean`` …), so that a torch module of the same architecture
loads them. Initial values are those of torch's modules: for convolutions and dense layers uniform in ±1/√(fan in), weights and biases;
of sequence layers those of Transformers' reference implementations (`linear`, `embedding`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..base import ParameterSpec

__all__ = ["LayerSpecs", "convolved"]


def convolved(side: int, kernel: int, stride: int = 1, padding: int = 0) -> int:
    """Return the number of positions of a window of `kernel` pixels along `side` pixels, as for convolutions and pools (rounded down)."""
    return (side + 2 * padding - kernel) // stride + 1


@dataclass(slots=True)
class LayerSpecs:
    """Collects what a `ModelSpec` needs: `parameters` and `buffers` in order, `multiply_adds` of one example's forward pass.

    Of a model of sequences `multiply_adds` is that of one piece: each weight counts once.
    """

    parameters: list[ParameterSpec] = field(default_factory=list)
    buffers: list[ParameterSpec] = field(default_factory=list)
    multiply_adds: int = 0

    def conv(self, name: str, channels: tuple[int, int], kernel: int, positions: int) -> None:
        """Add a convolution with a bias, from `channels[0]` to `channels[1]`, whose output has `positions` pixels."""
        inputs, outputs = channels
        bound = 1.0 / math.sqrt(inputs * kernel**2)
        self.parameters += [
            ParameterSpec(f"{name}.weight", (outputs, inputs, kernel, kernel), bound=bound),
            ParameterSpec(f"{name}.bias", (outputs,), bound=bound),
        ]
        self.multiply_adds += positions * outputs * inputs * kernel**2

    def conv_fan_out(self, name: str, channels: tuple[int, int], kernel: int, positions: int) -> None:
        """Add a convolution without a bias whose weights are normal with variance 2 / fan out (He et al. 2015, for a ReLU)."""
        inputs, outputs = channels
        deviation = math.sqrt(2.0 / (outputs * kernel**2))
        self.parameters.append(ParameterSpec(f"{name}.weight", (outputs, inputs, kernel, kernel), deviation=deviation))
        self.multiply_adds += positions * outputs * inputs * kernel**2

    def dense(self, name: str, inputs: int, outputs: int) -> None:
        """Add a dense layer with a bias."""
        bound = 1.0 / math.sqrt(inputs)
        self.parameters += [
            ParameterSpec(f"{name}.weight", (outputs, inputs), bound=bound),
            ParameterSpec(f"{name}.bias", (outputs,), bound=bound),
        ]
        self.multiply_adds += inputs * outputs

    def linear(self, name: str, inputs: int, outputs: int, parts: int = 1, bias: bool = False) -> None:
        """Add the weight of `parts` products [outputs, inputs], one below the other, as `heads` cuts their results; and a bias of zeros.

        Uniform in ±√(6 / (inputs + outputs)) (Glorot and Bengio 2010), each part counted by itself.
        """
        self.parameters.append(ParameterSpec(f"{name}.weight", (parts * outputs, inputs), bound=math.sqrt(6.0 / (inputs + outputs))))
        if bias:
            self.parameters.append(ParameterSpec(f"{name}.bias", (parts * outputs,)))
        self.multiply_adds += parts * outputs * inputs

    def embedding(self, name: str, pieces: int, width: int, logits: bool = False) -> None:
        """Add a vector for each piece, normal with the deviation width^−½: looked up and times √width it has unit variance.

        To look it up takes no product; `logits` says that the layer of this name is the output's weight as well.
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
