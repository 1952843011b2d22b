"""Predictions for other numbers of nodes, with their validated band, as a table and as JSON."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from ...core.cluster import MAX_RANKS
from ...core.console import one_line
from ...core.errors import UsageError
from ...core.units import bandwidth_text
from ...records.store.schema import SCHEMA
from ...records.text import UNKNOWN, bytes_text, count_text, number_text, rate_text, seconds_text
from ..runs.run import batch_text
from .cost_model import Link, Step, Topology, ring_step, server_step
from .fit import Fitted, Observed

VALIDATION_FILE = Path(__file__).with_name("validation.toml")
COVERED = 0.9  # share of the validation points within the band (nearest rank)


@dataclass(frozen=True, slots=True)
class Point:
    """A run predicted from others: examples per second of all workers."""

    nodes: int
    bandwidth_bits_per_second: float
    batch_size: int
    measured_examples_per_second: float
    predicted_examples_per_second: float

    @property
    def error(self) -> float:
        """The relative error, 0 or more."""
        return abs(self.predicted_examples_per_second / self.measured_examples_per_second - 1)

    @property
    def factor(self) -> float:
        """The larger of predicted and measured over the smaller."""
        return math.exp(abs(math.log(self.predicted_examples_per_second / self.measured_examples_per_second)))


@dataclass(frozen=True, slots=True)
class ValidationGroup:
    """Predictions for one backend and mode, by a model fitted to the runs `fitted_on`."""

    backend: str
    mode: str
    workload: str
    fitted_on: tuple[str, ...]
    points: tuple[Point, ...]

    @property
    def median_error(self) -> float:
        """The median relative error."""
        return median(point.error for point in self.points)

    @property
    def largest_error(self) -> float:
        """The largest relative error."""
        return max(point.error for point in self.points)

    @property
    def factor(self) -> float:
        """The factor, at least 1, within which `COVERED` of the points lie."""
        factors = sorted(point.factor for point in self.points)
        return factors[math.ceil(COVERED * len(factors)) - 1]

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        errors = {"median_error_fraction": self.median_error, "largest_error_fraction": self.largest_error}
        return {**asdict(self), **errors, "band_factor": self.factor}


@dataclass(frozen=True, slots=True)
class Validation:
    """All validation groups, with date and machine."""

    measured_on: str
    machine: str
    judged: tuple[ValidationGroup, ...]

    def find(self, backend: str, mode: str, runs: int) -> ValidationGroup | None:
        """Return the validation for a backend, a mode and a number of fitted runs, if any."""
        key = (backend, mode, runs)
        return next((judged for judged in self.judged if (judged.backend, judged.mode, len(judged.fitted_on)) == key), None)


def read_validation(path: Path = VALIDATION_FILE) -> Validation:
    """Read the table, which `python -m benchmarks.prediction` writes."""
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    for group in values["judged"]:
        group |= {"fitted_on": tuple(group["fitted_on"]), "points": tuple(Point(**point) for point in group["points"])}
    return Validation(values["measured_on"], values["machine"], tuple(ValidationGroup(**group) for group in values["judged"]))


def band_factor(judged: ValidationGroup, nodes: int, bits_per_second: float | None) -> tuple[float, float]:
    """Return (factor, doublings): measured times are expected within predicted ÷ or × factor."""
    # By caution, each doubling of nodes or bandwidth (either way) beyond those validated multiplies by the factor again.
    doublings = max(0.0, math.log2(nodes / max(point.nodes for point in judged.points)))
    if bits_per_second is not None and nodes > 1:
        bandwidths: Sequence[float] = [point.bandwidth_bits_per_second for point in judged.points]
        doublings += max(0.0, math.log2(bits_per_second / max(bandwidths)), math.log2(min(bandwidths) / bits_per_second))
    return judged.factor ** (1 + doublings), doublings


Scaling = Literal["weak", "strong"]
POOR_FIT = 0.15  # error on a fitted run from which on the model is unreliable
MIN_SHARE_BETWEEN_STEPS = 0.05  # minimum share of the run's time between steps to be mentioned
SHORT_SECONDS = 0.1  # five periods of the kernel's CPU quota; shorter steps are distorted by more than a tenth
MODES: dict[Topology, str] = {"ring": "sync", "ps": "async"}


@dataclass(frozen=True, slots=True)
class Question:
    """What to predict; weak scaling keeps each worker's batch, strong the global batch."""

    nodes: tuple[int, ...]
    link: Link
    topology: Topology
    ps: int
    scalings: tuple[Scaling, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A prediction."""

    scaling: Scaling
    nodes: int
    workers: int
    batch_size: int  # of the largest worker
    global_batch_size: float
    step: Step | None  # None with fewer examples than workers, or too many workers
    examples_per_second: float | None
    speedup: float | None  # relative to the prediction for one node
    factor: float | None  # times are within `step.seconds` ÷ or × this, None without validation
    doublings: float | None  # distance from the validated runs
    delayed: bool = False  # too much latency for a band

    @property
    def efficiency(self) -> float | None:
        """Speed-up per node."""
        return None if self.speedup is None else self.speedup / self.nodes


def predict(fitted: Fitted, question: Question, validation: Validation) -> list[Row]:
    """Return a row for each scaling and number of nodes. Raises UsageError for too many servers."""
    if question.topology == "ps" and question.ps > min(question.nodes):
        raise UsageError(f"ps: got {question.ps}; allowed: at most one on each node, and {min(question.nodes)} of --nodes is fewer.")
    judged = validation_for(fitted, question.topology, validation)
    return [_predicted(fitted, question, scaling, nodes, judged) for scaling in question.scalings for nodes in question.nodes]


def validation_for(fitted: Fitted, topology: Topology, validation: Validation) -> ValidationGroup | None:
    """Return the validation for this fit; None if its nodes shared cores or differed in them."""
    if topology == "ring" and fitted.ring.exchange != "native":
        return None
    if topology not in fitted.measured or any(run.nodes_sharing_cores > 1 for run in fitted.runs) or _has_unequal_cores(fitted):
        return None
    mode = MODES[topology]
    runs = [run for run in fitted.runs if run.mode == mode and run.communicates]
    different = len({run.bytes_per_second for run in runs if run.bytes_per_second is not None}) > 1
    return validation.find(str(fitted.first.same["backend"]), mode, 2 if different else 1)


MAX_LATENCY = 0.1  # share of the step above which there is no band: latency was never validated


def _has_unequal_cores(fitted: Fitted) -> bool:
    return len(fitted.first.same["cores_per_node"]) > 1


def _predicted(fitted: Fitted, question: Question, scaling: Scaling, nodes: int, judged: ValidationGroup | None) -> Row:
    first = fitted.first
    workers = nodes * first.procs_per_node
    global_batch = first.batch_size * workers if scaling == "weak" else first.global_batch_size
    step, rate = _step(fitted, question, nodes, global_batch)
    _, single_node_rate = _step(fitted, question, 1, first.batch_size * first.procs_per_node if scaling == "weak" else global_batch)
    speedup = None if rate is None or single_node_rate is None else rate / single_node_rate
    bits = None if question.link.bytes_per_second is None else 8 * question.link.bytes_per_second
    undelayed, _ = _step(fitted, replace(question, link=replace(question.link, latency_seconds=0.0)), nodes, global_batch)
    delayed = step is not None and undelayed is not None and step.seconds - undelayed.seconds > MAX_LATENCY * step.seconds
    factor, doublings = (None, None) if judged is None or delayed else band_factor(judged, nodes, bits)
    return Row(scaling, nodes, workers, math.ceil(global_batch / workers), global_batch, step, rate, speedup, factor, doublings, delayed)


def _step(fitted: Fitted, question: Question, nodes: int, global_batch: float) -> tuple[Step | None, float | None]:
    first = fitted.first
    workers = nodes * first.procs_per_node
    if global_batch < workers or _too_many(fitted, question, workers):
        return None, None
    compute = fitted.compute.seconds(math.ceil(global_batch / workers))  # sync steps wait for the worker with the largest slice
    if question.topology == "ring":
        step = ring_step(compute, first.payload_bytes, workers, nodes, fitted.ring, question.link)
        return step, global_batch * step.updates_per_second
    ps = min(question.ps, nodes)
    step = server_step(compute, first.payload_bytes, first.procs_per_node, nodes, ps, fitted.server, question.link)
    return step, global_batch / workers * step.updates_per_second


def _too_many(fitted: Fitted, question: Question, workers: int) -> bool:
    return question.topology == "ring" and fitted.ring.exchange == "direct" and workers > MAX_RANKS


def remarks(fitted: Fitted, question: Question, rows: Sequence[Row]) -> list[str]:
    """Return the remarks on these predictions, most important first."""
    checks = (
        _remark_on_fit,
        _remark_on_exchange,
        _remark_on_errors,
        _remark_on_extrapolation,
        _remark_on_cores,
        _remark_on_batches,
        _remark_on_validation,
    )
    return [text for check in checks for text in check(fitted, question, rows)]


def _remark_on_fit(fitted: Fitted, question: Question, rows: Sequence[Row]) -> Iterator[str]:
    contended = dict.fromkeys(run.name for run in fitted.runs if run.contended)
    if contended:
        yield f"CPU contention from other programs slowed {' and '.join(contended)}: speeds may be predicted too low."
    if not fitted.measured:
        yield (
            "No run had two workers, so that software is assumed to exchange for nothing: times are lower bounds. "
            "Add a run of two nodes for more than that."
        )
    elif question.topology not in fitted.measured:
        wanted, fitted_mode = ("sync", "async") if question.topology == "ring" else ("async", "sync")
        yield f"No run was {wanted}: what messages cost is taken from the {fitted_mode} runs. That was never judged, so there is no band."


def _remark_on_exchange(fitted: Fitted, question: Question, rows: Sequence[Row]) -> Iterator[str]:
    if question.topology != "ring":
        return
    exchange = fitted.ring.exchange
    names = [run.name for run in fitted.runs if run.mode == "sync" and run.communicates and run.exchange != exchange]
    if names:
        yield f"{' and '.join(names)}: trained with another exchange, so only what computing costs is taken from there."
    if exchange == "direct":
        yield "The direct exchange was never judged, so there is no band."
    lost = [row.nodes for row in rows if _too_many(fitted, question, row.workers)]
    if lost:
        yield f"{_nodes_text(lost)}: the direct exchange is for {MAX_RANKS} workers at most."


def _remark_on_errors(fitted: Fitted, question: Question, rows: Sequence[Row]) -> Iterator[str]:
    for run in fitted.runs:
        other_exchange = question.topology == "ring" and run.exchange != fitted.ring.exchange
        if run.mode != MODES[question.topology] or not run.communicates or other_exchange:
            continue
        run_question = replace(question, link=Link(run.bytes_per_second), ps=run.ps)
        _, rate = _step(replace(fitted, runs=(run,)), run_question, run.nodes, run.global_batch_size)
        assert rate is not None, "a run has an example for each worker"
        error = rate / run.examples_per_second - 1
        poor = " It does not describe this run well, so do not rely on it." if abs(error) > POOR_FIT else ""
        which = "with the exchange tried after it" if run.tried else "itself"
        reported = run.reported_examples_per_second
        lost = 0.0 if reported is None else 1 - reported / run.examples_per_second
        between = ""
        if lost >= MIN_SHARE_BETWEEN_STEPS:
            between = f" In all it made {reported:,.0f}: {lost:.0%} of its time lay between steps, and the model leaves that out."
        yield (
            f"For {run.name} {which} the model gives {rate:,.0f} examples/s while it trains; {run.examples_per_second:,.0f} were measured "
            f"in its steps ({error:+.0%}).{poor}{between}"
        )


def _remark_on_extrapolation(fitted: Fitted, question: Question, rows: Sequence[Row]) -> Iterator[str]:
    most = max(run.nodes for run in fitted.runs)
    beyond = [row.nodes for row in rows if row.step is not None and row.nodes > 2 * most]
    if beyond:
        yield (
            f"{_nodes_text(beyond)} are an extrapolation from {most}: the model knows no stragglers, no switches that are shared and no "
            "failures, all of which grow with the number of nodes."
        )
    wide = [row.nodes for row in rows if row.doublings]
    if wide:
        yield f"The band of {_nodes_text(wide)} is widened, since nothing was judged there; the rule for that is caution, not measurement."


def _remark_on_cores(fitted: Fitted, question: Question, rows: Sequence[Row]) -> Iterator[str]:
    sharing = max(run.nodes_sharing_cores for run in fitted.runs)
    if sharing > 1:
        yield (
            f"{sharing} nodes of a fitted run shared cores, so that their steps were slower than those of nodes with their own cores: the "
            "fit is doubtful, more nodes may be slower than fewer, and there is no band. Give each node its share with --cores-per-node."
        )
    if _has_unequal_cores(fitted):
        limits = ", ".join(f"{cores:g}" for cores in fitted.first.same["cores_per_node"])
        yield (
            f"The nodes of the fitted runs may use different numbers of cores ({limits}). Every node that is predicted computes as the "
            "slowest of them does, one alone too; that was never judged, so there is no band."
        )
    shortest = min(run.slowest for run in fitted.runs)
    if fitted.first.same["cores_per_node"] and shortest < SHORT_SECONDS:
        yield (
            f"The kernel hands out a limited node's processor time every 20 ms, and a worker of a fitted run computes for only "
            f"{shortest * 1e3:.3g} ms a step: while it waits for messages it saves CPU quota for later. The fit is "
            "doubtful; larger batches help."
        )


def _remark_on_batches(fitted: Fitted, question: Question, rows: Sequence[Row]) -> Iterator[str]:
    smallest, largest = min(run.half_batch_size for run in fitted.runs), max(run.batch_size for run in fitted.runs)
    outside = [row.nodes for row in rows if row.step is not None and not smallest <= row.batch_size <= largest]
    if outside:
        measured = f"the {smallest} to {largest} examples a worker that computing was measured for"
        yield f"Batches of {_nodes_text(outside)} lie outside {measured}."
    empty = [row.nodes for row in rows if row.global_batch_size < row.workers]
    if empty:
        whole = batch_text(fitted.first.global_batch_size, fitted.first.batch_tokens)
        yield f"{_nodes_text(empty)} would leave workers without an example of the global batch of {whole}."


def _remark_on_validation(fitted: Fitted, question: Question, rows: Sequence[Row]) -> Iterator[str]:
    late = [row.nodes for row in rows if row.delayed]
    verb = "has" if set(late) == {1} else "have"
    without = f" {_nodes_text(late)} {verb} no band, since it is more than a tenth of their step." if late else ""
    yield f"Latency is unvalidated: not every kernel can delay packets, so no judged run had any but the machine's own.{without}"
    if question.topology == "ps" and question.ps > 1:
        yield "Several parameter servers are unvalidated: every judged run had one."


def _nodes_text(nodes: Sequence[int]) -> str:
    *names, last = [str(count) for count in sorted(set(nodes))]
    listed = f"{', '.join(names)} and {last}" if names else last
    return f"{listed} node{'' if set(nodes) == {1} else 's'}"


_TOPOLOGIES = {"ring": "all-reduce round a ring (sync)", "ps": "parameter servers (async)"}
_DIRECT = "all-reduce of each worker with each other one (sync, --exchange direct)"
_TITLES = {"weak": "Batch of a worker stays {batch} (weak scaling)", "strong": "Global batch stays {whole} (strong scaling)"}
_LIMITS = {
    "compute": "computing",
    "link": "the link",
    "messages": "handling messages",
    "copying": "copying bytes",
    "latency": "messages' latency",
    "server": "the parameter server",
    "other": "other",
}


def render_predictions(fitted: Fitted, question: Question, rows: Sequence[Row], validation: Validation) -> RenderableType:
    """Return the predictions with their basis and remarks."""
    lines: list[RenderableType] = [*_basis(fitted, question)]
    first = fitted.first
    for scaling in question.scalings:
        batch, whole = (batch_text(count, first.batch_tokens) for count in (first.batch_size, first.global_batch_size))
        title = _TITLES[scaling].format(batch=batch, whole=whole)
        lines += ["", title, _table([row for row in rows if row.scaling == scaling])]
    lines += ["", _band_text(validation_for(fitted, question.topology, validation), validation)]
    return Group(*lines, *(f"- {text}" for text in remarks(fitted, question, rows)))


def _basis(fitted: Fitted, question: Question) -> list[str]:
    first, same = fitted.first, fitted.first.same
    ps = f", {question.ps} of them" if question.topology == "ps" and question.ps > 1 else ""
    ring, server = fitted.ring, fitted.server
    how = _DIRECT if question.topology == "ring" and ring.exchange == "direct" else _TOPOLOGIES[question.topology]
    if question.topology == "ring":
        cost = (
            f"{seconds_text(ring.hop_seconds)} a {'hop' if ring.exchange == 'native' else 'message'}, "
            f"{ring.seconds_per_byte * 1e9:.3g} ns per byte in addition to the link, {ring.hidden_fraction:.0%} hidden behind computing"
        )
    else:
        service = server.service_seconds + server.service_seconds_per_byte * first.payload_bytes
        worker = server.worker_seconds + server.worker_seconds_per_byte * first.payload_bytes
        cost = f"{seconds_text(service)} an update on a parameter server, {seconds_text(worker)} on the worker"
    rate = question.link.bytes_per_second
    speed = "the same speed as the runs'" if rate is None else bandwidth_text(8 * rate)
    return [
        one_line(f"{same['model']} on {same['data']}, {same['backend']}, {how}{ps}"),
        f"Fitted to {' and '.join(_run_text(run) for run in fitted.runs)}",
        f"Predicted for links of {speed}, {seconds_text(question.link.latency_seconds)} of latency on top of the runs'",
        f"Computing: {seconds_text(fitted.compute.fixed_seconds)} a step and {seconds_text(fitted.compute.seconds_per_example)} an example",
        f"Exchange: {bytes_text(first.payload_bytes)} a step, {cost}",
        "Speed-up: examples/s over those predicted for one node",
    ]


def _run_text(run: Observed) -> str:
    limit = "unlimited links" if run.bytes_per_second is None else f"links of {bandwidth_text(8 * run.bytes_per_second)}"
    return f"{run.name} ({run.mode}, {run.nodes} node{'s' if run.nodes != 1 else ''}, {limit})"


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("nodes", "batch", "step", "examples/s", "band", "speed-up", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("largest part", no_wrap=True)
    for row in rows:
        table.add_row(count_text(row.nodes), count_text(row.batch_size), *_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    if row.step is None or row.examples_per_second is None or row.speedup is None or row.efficiency is None:
        return [UNKNOWN] * 6
    low, high = _band(row.examples_per_second, row.factor)
    band = UNKNOWN if low is None or high is None else f"{rate_text(low, '')} – {rate_text(high, '')}"
    component = row.step.limited_by
    share = f"{_LIMITS[component]} ({row.step.components[component] / row.step.seconds:.0%})"
    speeds = [rate_text(row.examples_per_second, ""), band, f"{number_text(row.speedup, 2)}x", f"{row.efficiency:.0%}"]
    return [seconds_text(row.step.seconds), *speeds, share]


def _band(value: float | None, factor: float | None) -> tuple[float | None, float | None]:
    return (None, None) if value is None or factor is None else (value / factor, value * factor)


def _band_text(judged: ValidationGroup | None, validation: Validation) -> str:
    if judged is None:
        return "No band: the model was not judged on anything like this."
    nodes = [point.nodes for point in judged.points]
    bandwidths = sorted(point.bandwidth_bits_per_second for point in judged.points)
    return (
        f"Band: {len(judged.points)} runs of {judged.backend} in mode {judged.mode} ({min(nodes)} to {max(nodes)} nodes, "
        f"{bandwidth_text(bandwidths[0])} to {bandwidth_text(bandwidths[-1])}; {validation.measured_on}) were predicted with a median "
        f"error of {judged.median_error:.0%}, nine in ten within a factor of {judged.factor:.2f}. docs/scaling.md has them."
    )


def document(fitted: Fitted, question: Question, rows: Sequence[Row], validation: Validation) -> dict[str, Any]:
    """Return the predictions as JSON."""
    judged = validation_for(fitted, question.topology, validation)
    rate = question.link.bytes_per_second
    return {
        "schema": SCHEMA,
        "runs": [run.name for run in fitted.runs],
        "topology": question.topology,
        "exchange": fitted.ring.exchange if question.topology == "ring" else None,
        "parameter_servers": question.ps if question.topology == "ps" else None,
        "bandwidth_bits_per_second": None if rate is None else 8 * rate,
        "latency_seconds": question.link.latency_seconds,
        "payload_bytes": fitted.first.payload_bytes,
        "fitted": {
            "compute": asdict(fitted.compute),
            question.topology: asdict(fitted.ring if question.topology == "ring" else fitted.server),
            "exchange_measured": question.topology in fitted.measured,
        },
        "validation": None if judged is None else {"measured_on": validation.measured_on, **judged.to_json()},
        "predictions": [_row(row) for row in rows],
        "notes": remarks(fitted, question, rows),
    }


def _row(row: Row) -> dict[str, Any]:
    names = ("scaling", "nodes", "workers", "batch_size", "global_batch_size", "examples_per_second", "speedup", "efficiency")
    seconds = None if row.step is None else row.step.seconds
    bands = {"step_seconds": _band(seconds, row.factor), "examples_per_second": _band(row.examples_per_second, row.factor)}
    return {
        **{name: getattr(row, name) for name in names},
        "step_seconds": seconds,
        **{f"{name}_{end}": value for name, band in bands.items() for end, value in zip(("low", "high"), band, strict=True)},
        "limited_by": None if row.step is None else row.step.limited_by,
        "parts": None if row.step is None else {f"{name}_seconds": seconds for name, seconds in row.step.components.items()},
        "band_factor": row.factor,
        "doublings_beyond_validation": row.doublings,
    }
