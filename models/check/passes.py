"""Passes of a model on one framework, in a process of its own.

``python -m crosstrain.models.check.FRAMEWORK`` reads a `Request` as JSON and writes the results into its folder, as FRAMEWORK.npz and
FRAMEWORK.json.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.errors import TrainerError, raised
from ...core.plugins import forward_plugin, load
from ...data.base import IMAGE, Dataset
from ...data.columns import LENGTHS
from ...data.features import read_column
from ...data.preprocessing import normal_table
from ...data.store.stored_dataset import open_dataset
from ..base import ForwardContext, ModelSpec
from ..build import build_model
from ..dropout_masks import drawn_rate, keep_mask_of_shape
from ..imported.description import TRAINING, Imported
from ..imported.graph import Traced
from ..imported.requests import answer_request

EXAMPLES = 4  # of the compared batch
TIMED_EXAMPLES = 32  # of the batch of a timed step, at most
MAX_TIMED_SECONDS, MIN_TIMED, MAX_TIMED = 2.0, 3, 50  # of timed pairs of steps
MOVED = 0.1  # deviation of the noise on initial values, many of which start as zeros or ones
NOISE = 0.01  # deviation of that on inputs: where values are equal, the gradient of a maximum is not unique
RATE = 1e-6  # of the updates of timed steps
EVALUATED, TRAINED, GRADIENT, IN_GRAPH, IN_MODULE = "evaluated", "trained", "gradient/", "graph/", "module/"  # names of arrays, prefixes
SINGLE = "single/"  # results of a batch of one example, after a prefix
UPDATED = "updated/"  # new values of buffers

Array = NDArray[Any]
Compute = Callable[[Mapping[str, Any]], Any]  # of parameters
Forward = Callable[[Mapping[str, Any], ForwardContext[Any]], Any]


class Request(msgspec.Struct):
    """What to compute.

    `timed`: also the time of a training step. `traced`: the file of a graph; then only the results of its nodes.
    """

    model: str
    data: str
    data_dir: str | None
    folder: str
    timed: bool = False
    traced: str = ""


class Step(msgspec.Struct):
    """A node of a graph with its result's norm, and its product with fixed weights."""

    operation: str
    layer: str
    line: str
    norm: float
    product: float


class Outcome(msgspec.Struct):
    """The results that are no arrays.

    `graph_problem`: why there are none in float64, of the graph or of the module by itself, though there is a graph. `step_seconds`: of a
    training step on one thread; `cost`: its CPU time over that of the user's model without our adapter, None if there is none.
    """

    graph_problem: str | None = None
    step_seconds: float | None = None
    cost: float | None = None
    trace: list[Step] = []


class Framework(Protocol):
    """What the passes need of a framework."""

    name: str

    def tensor(self, array: Array) -> Any:
        """Return an array as a tensor; whole numbers in the format of forward functions."""

    def varying(self, array: Array) -> Any:
        """Return a tensor for timed steps whose number of rows is not known beforehand."""

    def array(self, tensor: Any) -> Array | None:
        """Return a tensor as an array; None for anything else."""

    def masked(self, x: Any, kept: Array, rate: float) -> Any:
        """Return x without the elements that are not kept, and the others divided by 1 − rate."""

    def dropped(self, x: Any, rate: float) -> Any:
        """Return x with elements dropped by the framework's own random numbers."""

    def variables(self, spec: ModelSpec, module: Any, values: Mapping[str, Array]) -> tuple[Mapping[str, Any], Sequence[Any]]:
        """Return trained parameters as backends hold them, by name and in order."""

    def in_float64(self) -> AbstractContextManager[None]:
        """Return a context in which modules make their constants float64."""

    def as_in_training(self, compute: Compute) -> Compute:
        """Return a function of parameters as training carries it out, such as traced."""

    def gradients(
        self, compute: Compute, parameters: Mapping[str, Array], slopes: Callable[[Sequence[int]], Array]
    ) -> tuple[Any, dict[str, Array]]:
        """Return the result of `compute`, and the gradients of its product with `slopes`.

        They are zeros where there are none.
        """

    def step(self, compute: Callable[[], Any], trained: Sequence[Any]) -> Callable[[], None]:
        """Return a training step of SGD on the sum of `compute`'s result, to its end."""

    def float64_pass(self) -> Callable[..., tuple[Any, list[Traced]]]:
        """Import and return the function that computes imported models in float64."""


