"""Whether a model's results agree on all frameworks, from a process for each.

This process imports no framework.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ...core.drafts import replacing
from ...core.errors import UsageError
from ...core.plugins import available, forward_backends, installed_release, module_exists
from ..base import Method, ModelSpec
from ..imported.description import EVALUATION, TRAINING, ImportedSpec
from ..imported.graph import STATE, nodes_in, read_graph
from ..imported.requests import ask_processes
from .passes import EVALUATED, GRADIENT, IN_GRAPH, IN_MODULE, SINGLE, TRAINED, UPDATED, Array, Outcome, Request

GRAPH_TOLERANCE = 1e-8  # in float64, where rounding has a share of 1e-16
EXPORT_TOLERANCE = 1e-5  # of a module in float64, parts of which may stay float32
RESULT_TOLERANCE = 1e-4  # in float32, as in `conformance`
HARMLESS = 1e-6  # a difference that training in float32 does not notice
GRADIENT_TOLERANCE = 1e-2  # in float32: rounding may cross a ReLU's kink
ROUNDING_FACTOR = 16  # between the errors of two frameworks in float32 against float64, where they differ by rounding alone
MIN_NORM = 1e-3  # of a node's result; smaller ones are rounding alone
KEPT, MAX_KEPT_BYTES = "checked.json", 1 << 16
EXPORT = "its export"  # in a difference from a module
_NAMES = {TRAINED: "results in training", EVALUATED: "results in evaluation", GRADIENT: "gradients", UPDATED: "buffers after training"}
_OF_EXPORT = {**_NAMES, SINGLE: "results of a batch of one example"}


@dataclass(frozen=True, slots=True)
class OnFramework:
    """How a framework carries the model out.

    `problem`: why it does not; `graph_problem`: why its graph could not be computed in float64. `cost`: a training step's CPU time
    over that of the user's model without an adapter, None if not measured.
    """

    backend: str
    method: Method
    problem: str | None = None
    graph_problem: str | None = None
    step_seconds: float | None = None
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The norm of a difference between two frameworks, relative to the first one's result."""

    what: str
    precision: str
    first: str
    second: str
    relative: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether it is within the tolerance."""
        return self.relative <= self.tolerance


@dataclass(frozen=True, slots=True)
class Place:
    """Where results begin to differ.

    A layer's path, the user's line, and an operation or parameter; the first two may be unknown, "".
    """

    layer: str
    line: str
    what: str

    @property
    def text(self) -> str:
        """The place in words."""
        parts = ", ".join(part for part in (self.what, self.line) if part)
        return f"the layer {self.layer!r} ({parts})" if self.layer else parts


@dataclass(frozen=True, slots=True)
class Agreement:
    """The frameworks that a model was compared on, and what was found."""

    model: str
    data: str
    frameworks: tuple[OnFramework, ...]
    differences: tuple[Difference, ...]
    begins: Place | None = None

    @property
    def is_sound(self) -> bool:
        """Whether the model runs everywhere, and results agree."""
        return all(part.problem is None for part in self.frameworks) and all(difference.agrees for difference in self.differences)


def compared_backends(model: str) -> list[str]:
    """Return the installed backends that have the model. Raises UsageError for an unknown one."""
    known = available("backend")
    return [name for name in forward_backends(model) if known[name].installed and module_exists(f"{__package__}.{name}")]


def compare(model: str, data: str, data_dir: Path | None, spec: ModelSpec, backends: Sequence[str], *, timed: bool = False) -> Agreement:
    """Compute the model on the backends and compare it with the first one.

    Raises UsageError if it runs on none.
    """
    problems = dict(spec.problems) if isinstance(spec, ImportedSpec) else {}
    with tempfile.TemporaryDirectory() as folder:
        request = Request(model, data, None if data_dir is None else str(data_dir), folder, timed)
        running = [backend for backend in backends if backend not in problems]
        for together in [[backend] for backend in running] if timed else [running]:  # timed steps have the processor to themselves
            answers = zip(together, _ask(request, together), strict=True)
            problems |= {backend: problem for backend, problem in answers if problem is not None}
        if all(backend in problems for backend in backends):
            raise UsageError(next(iter(problems.values())))
        sound = [backend for backend in backends if backend not in problems]
        outcomes = {backend: _outcome(folder, backend) for backend in sound}
        arrays = {backend: _arrays(folder, backend) for backend in sound}
        frameworks = tuple(_on_framework(spec, backend, problems, outcomes) for backend in backends)
        differences = [difference for backend in sound for difference in _export_differences(backend, arrays[backend])]
        for second in sound[1:]:
            differences += _differences(sound[0], second, arrays[sound[0]], arrays[second])
        differing = [difference for difference in differences if not difference.agrees]
        worst = next((difference for difference in differing if difference.relative > HARMLESS), next(iter(differing), None))
        begins = None if worst is None else _place(worst, request, spec, arrays)
        return Agreement(model, data, frameworks, tuple(differences), begins)


def _ask(request: Request, backends: Sequence[str]) -> list[str | None]:
    """Have each framework compute what is requested; return their problems."""
    return ask_processes([f"{__package__}.{backend}" for backend in backends], msgspec.json.encode(request), f"computing {request.model}")


def _outcome(folder: str, backend: str) -> Outcome:
    return msgspec.json.decode(Path(folder, f"{backend}.json").read_bytes(), type=Outcome)


def _arrays(folder: str, backend: str) -> dict[str, Array]:
    with np.load(Path(folder, f"{backend}.npz"), allow_pickle=False) as file:
        return dict(file)


def _on_framework(spec: ModelSpec, backend: str, problems: Mapping[str, str], outcomes: Mapping[str, Outcome]) -> OnFramework:
    outcome = outcomes.get(backend, Outcome())
    problem = problems.get(backend)
    return OnFramework(backend, spec.method(backend), problem, outcome.graph_problem, outcome.step_seconds, outcome.cost)


def _differences(first: str, second: str, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> list[Difference]:
    """Compare graphs in float64, where both have them, and what trains in float32."""
    differences: list[Difference] = []
    in_graph = all(IN_GRAPH + TRAINED in arrays for arrays in (expected, actual))
    for prefix, precision in ((IN_GRAPH, "float64"), ("", "float32")) if in_graph else (("", "float32"),):
        for name, text in _NAMES.items():
            tolerance = GRAPH_TOLERANCE if prefix else GRADIENT_TOLERANCE if name == GRADIENT else RESULT_TOLERANCE
            if in_graph and not prefix:
                tolerance = max(tolerance, ROUNDING_FACTOR * min(_rounding(name, expected), _rounding(name, actual)))
            if pairs := _pairs(prefix + name, expected, actual):
                differences.append(Difference(text, precision, first, second, _relative(pairs), tolerance))
    return differences


def _rounding(name: str, arrays: Mapping[str, Array]) -> float:
    """Return how far a framework's results in float32 are from its own in float64; 0 if unknown."""
    error = _relative([(value, arrays.get(key.removeprefix(IN_GRAPH))) for key, value in arrays.items() if key.startswith(IN_GRAPH + name)])
    return error if np.isfinite(error) else 0.0


