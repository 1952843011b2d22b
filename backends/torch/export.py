"""Export for plain torch: a state_dict by canonical names, the forward pass as a program.

The names are torchvision's, for its models.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._dynamo.exc import UserError

from ...core.errors import UsageError
from ...core.plugins import forward_plugin, load
from ...data.columns import LENGTHS
from ...data.text import END, PADDING
from ...models.base import ForwardContext
from ...models.decoding import GREEDY
from ..export import LOGITS, Export
from .data import Columns
from .decoding import greedy

EXAMPLE_BATCH, EXAMPLE_LENGTH = 2, 7  # torch.export would take 0 and 1 as fixed


def export(request: Export) -> None:
    """Write ``state_dict.pt`` and ``program.pt2``.

    A translating model's program holds a greedy search.
    """
    translates = request.model.objective.translation is not None
    module = _Translating(request) if translates else _Trained(request)
    canonical = {place: name for name, place in module.places.items()}
    torch.save({canonical.get(place, place): value for place, value in module.state_dict().items()}, request.folder / "state_dict.pt")
    if translates:  # any number of sentences of any length
        example = torch.full((EXAMPLE_BATCH, EXAMPLE_LENGTH), END)
        sizes = {0: torch.export.Dim("batch", min=1, max=1 << 16), 1: torch.export.Dim("time", min=1, max=1 << 12)}
    else:
        example, sizes = torch.zeros(EXAMPLE_BATCH, *request.model.input_shape), {0: torch.export.Dim("batch")}
    program = _traced(module, request, example, sizes)
    if not translates:
        _name_result(program)
    torch.export.save(program, request.folder / "program.pt2")


def _traced(module: _Trained, request: Export, example: torch.Tensor, sizes: dict[int, Any]) -> torch.export.ExportedProgram:
    """Trace the program.

    Raises UsageError if the forward function only works for the example's sizes.
    """
    try:
        return torch.export.export(module, (example,), dynamic_shapes=(sizes,))
    except UserError as error:
        file = inspect.getsourcefile(module.run) or request.model_name
        raise UsageError(
            f"--format: torch.export cannot trace the forward function in {file!r} for every batch size: {error.error_type.name}. "
            "It must not iterate over the batch or depend on values; or export another format, such as safetensors."
        ) from error


def _name_result(program: torch.export.ExportedProgram) -> None:
    (result,) = next(node for node in program.graph.nodes if node.op == "output").args[0]
    result.name = program.graph_signature.output_specs[0].arg.name = LOGITS


class _Trained(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, request: Export) -> None:
        super().__init__()
        self.run = load(forward_plugin(request.model_name, "torch"), "forward").forward
        self._settings = request.model.settings
        self.places: dict[str, str] = {}
        self._buffer_names = list(request.buffers)
        for name, value in request.parameters.items():
            parent, leaf = self._place(name)
            parent.register_parameter(leaf, torch.nn.Parameter(torch.tensor(value), requires_grad=False))
        for name, value in request.buffers.items():
            parent, leaf = self._place(name)
            parent.register_buffer(leaf, torch.tensor(value))
            if leaf == "running_mean":  # torch's own layers of batch normalisation also count their batches
                parent.register_buffer("num_batches_tracked", torch.tensor(request.updates))

    def _place(self, name: str) -> tuple[torch.nn.Module, str]:
        """Return the module for `name`, created if missing, and its last part.

        Names that collide with attributes get an ``_``.
        """
        *path, leaf = name.split(".")
        module: torch.nn.Module = self
        parts = []
        for part in path:
            parts.append(part := f"{part}_" if part not in module._modules and hasattr(module, part) else part)
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        while hasattr(module, leaf):
            leaf += "_"
        self.places[name] = ".".join((*parts, leaf))
        return module, leaf

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits_bk of normalised images, [batch, channels, height, width].

        The argument names the program's input.
        """
        return self._outputs(images)

    def _outputs(self, inputs: Columns) -> torch.Tensor:
        parameters = {name: self.get_parameter(self.places[name]) for name in self.places if name not in self._buffer_names}
        buffers = {name: self.get_buffer(self.places[name]) for name in self._buffer_names}
        return self.run(parameters, inputs, ForwardContext(training=False, buffers=buffers, settings=self._settings))


class _Translating(_Trained):
    def __init__(self, request: Export) -> None:
        super().__init__(request)
        quality = request.model.objective.translation
        if quality is None:
            raise ValueError(f"{request.model_name!r} translates nothing")
        self._source, self._target = quality.source, quality.target

    def forward(self, pieces: torch.Tensor) -> torch.Tensor:
        source_bs = pieces
        lengths_b = (source_bs != PADDING).sum(1)

        def logits(pieces_bt: torch.Tensor) -> torch.Tensor:
            ends_b = torch.full_like(lengths_b, pieces_bt.shape[1])
            inputs = {self._source: source_bs, self._source + LENGTHS: lengths_b, self._target: pieces_bt, self._target + LENGTHS: ends_b}
            return self._outputs(inputs)

        return greedy(logits, source_bs, lengths_b, GREEDY.extra_length)