def serve(framework: Framework) -> None:
    """Answer one request on standard input."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # a GPU's products may have less than float32's precision
    answer_request(lambda content: _answer(framework, msgspec.json.decode(content, type=Request)))


def _answer(framework: Framework, request: Request) -> str | None:
    try:
        _write(framework, request)
    except TrainerError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 -- of the user's code, or of an operation
        return f"model: {request.model} does not run on {framework.name}: {_described(error)}."
    return None


def _described(error: BaseException) -> str:
    return "; ".join([raised(error), *getattr(error, "__notes__", ())])


def has_float64(spec: ModelSpec) -> bool:
    """Return whether every framework can compute a model in float64."""
    return isinstance(spec.settings, Imported) and (spec.settings.is_keras or spec.settings.has_graph)


def _write(framework: Framework, request: Request) -> None:
    data = open_dataset(request.data, None if request.data_dir is None else Path(request.data_dir))
    spec = build_model(request.model, data.info)
    module = load(forward_plugin(request.model, framework.name), "forward")
    passes = _Passes(framework, spec, module, data)
    outcome = Outcome()
    if request.traced:
        outcome.trace = passes.trace(request.traced)
    else:
        results = passes.compared()
        if has_float64(spec):
            try:
                results |= {IN_GRAPH + name: value for name, value in passes.in_graph().items()}
                if spec.settings.has_graph and spec.method(framework.name) == "native":
                    results |= {IN_MODULE + name: value for name, value in passes.in_module().items()}
                    results |= passes.single()
            except Exception as error:  # noqa: BLE001 -- of an operation without a kernel for float64
                outcome.graph_problem = _described(error)
        np.savez(Path(request.folder, f"{framework.name}.npz"), **cast(dict[str, Any], results))
        if request.timed:
            outcome.step_seconds, outcome.cost = passes.timed()
    Path(request.folder, f"{framework.name}.json").write_bytes(msgspec.json.encode(outcome))


def slopes(shape: Sequence[int]) -> Array:
    """Return float32 weights of a result, by which its gradient is taken, so that none is lost."""
    return np.random.default_rng(1).standard_normal(tuple(shape)).astype(np.float32)


class _Passes:
    """The passes of a model on some of its data, with moved initial values."""

    def __init__(self, framework: Framework, spec: ModelSpec, module: Any, data: Dataset) -> None:
        self._framework, self._spec, self._module, self._data = framework, spec, module, data
        draw = np.random.default_rng(0)
        self._parameters = {
            name: (value + MOVED * draw.standard_normal(value.shape)).astype(np.float32) if value.ndim <= 1 else value
            for name, value in spec.initial(0).items()
        }
        self._buffers = {
            name: (value * (1 + MOVED * draw.random(value.shape)) + MOVED * draw.random(value.shape)).astype(np.float32)
            for name, value in spec.initial_buffers(0).items()
        }  # running variances stay positive

    def compared(self) -> dict[str, Array]:
        """Return results and gradients of the forward function, float32."""
        x, count = self._inputs(EXAMPLES, self._framework.tensor)

        def forward(parameters: Mapping[str, Any], context: ForwardContext[Any]) -> Any:
            return self._module.forward(parameters, x, context)

        results = self._results(forward, count, np.float32, self._framework.as_in_training)
        return results | self._updated(forward, count) if self._buffers else results

    def _updated(self, forward: Forward, count: int) -> dict[str, Array]:
        """Return the values of buffers after a training pass."""

        def updated(values: Mapping[str, Any]) -> Any:
            context = self._context(True, count, np.float32)
            forward(values, context)
            return {**context.buffers, **context.updated}

        tensors = {name: self._framework.tensor(value) for name, value in self._parameters.items()}
        arrays = {name: self._framework.array(value) for name, value in self._framework.as_in_training(updated)(tensors).items()}
        return {UPDATED + name: value for name, value in arrays.items() if value is not None}

    def single(self) -> dict[str, Array]:
        """Return results of one example in module and graph, which may depend on the number."""
        try:
            in_module = self.in_module(1)
        except (ValueError, RuntimeError):  # such as batch normalisation of a single value
            return {}
        parts = {IN_MODULE: in_module, IN_GRAPH: self.in_graph(1)}
        names = (EVALUATED, TRAINED)
        return {prefix + SINGLE + name: arrays[name] for prefix, arrays in parts.items() for name in names if name in arrays}

    def in_module(self, most: int = EXAMPLES) -> dict[str, Array]:
        """Return results and gradients of the user's module, float64."""
        x, count = self._inputs(most, lambda array: self._framework.tensor(_widened(array)))
        with self._framework.in_float64():
            return self._results(
                lambda parameters, context: self._module.forward(parameters, x, context), count, np.float64, lambda same: same
            )

    def in_graph(self, most: int = EXAMPLES) -> dict[str, Array]:
        """Return results and gradients in float64, of the graph if there is one."""
        carry_out, inputs, count = self._in_float64(most)
        return self._results(lambda parameters, context: carry_out(parameters, inputs, context)[0], count, np.float64, lambda same: same)

    def _in_float64(self, most: int = EXAMPLES) -> tuple[Callable[..., tuple[Any, list[Traced]]], list[Any], int]:
        """Return what computes in float64, the inputs, and the number of examples."""
        x, count = self._inputs(most, lambda array: self._framework.tensor(_widened(array)))
        names = self._spec.settings.inputs
        return self._framework.float64_pass(), [x[name] for name in names] if isinstance(x, Mapping) else [x], count

    def _results(self, forward: Forward, count: int, dtype: Any, wrapped: Callable[[Compute], Compute]) -> dict[str, Array]:
        framework = self._framework
        parameters = {name: value.astype(dtype) for name, value in self._parameters.items()}
        tensors = {name: framework.tensor(value) for name, value in parameters.items()}
        evaluated = wrapped(lambda values: forward(values, self._context(False, count, dtype)))(tensors)
        trained, gradients = framework.gradients(
            wrapped(lambda values: forward(values, self._context(True, count, dtype))),
            parameters,
            lambda shape: slopes(shape).astype(dtype),
        )
        arrays = {EVALUATED: framework.array(evaluated), TRAINED: framework.array(trained)}
        return {name: value for name, value in arrays.items() if value is not None} | {
            GRADIENT + name: value for name, value in gradients.items()
        }

    def trace(self, file: str) -> list[Step]:
        """Return the results of a graph's nodes, or of layers, in order."""
        framework = self._framework
        carry_out, inputs, count = self._in_float64()
        parameters = {name: framework.tensor(_widened(value)) for name, value in self._parameters.items()}
        _, traced = carry_out(parameters, inputs, self._context(file == TRAINING, count, np.float64))
        steps: list[Step] = []
        for part in traced:
            value = framework.array(part.value)
            norm, product = (0.0, 0.0) if value is None else _in_two_numbers(value)
            steps.append(Step(part.operation, part.layer, part.line, norm, product))
        return steps

    def timed(self) -> tuple[float, float | None]:
        """Return the seconds of a training step, and its CPU time over that without our adapter.

        Steps take turns.
        """
        framework = self._framework
        x, _ = self._inputs(TIMED_EXAMPLES, framework.varying)
        parameters, trained = framework.variables(self._spec, self._module, self._parameters)
        buffers = {name: framework.tensor(value) for name, value in self._buffers.items()}
        context: ForwardContext[Any] = ForwardContext(True, buffers, settings=self._spec.settings)
        context.dropout = lambda x, rate, layer: framework.dropped(x, rate)
        steps = [framework.step(lambda: self._module.forward(parameters, x, context), trained)]
        if hasattr(self._module, "unadapted"):
            plain = self._module.unadapted(self._spec.settings)
            inputs = [x[name] for name in self._spec.settings.inputs] if isinstance(x, Mapping) else [x]
            if plain is not None:
                steps.append(framework.step(lambda: plain[0](*inputs), plain[1]))
        (seconds, cpu), *plain_times = _taken_in_turns(steps)
        return seconds, cpu / plain_times[0][1] if plain_times else None

    def _context(self, training: bool, count: int, dtype: Any) -> ForwardContext[Any]:
        buffers = {name: self._framework.tensor(value.astype(dtype)) for name, value in self._buffers.items()}
        context: ForwardContext[Any] = ForwardContext(training, buffers, settings=self._spec.settings)
        if not training:
            return context
        indices = np.arange(count, dtype=np.int32)

        def dropout(x: Any, rate: float, layer: int) -> Any:
            shape = [int(size) for size in x.shape]
            rate = drawn_rate(rate)
            return self._framework.masked(x, keep_mask_of_shape(0, 1, layer, indices, shape, rate), rate)

        return replace(context, dropout=dropout)

    def _inputs(self, count: int, tensor: Callable[[Array], Any]) -> tuple[Any, int]:
        """Return the first training examples as a forward function's inputs, and their number."""
        count = min(count, self._data.info.sizes["train"])
        columns: dict[str, Array] = {}
        for name in self._spec.inputs:
            examples = read_column(self._data, "train", name).take(np.arange(count))
            if examples.offsets is not None:
                columns |= {name: examples.padded(), f"{name}{LENGTHS}": examples.lengths}
            else:
                columns[name] = _normalised(examples.values, self._data) if name == IMAGE else examples.values
        draw = np.random.default_rng(2)
        tensors = {
            name: tensor((value + NOISE * draw.standard_normal(value.shape)).astype(np.float32) if value.dtype.kind == "f" else value)
            for name, value in columns.items()
        }
        return (next(iter(tensors.values())) if len(tensors) == 1 else tensors), count