def _export_differences(backend: str, arrays: Mapping[str, Array]) -> list[Difference]:
    """Compare a module with its graph, on the module's framework in float64."""
    module, graph = _with_prefix(IN_MODULE, arrays), _with_prefix(IN_GRAPH, arrays)
    return [
        Difference(text, "float64", backend, EXPORT, _relative(_pairs(name, module, graph)), EXPORT_TOLERANCE)
        for name, text in _OF_EXPORT.items()
        if any(key.startswith(name) for key in module)
    ]


def _with_prefix(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _pairs(prefix: str, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> list[tuple[Array, Array | None]]:
    return [(value, actual.get(name)) for name, value in expected.items() if name.startswith(prefix)]


def _relative(pairs: Sequence[tuple[Array, Array | None]]) -> float:
    """Return ‖actual − expected‖ / ‖expected‖ over all arrays.

    Infinite for other shapes and for values that are not finite.
    """
    differing = norm = 0.0
    for expected, actual in pairs:
        if actual is None or expected.shape != actual.shape or not (np.isfinite(expected).all() and np.isfinite(actual).all()):
            return float("inf")
        differing += float(np.sum((actual.astype(np.float64) - expected) ** 2))
        norm += float(np.sum(expected.astype(np.float64) ** 2))
    return float(np.sqrt(differing / norm)) if norm else float(differing > 0)


def _place(worst: Difference, request: Request, spec: ModelSpec, arrays: Mapping[str, Mapping[str, Array]]) -> Place | None:
    """Return where a difference begins, as far as it can be found."""
    if worst.second == EXPORT:
        parts = (_with_prefix(prefix, arrays[worst.first]) for prefix in (IN_MODULE, IN_GRAPH))
        place = _place_of_gradients(worst, "", spec, *parts) if worst.what == _NAMES[GRADIENT] else None
        if worst.what == _OF_EXPORT[SINGLE]:
            return Place("", "", "a condition on the number of examples, which an export settles for batches of two and more")
        return place or Place("", "", f"the export, which is not what {worst.first} computes")
    prefix = IN_GRAPH if worst.precision == "float64" else ""
    expected, actual = arrays[worst.first], arrays[worst.second]
    if worst.what == _NAMES[GRADIENT]:
        return _place_of_gradients(worst, prefix, spec, expected, actual)
    if prefix:
        return _place_in_graph(worst, request)
    name = EVALUATED if worst.what == _NAMES[EVALUATED] else TRAINED
    for backend in (worst.first, worst.second):
        graph = arrays[backend].get(IN_GRAPH + name)
        if graph is not None and _relative([(graph, arrays[backend][name])]) > worst.tolerance:
            return Place("", "", f"the export, which is not what {backend} computes")
    return None


def _place_in_graph(worst: Difference, request: Request) -> Place | None:
    """Return the first node whose results differ."""
    graph = EVALUATION if worst.what == _NAMES[EVALUATED] else TRAINING
    backends = (worst.first, worst.second)
    for problem in _ask(msgspec.structs.replace(request, traced=graph), backends):
        if problem is not None:
            raise UsageError(problem)
    for expected, actual in zip(*(_outcome(request.folder, backend).trace for backend in backends), strict=True):
        most = GRAPH_TOLERANCE * max(expected.norm, actual.norm, MIN_NORM)
        if abs(expected.norm - actual.norm) > most or abs(expected.product - actual.product) > most:
            return Place(expected.layer, expected.line, expected.operation)
    return None


def _place_of_gradients(
    worst: Difference, prefix: str, spec: ModelSpec, expected: Mapping[str, Array], actual: Mapping[str, Array]
) -> Place | None:
    """Return the differing parameter that is used last, as gradients are computed backwards."""
    keys = [key for key in expected if key.startswith(prefix + GRADIENT)]
    whole = float(np.sqrt(sum(np.sum(expected[key].astype(np.float64) ** 2) for key in keys)))
    differing = [
        key.removeprefix(prefix + GRADIENT)
        for key in keys
        if key not in actual or np.linalg.norm(actual[key].astype(np.float64) - expected[key]) > worst.tolerance * whole
    ]
    uses = _uses(spec)
    last = max(differing, key=lambda name: uses.get(name, (0, ""))[0], default=None)
    return None if last is None else Place(last.rpartition(".")[0], uses.get(last, (0, ""))[1], f"the gradient of {last}")


def _uses(spec: ModelSpec) -> dict[str, tuple[int, str]]:
    """Return where in the training graph, or model, each parameter is first used, and the line."""
    uses = {parameter.name: (position, "") for position, parameter in enumerate(spec.parameters)}
    if not (isinstance(spec, ImportedSpec) and spec.settings.has_graph):
        return uses
    nodes = read_graph(spec.settings.folder / TRAINING).nodes
    states = {node.name: node.arguments["name"] for node in nodes if node.operation == STATE}
    for position, node in reversed(list(enumerate(nodes))):
        uses |= {states[name]: (position, node.line) for name in nodes_in(list(node.arguments.values())) if name in states}
    return uses


class _Kept(msgspec.Struct):
    """The outcome of checks, next to a description.

    `releases` of the packages that they were made with; `costs` as in `OnFramework`, by backend.
    """

    releases: dict[str, str | None]
    costs: dict[str, float | None] = {}


def _releases(backends: Sequence[str]) -> dict[str, str | None]:
    known = available("backend")
    names = ["crosstrain", *(name for backend in backends for name in known[backend].distributions)]
    return {name: installed_release(name) for name in names}


def keep(spec: ModelSpec, agreement: Agreement) -> None:
    """Keep that an imported model is sound, and its measured costs, next to its description."""
    if not isinstance(spec, ImportedSpec) or _refusal(agreement) is not None:
        return
    kept = _read_kept(spec) or _Kept({})
    kept.releases |= _releases([part.backend for part in agreement.frameworks])
    kept.costs |= {part.backend: part.cost for part in agreement.frameworks if part.cost is not None}
    with replacing(spec.settings.folder / KEPT) as draft:
        draft.write_bytes(msgspec.json.encode(kept))


def _read_kept(spec: ModelSpec) -> _Kept | None:
    """Return what was kept about a model under the installed releases; None without."""
    if not isinstance(spec, ImportedSpec):
        return None
    try:
        with (spec.settings.folder / KEPT).open("rb") as file:
            kept = msgspec.json.decode(file.read(MAX_KEPT_BYTES), type=_Kept)
    except (OSError, ValueError):
        return None
    return kept if all(installed_release(name) == release for name, release in kept.releases.items()) else None


def known_cost(spec: ModelSpec, backend: str) -> float | None:
    """Return the cost of a model's adapter as measured on this machine; None without."""
    kept = _read_kept(spec)
    return None if kept is None else kept.costs.get(backend)


def needs_check(spec: ModelSpec, backend: str) -> bool:
    """Return whether a backend would carry out a translation, or Keras layers, unchecked."""
    if not isinstance(spec, ImportedSpec) or spec.method(backend) == "native" or _counterpart(spec, backend) is None:
        return False
    kept = _read_kept(spec)
    return kept is None or not _releases([backend]).keys() <= kept.releases.keys()


def _counterpart(spec: ImportedSpec, backend: str) -> str | None:
    """Return the framework to compare with: a module's own, or of Keras another installed one."""
    if spec.framework != "keras":
        return spec.framework
    return next((name for name in compared_backends(spec.name) if name != backend and name not in spec.problems), None)


def check_translation(model: str, data: str, data_dir: Path | None, spec: ModelSpec, backend: str) -> None:
    """Compare an imported model on a backend with itself elsewhere, on a few examples.

    That it is sound is kept. Raises UsageError, which names the place, if they differ.
    """
    if not isinstance(spec, ImportedSpec) or (counterpart := _counterpart(spec, backend)) is None:
        return
    agreement = compare(model, data, data_dir, spec, [counterpart, backend])
    if (refusal := _refusal(agreement)) is not None:
        raise UsageError(refusal)
    keep(spec, agreement)


def _refusal(agreement: Agreement) -> str | None:
    """Return why the model should not be trained where it is no more the user's, or None."""
    for part in agreement.frameworks:
        if part.problem is not None:
            return part.problem
    worst = next((part for part in agreement.differences if part.relative > max(part.tolerance, HARMLESS)), None)
    if worst is None:
        return None
    begins = "" if agreement.begins is None else f" It begins at {agreement.begins.text}."
    differs = (
        f"the export of {agreement.model} differs from it on {worst.first}"
        if worst.second == EXPORT
        else f"{agreement.model} on {worst.second} differs from that on {worst.first}"
    )
    return (
        f"model: {differs}: {worst.what} by {worst.relative:.1e} of the norm, in {worst.precision}.{begins} Choose --backend {worst.first}."
    )
