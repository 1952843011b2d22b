"""Predictions as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from ...core.console import one_line
from ...core.units import bandwidth_text
from ...records.store.schema import SCHEMA
from ...records.text import UNKNOWN, bytes_text, count_text, number_text, seconds_text
from ..runs.run import batch_text
from .extrapolation import Question, Row, Validation, ValidationGroup, remarks, validation_for
from .fit import Fitted, describe
from .observations import Observed

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


def prediction_table(fitted: Fitted, question: Question, rows: Sequence[Row], validation: Validation) -> RenderableType:
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
    low, high = _between(row.examples_per_second, row.factor)
    band = UNKNOWN if low is None or high is None else f"{_rate(low)} – {_rate(high)}"
    component = row.step.limited_by
    share = f"{_LIMITS[component]} ({row.step.components[component] / row.step.seconds:.0%})"
    speeds = [_rate(row.examples_per_second), band, f"{number_text(row.speedup, 2)}x", f"{row.efficiency:.0%}"]
    return [seconds_text(row.step.seconds), *speeds, share]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _between(value: float, factor: float | None) -> tuple[float | None, float | None]:
    return (None, None) if factor is None else (value / factor, value * factor)


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
        "fitted": {**describe(fitted, question.topology), "exchange_measured": question.topology in fitted.measured},
        "validation": None if judged is None else _judged(judged, validation),
        "predictions": [_row(row) for row in rows],
        "notes": remarks(fitted, question, rows),
    }


def _judged(judged: ValidationGroup, validation: Validation) -> dict[str, Any]:
    return {
        "measured_on": validation.measured_on,
        "backend": judged.backend,
        "mode": judged.mode,
        "workload": judged.workload,
        "fitted_on": list(judged.fitted_on),
        "points": [asdict(point) for point in judged.points],
        "median_error_fraction": judged.median_error,
        "largest_error_fraction": judged.largest_error,
        "band_factor": judged.factor,
    }


def _row(row: Row) -> dict[str, Any]:
    seconds = None if row.step is None else row.step.seconds
    times = (None, None) if seconds is None else _between(seconds, row.factor)
    rates = (None, None) if row.examples_per_second is None else _between(row.examples_per_second, row.factor)
    return {
        "scaling": row.scaling,
        "nodes": row.nodes,
        "workers": row.workers,
        "batch_size": row.batch_size,
        "global_batch_size": row.global_batch_size,
        "step_seconds": seconds,
        "step_seconds_low": times[0],
        "step_seconds_high": times[1],
        "examples_per_second": row.examples_per_second,
        "examples_per_second_low": rates[0],
        "examples_per_second_high": rates[1],
        "speedup": row.speedup,
        "efficiency": row.efficiency,
        "limited_by": None if row.step is None else row.step.limited_by,
        "parts": None if row.step is None else {f"{name}_seconds": seconds for name, seconds in row.step.components.items()},
        "band_factor": row.factor,
        "doublings_beyond_validation": row.doublings,
    }