def _normalised(images_bchw: Array, data: Dataset) -> Array:
    table = normal_table(data.info.mean, data.info.std)
    return np.stack([row[images_bchw[:, channel]] for channel, row in enumerate(table)], axis=1)


def _widened(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _in_two_numbers(value: Array) -> tuple[float, float]:
    """Return the norm, and a product with weights that shows a change of any element."""
    flat = np.nan_to_num(value.astype(np.float64).ravel(), nan=1.5, posinf=2.5, neginf=-2.5)
    return float(np.linalg.norm(flat)), float(flat @ np.cos(0.3 + 0.7391 * np.arange(flat.size)))


def _taken_in_turns(steps: Sequence[Callable[[], None]]) -> list[tuple[float, float]]:
    """Return the least seconds, and seconds of CPU, of each step.

    Other programs only lengthen them.
    """
    for step in (*steps, *steps):  # the first ones compile and allocate
        step()
    taken: list[list[tuple[float, float]]] = [[] for _ in steps]
    until = time.perf_counter() + MAX_TIMED_SECONDS
    while len(taken[0]) < MIN_TIMED or (time.perf_counter() < until and len(taken[0]) < MAX_TIMED):
        for step, times in zip(steps, taken, strict=True):
            began, cpu_began = time.perf_counter(), time.process_time()
            step()
            times.append((time.perf_counter() - began, time.process_time() - cpu_began))
    return [(min(seconds for seconds, _ in times), min(cpu for _, cpu in times)) for times in taken]
