"""Passes of a model on torch; see `passes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from ..base import ModelSpec
from ..imported.graph import Traced
from .passes import RATE, Array, Compute, serve


class Torch:
    """torch's `Framework`."""

    name = "torch"

    def tensor(self, array: Array) -> torch.Tensor:
        """Return an array as a tensor, whole numbers as int64."""
        return torch.from_numpy(array.astype(np.int64) if array.dtype.kind in "iu" else array)

    varying = tensor

    def array(self, tensor: Any) -> Array | None:
        """Return a tensor as an array; None for anything else."""
        return tensor.detach().numpy() if torch.is_tensor(tensor) else None

    def masked(self, x: torch.Tensor, kept: Array, rate: float) -> torch.Tensor:
        """Return x without the elements that are not kept, and the others divided by 1 − rate."""
        return x * torch.from_numpy(kept).to(x.dtype) / (1 - rate)

    def dropped(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        """Return x with elements dropped by torch's own random numbers."""
        return x * (torch.rand_like(x) >= rate) / (1 - rate)

    def variables(
        self, spec: ModelSpec, module: Any, values: Mapping[str, Array]
    ) -> tuple[Mapping[str, torch.Tensor], Sequence[torch.Tensor]]:
        """Return trained parameters as backends hold them, by name and in order."""
        leaves = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in values.items()}
        return leaves, list(leaves.values())

    def in_float64(self) -> AbstractContextManager[None]:
        """Return a context in which modules make their constants float64."""
        from ..imported.torch.float64_pass import default_float64

        return default_float64()

    def as_in_training(self, compute: Compute) -> Compute:
        """Return a function of parameters as training carries it out, which is as it is."""
        return compute

    def gradients(
        self, compute: Compute, parameters: Mapping[str, Array], slopes: Callable[[Sequence[int]], Array]
    ) -> tuple[torch.Tensor, dict[str, Array]]:
        """Return the result of `compute`, and the gradients of its product with `slopes`."""
        leaves = {name: torch.from_numpy(value).requires_grad_() for name, value in parameters.items()}
        result = compute(leaves)
        gradients = torch.autograd.grad(result, list(leaves.values()), torch.from_numpy(slopes(result.shape)), materialize_grads=True)
        return result, {name: gradient.numpy() for name, gradient in zip(leaves, gradients, strict=True)}

    def step(self, compute: Callable[[], torch.Tensor], trained: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Return a training step of SGD on the sum of `compute`'s result."""
        leaves = list(trained)

        def take() -> None:
            gradients = torch.autograd.grad(compute().sum(), leaves, materialize_grads=True)
            with torch.no_grad():
                torch._foreach_add_(leaves, gradients, alpha=-RATE)

        return take

    def float64_pass(self) -> Callable[..., tuple[Any, list[Traced]]]:
        """Import and return the function that computes imported models in float64."""
        from ..imported.torch.float64_pass import float64_pass

        return float64_pass


if __name__ == "__main__":
    torch.set_num_threads(1)  # times of several threads depend on what else runs
    serve(Torch())
