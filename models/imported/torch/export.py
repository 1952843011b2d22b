"""Export an nn.Module as a `Graph` by torch.export.

https://docs.pytorch.org/docs/stable/export.html
"""

from __future__ import annotations

import math
import operator
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.export import Dim, ExportedProgram, default_decompositions, export
from torch.nn import functional

from ....core.errors import UsageError
from ..graph import CONSTANT, FORMAT, INFINITY, INPUT, ITEM, NODE, STATE, Graph, Node
from ..translated import TRANSLATED
from .recurrent import as_operations

MAX_BATCH = 1 << 20
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_FORMATS = {
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


@dataclass(frozen=True, slots=True)
class Exported:
    """A graph with its constants.

    `dropouts`: the batch's axis of each tensor that it drops in (`_batch_axes`). `constants`: tensors by name.
    """

    graph: Graph
    dropouts: list[int]
    constants: Mapping[str, Any]


class Called(torch.nn.Module):  # type: ignore[misc]
    """A module that is called in a certain way; names of its state begin with `PREFIX`."""

    def __init__(self, module: torch.nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.module = module
        self._call = [call]  # in a list, as it may be the module itself

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the call's result."""
        return self._call[0](*inputs)


PREFIX = "module."


def exported_graph(
    module: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    training: bool,
    lengths: Sequence[int] = (),
    call: Callable[..., torch.Tensor] | None = None,
) -> Exported:
    """Return the graph of ``module(*inputs)``, or of ``call(*inputs)``, for any batch size.

    `lengths`: positions of inputs whose second size varies too, each by itself. Raises UsageError, with the user's line, for code that
    cannot be exported, such as branches that depend on data.
    """
    batch = Dim("batch", min=2, max=MAX_BATCH)
    sizes = tuple({0: batch, 1: Dim.DYNAMIC} if position in lengths else {0: batch} for position in range(len(inputs)))
    module.train(training)
    with as_operations(module), _exportable():
        try:
            program = export(Called(module, call or module), tuple(inputs), dynamic_shapes=(sizes,), strict=False)
            _detach_without_grad(program.graph_module)
            program = program.run_decompositions(dict(_decompositions()))
        except UsageError:
            raise
        except Exception as error:  # torch and the user's code may raise anything
            raise UsageError(f"model: {_export_problem(error)}") from error
    constants = {name.removeprefix(PREFIX): value for name, value in program.constants.items()}
    return Exported(_graph(program), _batch_axes(program) if training else [], constants)


@contextmanager
def _exportable() -> Iterator[None]:
    """Within the block, a backward of the user's own is refused, which exports leave out.

    Distances are computed in one way, where torch chooses by the number of rows; and the running statistics of instance normalisation
    change by operations of their own.
    """
    distances, apply, normalised = torch.cdist, torch.autograd.Function.apply, functional.instance_norm

    def instance_norm(
        input: torch.Tensor,
        running_mean: torch.Tensor | None = None,
        running_var: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if use_input_stats and running_mean is not None and running_var is not None:
            with torch.no_grad():
                variance_bc, mean_bc = torch.var_mean(input, list(range(2, input.ndim)))
                running_mean.lerp_(mean_bc.mean(0), momentum)
                running_var.lerp_(variance_bc.mean(0), momentum)
            running_mean = running_var = None
        return normalised(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)

    def cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str | None = None) -> torch.Tensor:
        return distances(x1, x2, p, "donot_use_mm_for_euclid_dist")

    def refuse(function: type, *args: Any, **kwargs: Any) -> Any:
        place = user_place("".join(traceback.format_stack()))
        raise UsageError(
            f"model: it cannot be translated: the backward of {function.__name__}, a torch.autograd.Function, is left out of exports"
            f" ({place})."
        )

    torch.cdist, torch.autograd.Function.apply, functional.instance_norm = cdist, classmethod(refuse), instance_norm
    try:
        yield
    finally:
        torch.cdist, torch.autograd.Function.apply, functional.instance_norm = distances, apply, normalised


def _detach_without_grad(module: torch.fx.GraphModule) -> None:
    """Detach what ``torch.no_grad`` blocks compute, which decompositions make part of the rest."""
    for inner in (part for part in module.modules() if isinstance(part, torch.fx.GraphModule)):
        for block in inner.graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_set_grad_enabled):
            for result in [] if block.args[0] else [node for node in block.users if node.target is operator.getitem]:
                with inner.graph.inserting_after(result):
                    detached = inner.graph.call_function(torch.ops.aten.detach.default, (result,))
                detached.meta = dict(result.meta)
                result.replace_all_uses_with(detached, lambda node, detached=detached: node is not detached and node.op != "output")
        inner.recompile()


# Losses of classes, whose shapes torch gets wrong without a reduction.
_TAKEN_APART = frozenset(f"aten.{name}.default" for name in ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"))


@lru_cache(maxsize=1)
def _decompositions() -> Mapping[Any, Any]:
    """Return torch's decompositions of the operations that TensorFlow does not carry out."""
    table = {**decomposition_table, **default_decompositions()}
    return {operation: decomposed for operation, decomposed in table.items() if str(operation) not in TRANSLATED - _TAKEN_APART}


def _export_problem(error: BaseException) -> str:
    text = str(error)
    place = user_place(text)
    where = f" ({place})" if place else ""
    if "data-dependent" in text or "DataDependent" in type(error).__name__ or "unbacked" in text.lower():
        return f"it cannot be translated: a branch or a size depends on the values of a tensor{where}. Use torch.where or masks instead."
    if "Constraints violated" in text or "ConstraintViolation" in type(error).__name__:
        return (
            f"it cannot be translated: the batch size or a length becomes a fixed number{where}. Use x.shape[0] instead of len(x), and no"
            " loop over it."
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"it cannot be translated: {type(error).__name__}: {first[:400]}{where}"


def user_place(trace: str) -> str:
    """Return the last place of a stack trace outside torch; "" if there is none."""
    places = [(path, line) for path, line in _PLACE.findall(trace) if "/torch/" not in path and not path.startswith("<")]
    return f"{places[-1][0]}, line {places[-1][1]}" if places else ""


def _batch_axes(program: ExportedProgram) -> list[int]:
    """Return the batch's axis of the tensor of each drawing operation, in order.

    −1 if each example has several rows.
    """
    batch = next(node.meta["val"].shape[0] for node in program.graph.nodes if node.op == "placeholder" and _is_input(program, node))
    axes: list[int] = []
    for node in program.graph.nodes:
        if node.op != "call_function" or not _draws(node):
            continue
        shape = node.args[0].meta["val"].shape
        axes.append(next((axis for axis in (0, 1) if len(shape) > axis and str(shape[axis]) == str(batch)), -1))
    return axes


def _is_input(program: ExportedProgram, node: torch.fx.Node) -> bool:
    return node.name in program.graph_signature.user_inputs


def _draws(node: torch.fx.Node) -> bool:
    name = str(node.target)
    if name == "aten.scaled_dot_product_attention.default":
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    if name == "aten.bernoulli.p":
        return node.args[1] not in (0.0, 1.0)
    return name in ("aten.native_dropout.default", "aten.dropout.default") and node.args[1] > 0 and node.args[2] is not False


def _graph(program: ExportedProgram) -> Graph:
    signature = program.graph_signature
    states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants: Mapping[str, str] = signature.inputs_to_lifted_tensor_constants
    nodes: list[Node] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            nodes.append(_placeholder(program, node, states, constants))
        elif node.op == "call_function":
            nodes.append(_call(node))
        elif node.op != "output":
            raise UsageError(
                f"model: it cannot be translated: control flow of torch ({node.target}) at {_line(node) or 'an unknown line'}."
            )
    results = list(signature.user_outputs)
    if len(results) != 1:
        raise UsageError(f"model: its forward returns {len(results)} tensors; one is needed, the logits.")
    updated = {buffer.removeprefix(PREFIX): result for result, buffer in signature.buffers_to_mutate.items()}
    graph = Graph(nodes, str(results[0]), updated)
    for name, line in graph.operations.items():
        if name not in TRANSLATED:
            place = f" ({line})" if line else ""
            raise UsageError(f"model: it cannot be translated: the operation {name} has no form on TensorFlow{place}.")
    return graph


def _placeholder(program: ExportedProgram, node: torch.fx.Node, states: Mapping[str, str], constants: Mapping[str, str]) -> Node:
    shape = _shape(node)
    if node.name in states:
        return Node(node.name, STATE, {"name": states[node.name].removeprefix(PREFIX)}, shape)
    if node.name in constants:
        value = program.constants[constants[node.name]]
        return Node(node.name, CONSTANT, {"value": value.tolist(), "format": _FORMATS[value.dtype]}, shape)
    return Node(node.name, INPUT, {}, shape)


def _call(node: torch.fx.Node) -> Node:
    target, line = node.target, _line(node)
    if isinstance(target, torch._ops.OpOverload):
        if target._opname == "as_strided" and not node.args[0].meta["val"].is_contiguous():
            raise UsageError(f"model: it cannot be translated: as_strided of a tensor that is not contiguous ({line}). Use reshape.")
        arguments: dict[str, Any] = {}
        for position, parameter in enumerate(target._schema.arguments):
            if position < len(node.args):
                arguments[parameter.name] = _encoded(node.args[position])
            elif parameter.name in node.kwargs:
                arguments[parameter.name] = _encoded(node.kwargs[parameter.name])
            elif parameter.has_default_value():
                arguments[parameter.name] = _encoded(parameter.default_value)
        return Node(node.name, str(target), arguments, _shape(node), line, _layer(node))
    if target is operator.getitem:
        return Node(node.name, ITEM, {"of": _encoded(node.args[0]), "position": node.args[1]}, _shape(node))
    positional = {f"a{position}": _encoded(argument) for position, argument in enumerate(node.args)}
    return Node(node.name, f"python.{getattr(target, '__name__', target)}", positional, None, line)


def _shape(node: torch.fx.Node) -> list[int | None] | None:
    value = node.meta.get("val")
    return [size if isinstance(size, int) else None for size in value.shape] if isinstance(value, torch.Tensor) else None


def _line(node: torch.fx.Node) -> str:
    return user_place(node.meta.get("stack_trace") or "")


def _layer(node: torch.fx.Node) -> str:
    """Return the path of the innermost module that the operation belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = re.sub(r"^L\['self'\]\.?", "", str(stack[-1][0])) if stack else ""
    return f"{path}.".removeprefix(PREFIX).removesuffix(".")


def _encoded(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return {NODE: value.name}
    if isinstance(value, list | tuple):
        return [_encoded(part) for part in value]
    if isinstance(value, torch.dtype):
        return {FORMAT: _FORMATS[value]}
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return {INFINITY: 0 if math.isnan(value) else math.copysign(1, value)}
    if value is None or isinstance(value, int | float | bool | str):
        return value
    raise UsageError(f"model: it cannot be translated: an operation has an argument of type {type(value).__name__}.")
