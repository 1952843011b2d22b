"""Passes of Keras models on torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from ...base import ForwardContext
from ..description import Imported
from ..keras.library import Drop
from ..keras.passes import bound, on_its_own
from ..keras.single_layers import Pull, SingleLayers


def keras_pass(
    imported: Imported,
    parameters: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    context: ForwardContext[torch.Tensor],
    drop: Drop | None,
    floats: str = "float32",
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the result for a batch, and new values of buffers; see `Bound`.

    `floats`: the format of the tensors.
    """
    model = bound(imported, "torch", floats)
    with model.keras.device(str(inputs[0].device)):
        result, updated = model(parameters, context.buffers, inputs, drop, training=context.training)
    return result, {name: value.detach() for name, value in updated.items()}


def plain_keras(imported: Imported) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """Return the user's model as Keras trains it, and the tensors that its training changes."""
    call = on_its_own(imported, "torch")

    def train(*inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = call(*inputs, training=True)
        return result

    return train, [weight.value for weight in call.model.trainable_weights]


def without_gradient(compute: Callable[[], torch.Tensor], values: Sequence[torch.Tensor]) -> list[bool]:
    """Return of each value whether the sum of a result does not depend on it."""
    return [gradient is None for gradient in torch.autograd.grad(compute().sum(), values, allow_unused=True)]


def multiply_adds(compute: Callable[[], torch.Tensor]) -> int:
    """Return the multiply-adds of a computation, as torch counts them."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        compute()
    return int(counter.get_total_flops() // 2)


class _Derivatives:
    """Derivatives of the parts of a pass; see `keras.single_layers`."""

    def leaf(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach().clone().requires_grad_()

    def part(self, compute: Callable[[], Sequence[torch.Tensor]], leaves: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Pull]:
        results = compute()
        return results, lambda slopes: self.whole(results, slopes, leaves)

    def whole(
        self, results: Sequence[torch.Tensor], slopes: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        pairs = [(part, slope) for part, slope in zip(results, slopes, strict=True) if slope is not None and part.requires_grad]
        if not pairs or not leaves:
            return [None] * len(leaves)
        parts, given_slopes = zip(*pairs, strict=True)
        gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(parts, leaves, given_slopes, retain_graph=True, allow_unused=True)
        return gradients


def single_layers(
    imported: Imported,
    parameters: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    context: ForwardContext[torch.Tensor],
    drop: Drop | None,
    tape: Mapping[str, NDArray[Any]] | None = None,
    moved: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[SingleLayers, torch.Tensor]:
    """Carry each layer of a training pass out by itself, in float64 or from a tape.

    Returns them, and the result.
    """
    floats = "float64" if tape is None or moved is not None else "float32"
    layers = SingleLayers("torch", _Derivatives(), bound(imported, "torch", floats).names, tape, moved)
    with layers.observing(), torch.enable_grad():
        result, _ = keras_pass(imported, parameters, inputs, context, drop, floats)
    layers.end(result)
    return layers, result
