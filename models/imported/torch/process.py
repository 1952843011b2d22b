"""The process that reads a user's module; `Request` as JSON on standard input.

``python -m crosstrain.models.imported.torch.process`` writes the model's description, graphs and initial values into the request's folder,
and prints null, or the problem, as JSON.
"""

from __future__ import annotations

import fcntl
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from torch.utils.flop_counter import FlopCounterMode

from ....core.drafts import replacing
from ....core.errors import TrainerError, UsageError, raised
from ....data.base import IMAGE
from ....data.columns import LENGTHS
from ..description import (
    BUFFER,
    CONSTANTS,
    DESCRIPTION,
    EVALUATION,
    PARAMETER,
    TRAINING,
    Description,
    file_digest,
    initial_file,
    local_digests,
    read_description,
    write_values,
)
from ..graph import STATE, Graph, nodes_in
from ..reference import HF, TORCHVISION, Reference, read_reference
from ..requests import DataFacts, Request, answer_request
from .calls import Call
from .export import exported_graph
from .modules import built, carried, trained
from .refusals import refuse_counters, refusing_draws

EXAMPLES = 4  # rows of the batch that a model is exported with
MAX_TRIED_LENGTH = 6  # of its sequences
MAX_ELEMENTS = 1 << 26  # of an example of a column


def main() -> None:
    """Answer one request."""
    answer_request(lambda content: answer(msgspec.json.decode(content, type=Request)))


def answer(request: Request) -> str | None:
    """Write what is asked for; return what is wrong with the model, or None."""
    try:
        _write(request)
    except TrainerError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 -- of the user's code, in any method of the module
        return f"model: {request.reference} cannot be used: {raised(error)}."
    return None


def _write(request: Request) -> None:
    reference, folder = read_reference(request.reference), Path(request.folder)
    before = local_digests(reference)
    with _locked(folder):
        if request.describe and read_description(folder) is not None:
            return  # another process was faster
        if reference.kind == HF:  # a configuration's sizes may come from anybody
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            most = psutil.virtual_memory().available // 2
            resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        opened = _OpenedFiles(folder)
        sys.addaudithook(opened)
        module = built(reference, request.arguments, request.data, request.outputs, request.seed)
        if request.describe:
            for path in folder.glob("initial-*.npz"):  # of earlier sources
                path.unlink()
            description = _described(reference, module, request, folder)
            description.sources |= opened.digests
            if local_digests(reference) != before:
                raise UsageError(f"model: a source of {reference.text} changed while it was read. Try again.")
            _write_initial(module, initial_file(folder, request.seed), reference)
            with replacing(folder / DESCRIPTION) as draft:
                draft.write_bytes(msgspec.json.encode(description))
        else:
            _write_initial(module, initial_file(folder, request.seed), reference)


class _OpenedFiles:
    """Audit hook for the digests of data files that the user's code opens, such as weights."""

    MAX_FILES = 1_000

    def __init__(self, folder: Path) -> None:
        self.digests: dict[str, str] = {}
        self._excluded = ("/proc/", "/sys/", "/dev/", *{f"{prefix}/" for prefix in (sys.prefix, sys.base_prefix)}, f"{folder}/")
        self._reading = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or self._reading or len(self.digests) >= self.MAX_FILES:
            return
        path, mode, _ = arguments
        if not isinstance(path, str) or not isinstance(mode, str) or not mode.startswith("r") or path.endswith((".pyc", ".py")):
            return
        whole = os.path.abspath(path)
        if whole.startswith(self._excluded) or ".dist-info/" in whole or whole in self.digests or not os.path.isfile(whole):
            return
        self._reading = True
        try:
            self.digests[whole] = file_digest(Path(whole))
        finally:
            self._reading = False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock within the block, and first remove what a killed process left."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for draft in folder.glob(".*"):
            draft.unlink()
        yield
    finally:
        os.close(descriptor)


def _write_initial(module: torch.nn.Module, path: Path, reference: Reference) -> None:
    values = {PARAMETER + name: value.detach().numpy() for name, value in trained(module).items()}
    values |= {BUFFER + name: value.detach().numpy() for name, value in carried(module).items()}
    for name, value in values.items():
        if not np.isfinite(value).all():
            raise UsageError(f"model: the initial values of {name.partition('/')[2]!r} of {reference.text} are not finite.")
    write_values(path, values)


