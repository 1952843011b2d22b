"""Layers one by one on torch; see `backends.replay`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...core.job import Job
from ...data.base import Dataset
from ...data.sampler import Batches
from ...models.base import Array, ForwardContext, ModelSpec
from ..vectors import columns_by_name, only_or_named
from .data import resident_splits
from .model import Model


class TorchPass:
    """torch's `ReplayedPass`."""

    images_last = False

    def __init__(self, job: Job, spec: ModelSpec, data: Dataset, parameters: Mapping[str, Array], buffers: Mapping[str, Array]) -> None:
        torch.set_num_threads(job.threads or 1)
        leaves = [torch.nn.Parameter(torch.from_numpy(parameters[parameter.name])) for parameter in spec.parameters]
        self._spec, self._data = spec, resident_splits(job, spec, data, torch.device("cpu"))["train"]
        self._model = Model(job, spec, 0, leaves, [torch.from_numpy(buffers[buffer.name]) for buffer in spec.buffers])

    def columns(self, batches: Batches) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return inputs and target; see `ReplayedPass`."""
        x, y = next(iter(self._data.blocks(batches)))[0]
        return columns_by_name(self._spec.inputs, x, self.array), columns_by_name((self._spec.target,), y, self.array)

    def forward(self, batches: Batches, context_layers: Callable[[Any], Any], step: int) -> ForwardContext[Any]:
        """Carry the forward function out; see `ReplayedPass`."""
        x, _ = next(iter(self._data.blocks(batches)))[0]
        context = self._model.passes.training(step, batches, 0)
        context.layers = context_layers
        self._model.forward(x, context)
        return context

    def tensor(self, array: Array) -> torch.Tensor:
        """Return an array as a tensor."""
        return torch.from_numpy(np.array(array))

    def array(self, tensor: torch.Tensor) -> Array:
        """Return a tensor as an array, of low formats as float32."""
        tensor = tensor.detach()
        return np.asarray((tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy())

    def like(self, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the number format of another."""
        return tensor.to(result.dtype)

    def derived(
        self,
        compute: Callable[[Sequence[torch.Tensor]], Any],
        inputs: Sequence[torch.Tensor],
        parameters: Sequence[str],
        slopes: Sequence[torch.Tensor],
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Mapping[str, Array]]:
        """Return results and derivatives; see `ReplayedPass`."""
        leaves = [tensor.requires_grad_() for tensor in inputs]
        weights = [self._model.named[name] for name in parameters]
        with torch.enable_grad():
            result = compute([leaf.clone() for leaf in leaves])
        outputs = result if isinstance(result, tuple) else (result,)
        if not slopes or not (leaves or weights):
            return outputs, [], {}
        wanted = [slope.to(output.dtype) for slope, output in zip(slopes, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, [*leaves, *weights], wanted, materialize_grads=True, allow_unused=True)
        by_parameters = {name: self.array(part) for name, part in zip(parameters, gradients[len(leaves) :], strict=True)}
        return outputs, gradients[: len(leaves)], by_parameters

    def nodes(self, batches: Batches, step: int, tape_arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Compute the nodes of an imported model's graph; see `ReplayedPass`."""
        from ...models.imported.torch.nodes import replayed_nodes

        x, _ = next(iter(self._data.blocks(batches)))[0]
        inputs = [x[name] for name in self._spec.settings.inputs] if isinstance(x, dict) else [x]
        return replayed_nodes(
            self._spec.settings, self._model.named, inputs, self._model.passes.training(step, batches, 0), dict(tape_arrays)
        )

    def loss(self, logits: torch.Tensor, target: Mapping[str, Array]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of losses and its slope."""
        y = only_or_named(
            {name: self.tensor(value.astype(np.int64) if value.dtype.kind in "iu" else value) for name, value in target.items()}
        )
        leaf = logits.requires_grad_()
        total = self._model.sum_of_losses(leaf, y, self._model.passes.separate_training())
        return total, torch.autograd.grad(total, leaf)[0]
