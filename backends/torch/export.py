"""A trained model as plain torch reads it: a state_dict, and the forward pass as a program.

The names of the state_dict are the canonical ones, which for the models that torchvision has are torchvision's.
"""

from __future__ import annotations

import torch

from ...core.plugins import forward_plugin, load
from ...models.base import ForwardContext
from ..export import Export

__all__ = ["export"]

EXAMPLE_BATCH = 2
"""Batch size of the example that the program is traced with; torch.export would take 0 and 1 for fixed sizes."""


def export(request: Export) -> None:
    """Write ``state_dict.pt`` and ``program.pt2``."""
    module = _Trained(request)
    torch.save(dict(module.state_dict()), request.folder / "state_dict.pt")
    example = torch.zeros(EXAMPLE_BATCH, *request.model.input_shape)
    program = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, request.folder / "program.pt2")


class _Trained(torch.nn.Module):  # type: ignore[misc]
    """The model's forward pass over its trained values, each under its canonical name in the tree of modules."""

    def __init__(self, request: Export) -> None:
        super().__init__()
        self._forward = load(forward_plugin(request.model_name, "torch"), "forward").forward
        self._settings = request.model.settings
        self._parameter_names = list(request.parameters)
        self._buffer_names = list(request.buffers)
        for name, value in request.parameters.items():
            parent, leaf = self._place(name)
            parent.register_parameter(leaf, torch.nn.Parameter(torch.tensor(value), requires_grad=False))
        for name, value in request.buffers.items():
            parent, leaf = self._place(name)
            parent.register_buffer(leaf, torch.tensor(value))
            if leaf == "running_mean":  # torch's own layers of batch normalisation count their batches beside it
                parent.register_buffer("num_batches_tracked", torch.tensor(request.updates))

    def _place(self, name: str) -> tuple[torch.nn.Module, str]:
        """Return the module that holds what is called `name`, made where it is missing, and the last part of the name."""
        *path, leaf = name.split(".")
        module: torch.nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        return module, leaf

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        """Return logits_bk of normalised images."""
        parameters = {name: self.get_parameter(name) for name in self._parameter_names}
        buffers = {name: self.get_buffer(name) for name in self._buffer_names}
        return self._forward(parameters, x_bchw, ForwardContext(training=False, buffers=buffers, settings=self._settings))
