"""Evaluation of predictions, and the tables of the package and docs/scaling.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from crosstrain.monitor.host import describe_host
from crosstrain.report.analysis.cost_model import Link
from crosstrain.report.analysis.fit import Fitted, Observed, fit, observe
from crosstrain.report.analysis.predictions import VALIDATION_FILE, Point, Question, Validation, ValidationGroup, predict
from crosstrain.report.runs.run import Run

DOCUMENT = Path(__file__).parents[2] / "docs" / "scaling.md"
BEGIN, END = "<!-- written by benchmarks.prediction -->", "<!-- end -->"


def write_documents(
    out: Path,
    scenes: Sequence[Any],
    wanted: Callable[[Any], Iterable[Any]],
    fitted: Mapping[int, Sequence[tuple[int, str]]],
    workload: str,
) -> None:
    """Judge the runs in `out` and write both tables."""
    judged = [judge(out, list(wanted(scene)), chosen, workload) for scene in scenes for chosen in fitted.values()]
    validation = Validation(datetime.now(UTC).date().isoformat(), _machine(), tuple(judged))
    VALIDATION_FILE.write_text(toml_text(validation), encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{markdown(validation)}{END}{rest.split(END)[1]}", encoding="utf-8")


def _machine() -> str:
    """Return what the runs were measured on, in words."""
    host = describe_host({})
    versions = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "torch"))
    return f"{host['cores_available']:g} cores of {host['cpu_model']}, Linux {host['kernel']}, {versions}"


def judge(out: Path, runs: Sequence[Any], chosen: Sequence[tuple[int, str]], workload: str) -> ValidationGroup:
    """Fit the model to the chosen runs and predict all others.

    A run's speed is that of its updates while it trains.
    """
    observed = {run: observe(Run(out / run.name)) for run in runs}
    base = runs[0].batch_size
    fitted = fit([observed[run] for run in runs if (run.nodes, run.bandwidth) in chosen and run.batch_size == base])
    points = [
        Point(run.nodes, run.bits_per_second, run.batch_size, seen.examples_per_second, _predicted(fitted, run, seen, base))
        for run, seen in observed.items()
        if not ((run.nodes, run.bandwidth) in chosen and run.batch_size == base)
    ]
    scene, cores = runs[0].scene, fitted.first.same["cores_per_node"]
    described = f"{workload} --batch-size {base} --cores-per-node {cores[0]:g}"
    return ValidationGroup(
        scene.backend, scene.mode, described, tuple(f"{nodes} nodes, {bandwidth}" for nodes, bandwidth in chosen), tuple(points)
    )


def _predicted(fitted: Fitted, run: Any, seen: Observed, base: int) -> float:
    """Return the predicted examples per second of a run, as `trainer predict` does."""
    scaling = "weak" if run.batch_size == base else "strong"
    topology = "ring" if seen.mode == "sync" else "ps"
    question = Question((run.nodes,), Link(run.bits_per_second / 8), topology, 1, (scaling,))
    (row,) = predict(fitted, question, Validation("", "", ()))
    if row.examples_per_second is None or row.global_batch_size != seen.batch_size * len(seen.workers):
        raise ValueError(f"{run.name}: what was run is not what is predicted")
    return row.examples_per_second


def toml_text(validation: Validation) -> str:
    """Return the table as TOML (a JSON string or number is one of TOML too)."""
    lines = [
        "# Written by `python -m benchmarks.prediction write`, not by hand: predictions of runs that the model was not fitted to.",
        f"measured_on = {json.dumps(validation.measured_on)}",
        f"machine = {json.dumps(validation.machine)}",
    ]
    for judged in validation.judged:
        lines += ["", "[[judged]]"]
        lines += [f"{name} = {json.dumps(getattr(judged, name))}" for name in ("backend", "mode", "workload", "fitted_on")]
        lines.append("points = [")
        lines += [f"  {{ {', '.join(f'{name} = {value!r}' for name, value in asdict(point).items())} }}," for point in judged.points]
        lines.append("]")
    return "\n".join(lines) + "\n"


def markdown(validation: Validation) -> str:
    """Return the tables of the document."""
    lines = [
        f"Measured on {validation.measured_on}: {validation.machine}.",
        "",
        "| backend | mode | runs fitted | runs judged | median error | largest error | nine in ten within |",
        "|---|---|---|---|---|---|---|",
    ]
    for judged in validation.judged:
        lines.append(
            f"| {judged.backend} | {judged.mode} | {len(judged.fitted_on)} | {len(judged.points)} | {judged.median_error:.1%} | "
            f"{judged.largest_error:.1%} | ×/÷ {judged.factor:.2f} |"
        )
    lines += [
        "",
        "Every point: examples per second as measured, as predicted from one run and from two (a dash where the run was fitted).",
        "",
    ]
    lines += ["| backend | mode | nodes | link | batch | measured | from one run | from two runs |", "|---|---|---|---|---|---|---|---|"]
    for first in (judged for judged in validation.judged if len(judged.fitted_on) == 1):
        lines += _points(first, validation.find(first.backend, first.mode, 2))
    return "\n".join(lines) + "\n"


def _points(first: ValidationGroup, second: ValidationGroup | None) -> list[str]:
    tables = [{_key(point): point for point in judged.points} if judged else {} for judged in (first, second)]
    lines = []
    for key in sorted({*tables[0], *tables[1]}):
        seen = tables[0].get(key) or tables[1][key]
        cells = [_cell(table.get(key)) for table in tables]
        rate = f"{key[1] / 1e6:g} Mbit/s"
        measured = f"{seen.measured_examples_per_second:.0f}"
        lines.append(f"| {first.backend} | {first.mode} | {key[0]} | {rate} | {key[2]} | {measured} | {' | '.join(cells)} |")
    return lines


def _key(point: Point) -> tuple[int, float, int]:
    return point.nodes, point.bandwidth_bits_per_second, point.batch_size


def _cell(point: Point | None) -> str:
    if point is None:
        return "–"
    return (
        f"{point.predicted_examples_per_second:.0f} ({point.predicted_examples_per_second / point.measured_examples_per_second - 1:+.0%})"
    )