def _described(reference: Reference, module: torch.nn.Module, request: Request, folder: Path) -> Description:
    parameters = trained(module)
    if not parameters:
        raise UsageError(f"model: {reference.text} has no parameter to train.")
    if wide := next((name for name, value in module.named_parameters() if value.dtype != torch.float32), None):
        raise UsageError(f"model: the parameter {wide!r} of {reference.text} is {module.get_parameter(wide).dtype}; float32 is needed.")
    state = {name: value.clone() for name, value in module.state_dict().items()}
    call, multiply_adds = _tried(reference, module, request)
    tensors = [_example_tensors(request.data)[name] for name in call.tensors]
    with refusing_draws(reference):
        _refuse_unused(reference, call, tensors)
    refuse_counters(reference, module, state)
    module.load_state_dict(state)
    description = Description(
        inputs=call.columns,
        has_loss=call.has_loss,
        measured=call.measured,
        parameters={name: tuple(value.shape) for name, value in parameters.items()},
        buffers={name: tuple(value.shape) for name, value in carried(module).items()},
        kernels=[],
        dropouts=[],
        multiply_adds=multiply_adds,
        sources=_sources(reference),
        aliases={name: first for name, first in _canonical_names(module).items() if name != first},
        unsaved=[name for name in carried(module) if name not in state],
    )
    try:
        _export(call, tensors, folder, description)
    except UsageError as error:
        description.problems["tf"] = str(error)
    return description


def _example_tensors(data: DataFacts) -> dict[str, torch.Tensor]:
    """Return made-up values of every column, by name, for a batch of `EXAMPLES`."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for column in data.columns:
        fixed = column.fixed_shape
        if math.prod(fixed) > MAX_ELEMENTS:
            raise UsageError(f"model: an example of {column.name!r} has more than {MAX_ELEMENTS:,} numbers, too many for a module to try.")
        shape = [EXAMPLES, *([MAX_TRIED_LENGTH] if column.varies else []), *fixed]
        if column.dtype == "float32" or column.name == IMAGE:
            tensors[column.name] = torch.randn(*shape, generator=generator)
        else:
            tensors[column.name] = torch.randint(0, column.limit or 2, shape, generator=generator)
        if column.varies:
            lengths = torch.arange(MAX_TRIED_LENGTH, MAX_TRIED_LENGTH - EXAMPLES, -1)
            tensors[column.name + LENGTHS] = lengths
            tensors[column.name] *= (torch.arange(MAX_TRIED_LENGTH) < lengths[:, None]).view(*shape[:2], *[1] * len(fixed))
    return tensors


def _tried(reference: Reference, module: torch.nn.Module, request: Request) -> tuple[Call, int]:
    """Run the module and check its result.

    Return how it is called, and the multiply-adds of an example, or of a token.
    """
    counter = FlopCounterMode(display=False)
    module.eval()
    tensors = _example_tensors(request.data)
    images = [column for column in request.data.columns if column.name == IMAGE]
    call = Call(module, request.data, reference.text)
    if not (request.data.target or call.has_loss):
        raise UsageError(
            f"model: {reference.text}: the data has no column that is to be predicted; give the module a method loss(self, columns)."
        )
    if images and call.columns == [IMAGE]:
        batch = f"images of {'×'.join(map(str, images[0].shape))} (channels, height, width)"
    else:
        batch = f"the columns {', '.join(f'{name} {list(tensors[name].shape)}' for name in call.tensors)}"
    try:
        with torch.no_grad(), counter, refusing_draws(reference):
            outputs = call(*(tensors[name] for name in call.tensors))
    except TrainerError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"model: {reference.text} fails on {batch}: {raised(error)}.") from error
    if call.has_loss:
        if not outputs.is_floating_point() or len(outputs) != EXAMPLES:
            shown = f"{outputs.dtype} {list(outputs[:, 0].shape)}"
            raise UsageError(
                f"model: the loss of {reference.text} is {shown} for {EXAMPLES} examples; float32 [batch] or a mean is needed."
            )
        call = _measured(module, request, reference, tensors) or call
    elif problem := _output_problem(outputs, request.outputs):
        raise UsageError(f"model: {reference.text} {problem}")
    pieces = sum(int(tensors[name].sum()) for name in call.tensors if name.endswith(LENGTHS)) or EXAMPLES
    return call, int(counter.get_total_flops() // 2 // pieces)


def _output_problem(outputs: Any, wanted: int) -> str | None:
    """Return why these cannot be the outputs for `EXAMPLES` examples, or None."""
    needed = "logits [batch, classes] are needed." if wanted > 1 else "a number for each example, [batch] or [batch, 1], is needed."
    if isinstance(outputs, tuple | list):
        return f"returns a {type(outputs).__name__} of {len(outputs)}; return one tensor of them: {needed}"
    if not isinstance(outputs, torch.Tensor):
        return f"returns {type(outputs).__name__} for {EXAMPLES} examples; {needed}"
    if outputs.shape[:1] != (EXAMPLES,) or outputs.ndim not in ((2,) if wanted > 1 else (1, 2)):
        return f"returns a tensor of shape {tuple(outputs.shape)} for {EXAMPLES} examples; {needed}"
    count = outputs.shape[1] if outputs.ndim == 2 else 1
    if wanted > 1 and count != wanted:
        return f"returns {count} logits for data of {wanted} classes. Set its number of classes."
    return None if count == max(1, wanted) else f"returns {count} numbers for each example; {needed}"


def _measured(module: torch.nn.Module, request: Request, reference: Reference, tensors: Mapping[str, torch.Tensor]) -> Call | None:
    """Return a call whose evaluations also have forward's logits; None if it returns none."""
    classes = next((column.limit for column in request.data.columns if column.name == request.data.target), 0)
    try:
        call = Call(module, request.data, reference.text, measured=True)
    except UsageError:  # a forward that reads no columns serves the loss alone
        return None
    with torch.no_grad():
        outputs = call.outputs(*(tensors[name] for name in call.tensors))
    fits = isinstance(outputs, torch.Tensor) and outputs.shape == (EXAMPLES, classes)
    return call if classes and fits else None


