"""The process that reads a user's module; `Request` as JSON on standard input.

``python -m crosstrain.models.imported.torch.process`` writes the model's description, graphs and initial values into the request's folder,
and prints null, or the problem, as JSON.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from ....core.errors import TrainerError, UsageError, raised
from ....data.columns import LENGTHS
from .. import describing
from ..describing import EXAMPLES, batch_in_words, example_arrays, output_problem, refuse_probabilities
from ..description import BUFFER, CONSTANTS, EVALUATION, PARAMETER, TRAINING, Description, write_values
from ..graph import STATE, Graph, nodes_in
from ..reference import HF, Reference
from ..requests import DataFacts, Request, answer_request
from .calls import Call
from .export import exported_graph
from .modules import built, carried, trained
from .refusals import Buffers, refuse_counters, refuse_state, refuse_unused, refusing_draws


def main() -> None:
    """Answer one request."""
    os.environ["KERAS_BACKEND"] = "torch"  # where the user's file imports Keras, which would import TensorFlow
    answer_request(lambda content: answer(msgspec.json.decode(content, type=Request)))


def answer(request: Request) -> str | None:
    """Write what is asked for; return what is wrong with the model, or None."""
    return describing.answer(_Modules(), request)


class _Modules:
    """The `Describer` of nn.Modules."""

    def build(self, reference: Reference, request: Request) -> torch.nn.Module:
        """Import and build the module. Raises UsageError."""
        if reference.kind == HF:  # a configuration's sizes may come from anybody
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            most = psutil.virtual_memory().available // 2
            resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        return built(reference, request.arguments, request.data, request.outputs, request.seed)

    def describe(self, reference: Reference, module: torch.nn.Module, request: Request, folder: Path) -> Description:
        """Try and export the module. Raises UsageError."""
        return _described(reference, module, request, folder)

    def initial(self, module: torch.nn.Module) -> dict[str, NDArray[Any]]:
        """Return initial values by name, after `PARAMETER` or `BUFFER`."""
        values = {PARAMETER + name: value.detach().numpy() for name, value in trained(module).items()}
        return values | {BUFFER + name: value.detach().numpy() for name, value in carried(module).items()}


def _described(reference: Reference, module: torch.nn.Module, request: Request, folder: Path) -> Description:
    parameters = trained(module)
    if not parameters:
        raise UsageError(f"model: {reference.text} has no parameter to train.")
    if wide := next((name for name, value in module.named_parameters() if value.dtype != torch.float32), None):
        raise UsageError(f"model: the parameter {wide!r} of {reference.text} is {module.get_parameter(wide).dtype}; float32 is needed.")
    refuse_state(reference, module)
    before = Buffers(module)
    call, multiply_adds = _tried(reference, module, request)
    tensors = [_tensors(request.data)[name] for name in call.tensors]
    _refuse_other_results(reference, call, request, tensors, before)
    with refusing_draws(reference):
        refuse_unused(reference, call, tensors)
    refuse_counters(reference, module, before)
    before.restore()
    description = Description(
        inputs=call.columns,
        has_loss=call.has_loss,
        measured=call.measured,
        parameters={name: tuple(value.shape) for name, value in parameters.items()},
        buffers={name: tuple(value.shape) for name, value in carried(module).items()},
        kernels=[],
        dropouts=[],
        multiply_adds=multiply_adds,
        sources={},
        aliases={name: first for name, first in _canonical_names(module).items() if name != first},
        unsaved=[name for name in carried(module) if name not in module.state_dict()],
    )
    try:
        _export(call, tensors, folder, description)
    except UsageError as error:
        description.problems["tf"] = str(error)
    return description


def _tensors(data: DataFacts) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in example_arrays(data).items()}


def _tried(reference: Reference, module: torch.nn.Module, request: Request) -> tuple[Call, int]:
    """Run the module and check its result.

    Return how it is called, and the multiply-adds of an example, or of a token.
    """
    counter = FlopCounterMode(display=False)
    module.eval()
    tensors = _tensors(request.data)
    call = Call(module, request.data, reference.text)
    if not (request.data.target or call.has_loss):
        raise UsageError(
            f"model: {reference.text}: the data has no column that is to be predicted; give the module a method loss(self, columns)."
        )
    batch = batch_in_words(request.data, call.columns, tensors)
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
    elif problem := output_problem(outputs, request.outputs, torch.Tensor):
        raise UsageError(f"model: {reference.text} {problem}")
    else:
        refuse_probabilities(reference, outputs.float().numpy())
    pieces = sum(int(tensors[name].sum()) for name in call.tensors if name.endswith(LENGTHS)) or EXAMPLES
    return call, int(counter.get_total_flops() // 2 // pieces)


def _refuse_other_results(reference: Reference, call: Call, request: Request, tensors: Sequence[torch.Tensor], before: Buffers) -> None:
    """Raise UsageError for a module with other results in each pass, or whenever it is built."""

    def evaluated(module: torch.nn.Module) -> torch.Tensor:
        module.eval()
        again = Call(module, request.data, reference.text)
        with torch.no_grad():
            return again(*(tensor.clone() for tensor in tensors))  # a module may write to them

    before.restore()
    first = evaluated(call.module)
    before.restore()
    if not torch.equal(first.nan_to_num(), evaluated(call.module).nan_to_num()):
        raise UsageError(
            f"model: {reference.text} gives other results each time it is evaluated: it drops or draws there too."
            " Give functional dropout training=self.training."
        )
    before.restore()
    rebuilt = built(reference, request.arguments, request.data, request.outputs, request.seed)
    if not torch.equal(first.nan_to_num(), evaluated(rebuilt).nan_to_num()):
        raise UsageError(
            f"model: {reference.text} is another one each time it is built: its constructor draws random numbers that --seed does not"
            " decide, such as those of numpy.random.default_rng(). Give that a fixed seed."
        )


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


if __name__ == "__main__":
    main()
