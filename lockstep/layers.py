"""The layers of an update, each by itself on both sides, judged against float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..backends.replay import LayerOnTape
from ..core.errors import UsageError
from ..core.job import Job
from ..data.base import IMAGE
from ..data.store.stored_dataset import StoredDataset
from ..models.base import ModelSpec
from ..models.imported.description import ImportedSpec
from ..models.imported.graph import NodeOnTape
from ..models.imported.tape import SIZE
from ..models.layers.reference import Call, Part, Value
from ..records.store.lockstep_results import Finding, LayerRow
from . import causes
from .arrays import Arrays, read, write_arrays
from .batch import batch_columns
from .graph_layers import KnownLayer, known_keras_layer, known_layer
from .graph_tape import EXACT, ON_TAPE, TapeRequest
from .losses import cause_of_loss
from .processes import REFERENCE, SideProcesses, layers_computed, started
from .reference import arrays_of, tape_of
from .replaying import DATA, INDICES, LOSS, STATE, TAPE, TARGET, ReplayRequest, examples_of
from .rounding import UNIT, error, relative, unexplained, unexplained_beside
from .updates import BUFFER, PARAMETER

Array = NDArray[Any]
THREADS = 2  # that judge results
EXAMPLES = 16  # of a batch whose layers are computed one by one
MAX_LEFT_OF_LINE = 1e-4  # of pixels that are normalised by other constants


class UncomputedError(UsageError):
    """Layers that cannot be computed one by one."""


class LayerTape:
    """The layers of an update in float64, from which each side computes them by itself."""

    def __init__(
        self, job: Job, spec: ModelSpec, data: StoredDataset, state: Mapping[str, Array], step: int, folder: Path, side: SideProcesses
    ) -> None:
        """Compute a tape in files of a folder; of an imported model in a process of this side."""
        self._side = side
        self._job, self._spec, self._step, self._folder = job, spec, step, folder
        self._parameters = {name.removeprefix(PARAMETER): array for name, array in state.items() if name.startswith(PARAMETER)}
        self._buffers = {name.removeprefix(BUFFER): array for name, array in state.items() if name.startswith(BUFFER)}
        self._by_ratio = isinstance(spec, ImportedSpec)  # magnitudes are not known for every operation
        self._nodes: dict[str, NodeOnTape] = {}  # of an imported model
        batches = examples_of(job, data, spec.objective.weight, step, EXAMPLES)
        self._indices = batches.indices
        self._columns, self._target = batch_columns(data, spec.inputs, batches), batch_columns(data, (spec.target,), batches)
        write_arrays(str(folder / STATE), {name: value for name, value in state.items() if not name.startswith("slots/")})
        self._layers: list[LayerOnTape] | None = None
        self.rows: list[LayerRow] = []
        self.tensors = 0
        if self._by_ratio:
            self._calls = self._tape_of_graph()
            return
        tape, loss = tape_of(job, spec, state, self._columns, self._target, self._indices, step)
        arrays = arrays_of(tape, loss) | {TARGET + name: value for name, value in self._target.items()}
        write_arrays(str(folder / TAPE), arrays)
        self._layers = [LayerOnTape(call.operation, len(call.inputs), list(call.parameters)) for call in tape.layers]
        self._calls = [*((str(number), call) for number, call in enumerate(tape.layers)), (LOSS, loss)]

    @property
    def not_exercised(self) -> list[str]:
        """What the batch does not show, in words."""
        kinks = [call for _, call in self._calls if call.operation in ("relu", "conv_pool", "dense_relu") and call.outputs]
        return [f"{call.label}: no element is below 0" for call in kinks if not (call.results["output"][0] == 0).any()]

    def request(self, job: Job, results: str) -> ReplayRequest:
        """Return what a side is asked for: results in a file of the folder."""
        return ReplayRequest(job.model_dump(mode="json"), str(self._folder), results, self._step, EXAMPLES, self._layers)

    def findings(self, results: Sequence[Arrays], precisions: Sequence[str]) -> list[Finding]:
        """Return what differs on the sides A and B; keep a row for each result."""
        return self._data_findings(results) or self._judged(results, precisions)

    def _tape_of_graph(self) -> list[tuple[str, Call]]:
        folder = self._folder
        request = TapeRequest(self._job.model_dump(mode="json"), str(folder), self._step, EXAMPLES)
        (problem,) = layers_computed(started([self._side], REFERENCE, self._job.start_timeout), [request])
        if problem is not None:
            raise UncomputedError(problem)
        exact = read(str(folder / EXACT))
        calls: list[tuple[str, Call]] = []
        nodes = msgspec.json.decode((folder / ON_TAPE).read_bytes(), type=list[NodeOnTape])
        self._nodes = {node.place: node for node in nodes}
        results: dict[str, dict[str, Array]] = {}
        for name, value in exact.items():
            place, _, tensor = name.partition("/")
            results.setdefault(place, {})[tensor] = value
        parts = {place: _parts(tensors) for place, tensors in results.items()}
        calls += [(node.place, Call(node.layer, node.operation, (), {}, (), (), parts.get(node.place, {}), None)) for node in nodes]
        logits = Value(read(str(folder / TAPE))[f"{LOSS}/input 0"].astype(np.float64))
        return [*calls, (LOSS, Call("loss", "loss", (), {}, (logits,), (), parts[LOSS], None))]

    def _data_findings(self, results: Sequence[Arrays]) -> list[Finding]:
        findings = []
        for name, arrays in zip("AB", results, strict=True):
            if not np.array_equal(arrays[INDICES], self._indices):
                findings.append(
                    Finding(self._step, "data", side=name, error=1.0, cause="the order of the examples: another seed or shuffling")
                )
                continue
            for prefix, wanted in ((DATA, self._columns), (TARGET, self._target)):
                for column, exact in wanted.items():
                    self.tensors += 1
                    value = arrays[prefix + column]
                    if value.shape != exact.shape or not np.array_equal(value, exact):
                        apart = relative(value, exact) if value.shape == exact.shape else float("inf")
                        cause = (_data_cause(value, exact) if column == IMAGE else "") or _differing_examples(value, exact)
                        findings.append(Finding(self._step, "data", "", column, name, apart, 0.0, cause))
        return findings

    def _judged(self, results: Sequence[Arrays], precisions: Sequence[str]) -> list[Finding]:
        findings: list[Finding] = []
        for place, call in self._calls:
            for tensor in call.results:
                if any(f"{place}/{tensor}" not in arrays for arrays in results):
                    raise UncomputedError(f"{call.label} has no {tensor} on one of the sides")
        results_of_calls = [(place, call, tensor) for place, call in self._calls for tensor in call.results]
        with ThreadPoolExecutor(THREADS) as pool:  # numpy leaves the interpreter's lock for large arrays
            errors = pool.map(
                lambda result: [error(arrays[f"{result[0]}/{result[2]}"], *result[1].results[result[2]]) for arrays in results],
                results_of_calls,
            )
            for (place, call, tensor), errors_of_sides in zip(results_of_calls, errors, strict=True):
                values = [arrays[f"{place}/{tensor}"] for arrays in results]
                findings += self._result(place, call, tensor, values, errors_of_sides, precisions)
        return _merged(findings)

    def _result(
        self,
        place: str,
        call: Call,
        tensor: str,
        values: Sequence[Array],
        errors: Sequence[tuple[float, float]],
        precisions: Sequence[str],
    ) -> list[Finding]:
        if self._by_ratio:
            bad = [unexplained_beside(errors[number][0], errors[1 - number][0], precisions[number]) for number in range(2)]
        else:
            bad = [unexplained(*errors[number], precisions[number]) for number in range(2)]
        for number, (whole, _) in enumerate(errors):
            bad[number] = bad[number] or (whole > causes.MIN_HIDDEN and self._hidden(place, call, tensor, values[number]))
        self.tensors += 1
        self.rows.append(LayerRow(self._step, call.label, call.operation, tensor, errors[0][0] * UNIT, errors[1][0] * UNIT, not any(bad)))
        part = "buffers" if self._is_buffer(place, tensor) else _part(call, tensor)
        layer = "" if call.operation == "loss" else call.label
        return [
            Finding(
                self._step,
                part,
                layer,
                tensor,
                "AB"[number],
                errors[number][0] * UNIT,
                max(errors[1 - number][0], 1.0) * UNIT,
                self._cause(place, call, tensor, values[number].astype(np.float64)),
            )
            for number in range(2)
            if bad[number]
        ]

    def _cause(self, place: str, call: Call, tensor: str, value: Array) -> str:
        if call.operation == "loss":
            return cause_of_loss(self._spec, self._target, call, tensor, value)
        known = self._known(place, call, tensor)
        return causes.of_layer(known.call, known.tensors.get(tensor, tensor), known.laid(value), known.parameters, known.buffers)

    def _hidden(self, place: str, call: Call, tensor: str, value: Array) -> bool:
        """Return whether an error within its limit has the form of a fault."""
        if "norm" not in call.operation.lower() or not tensor.startswith("output") or self._is_buffer(place, tensor):
            return False
        known = self._known(place, call, tensor)
        value = known.laid(value.astype(np.float64))
        return bool(causes.hidden_epsilon(known.call, known.tensors.get(tensor, tensor), value, known.parameters))

    def _is_buffer(self, place: str, tensor: str) -> bool:
        return place in self._nodes and tensor in self._nodes[place].buffers

    @cached_property
    def _tape(self) -> Arrays:
        return read(str(self._folder / TAPE))

    def _known(self, place: str, call: Call, tensor: str) -> KnownLayer:
        """Return the layer of a call, which an operation that is no layer of ours stands for itself."""
        if not isinstance(self._spec, ImportedSpec):
            return KnownLayer(call, {}, self._parameters, self._buffers)
        state = self._parameters | self._buffers
        if self._spec.settings.is_keras:
            known = known_keras_layer(self._nodes[place], state, self._tape)
        else:
            known = known_layer(self._spec, place, state, self._columns, self._tape)
        known = known or KnownLayer(call, {}, {}, {})
        exact, magnitude = call.results[tensor]
        known.call.results[known.tensors.get(tensor, tensor)] = known.laid(exact), known.laid(magnitude)
        return known


def _parts(tensors: Mapping[str, Array]) -> dict[str, Part]:
    """Return results with their magnitudes."""
    return {name: (value, tensors.get(SIZE + name, np.abs(value))) for name, value in tensors.items() if not name.startswith(SIZE)}


def _part(call: Call, tensor: str) -> str:
    if call.operation == "loss":
        return "loss"
    if tensor.startswith("buffer"):
        return "buffers"
    return "forward" if tensor.startswith(("output", "given")) else "backward"


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return the first finding of each part and side, with the number of further layers."""
    kept: dict[tuple[str, str], Finding] = {}
    layers: dict[tuple[str, str], set[str]] = {}
    for finding in findings:
        key = finding.part, finding.side
        kept.setdefault(key, finding)
        layers.setdefault(key, set()).add(finding.layer)
        if not kept[key].cause and finding.layer == kept[key].layer:
            kept[key].cause = finding.cause
    for key, finding in kept.items():
        finding.further = len(layers[key]) - 1
    return list(kept.values())


def _data_cause(value: Array, exact: Array) -> str:
    if value.shape != exact.shape:
        return ""
    for words, order in (("", slice(None)), ("the channels are permuted: reversed", slice(None, None, -1))):
        fits = [_line(exact[:, order][:, channel], value[:, channel]) for channel in range(exact.shape[1])]
        if all(left <= MAX_LEFT_OF_LINE for _, _, left in fits):
            factor, summand, _ = fits[0]
            return words or (
                f"pixels are normalised by other constants: the first channel is {factor:.5g} times as large, plus {summand:.4g}"
            )
    return ""


def _line(x: Array, y: Array) -> tuple[float, float, float]:
    """Return factor and summand of the line from x to y, and the largest difference from it."""
    x, y = x.ravel().astype(np.float64), y.ravel().astype(np.float64)
    factor, summand = np.polyfit(x, y, 1)
    return float(factor), float(summand), float(np.abs(factor * x + summand - y).max())


def _differing_examples(value: Array, exact: Array) -> str:
    if value.shape != exact.shape:
        return ""
    differing = [place for place in range(len(exact)) if not np.array_equal(value[place], exact[place])]
    return f"{len(differing)} of {len(exact)} examples differ, the first at place {differing[0] + 1}"