def _refuse_unused(reference: Reference, call: Call, tensors: Sequence[torch.Tensor]) -> None:
    parameters = trained(call.module)
    call.module.train()
    gradients = torch.autograd.grad(call(*tensors).sum(), list(parameters.values()), allow_unused=True)
    if unused := [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]:
        listed = f"{', '.join(unused[:3])}{' and others' if len(unused) > 3 else ''}"
        raise UsageError(f"model: its result does not depend on {listed} of {reference.text}. Freeze them: requires_grad_(False).")


def _export(call: Call, tensors: Sequence[torch.Tensor], folder: Path, description: Description) -> None:
    module = call.module
    names = _canonical_names(module)
    constants: dict[str, np.ndarray] = {}
    graphs: list[Graph] = []
    varying = [place for place, name in enumerate(call.tensors) if name + LENGTHS in call.tensors]
    for training, file in ((False, EVALUATION), (True, TRAINING)):
        exported = exported_graph(module, tensors, training=training, lengths=varying, call=call)
        graph = exported.graph
        for node in graph.nodes:
            if node.operation == STATE:
                name = node.arguments["name"] = names.get(node.arguments["name"], node.arguments["name"])
                if name not in description.parameters and name not in description.buffers:
                    constants[name] = module.state_dict(keep_vars=True).get(name, exported.constants.get(name)).detach().numpy()
        graph.updated = {names.get(name, name): result for name, result in graph.updated.items()}
        graph.write(folder / file)
        graphs.append(graph)
        if training:
            description.dropouts = exported.dropouts
    write_values(folder / CONSTANTS, constants)
    description.kernels = [name for name in _kernels(graphs) if name in description.parameters]


def _canonical_names(module: torch.nn.Module) -> dict[str, str]:
    """Return the first name of parameters and buffers by each name: tied ones have several."""
    first: dict[int, str] = {}
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(value), name) for name, value in named}


def _kernels(graphs: list[Graph]) -> list[str]:
    """Return the state that only two-dimensional convolutions read, as their weight."""
    as_kernels: set[str] = set()
    otherwise: set[str] = set()
    for graph in graphs:
        states = {node.name: node.arguments["name"] for node in graph.nodes if node.operation == STATE}
        for node in graph.nodes:
            for argument, value in node.arguments.items():
                for name in nodes_in(value):
                    if name in states:
                        kernel = node.operation.startswith("aten.conv2d.") and argument == "weight"
                        (as_kernels if kernel else otherwise).add(states[name])
    return sorted(as_kernels - otherwise)


def _sources(reference: Reference) -> dict[str, str]:
    """Return the digests of the user's files that were imported."""
    if reference.kind == TORCHVISION:
        return {}
    if reference.kind == HF:
        return {reference.place: file_digest(Path(reference.place))}
    folder = Path(reference.place).parent if reference.kind == "file" else None
    package = reference.place.partition(".")[0]
    paths = set()
    for name, module in list(sys.modules.items()):
        path = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(path, str) and path.endswith(".py") and "site-packages" not in path:
            belongs = Path(path).is_relative_to(folder) if folder else name.partition(".")[0] == package
            if belongs:
                paths.add(path)
    return {path: file_digest(Path(path)) for path in sorted(paths)}


if __name__ == "__main__":
    main()
