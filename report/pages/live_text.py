"""A watched run as plain lines or drawn on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...core.console import one_line
from ...core.job import Job
from ...core.terminal_pictures import table_of
from ...metrics import MetricInfo
from ...records.store.schema import EvalRecord, EventRecord
from ...records.text import (
    UNKNOWN,
    TrainingState,
    bytes_text,
    duration_text,
    evaluation_text,
    node_text,
    number_text,
    rate_text,
)
from .watched_run import News, WatchedRun

SILENT_SECONDS = 10  # unit of a reported silence; whether a run on another host lives is unknown here
BAR_WIDTH = 40  # characters of the progress bar
_WITH_FIGURES = ("translated",)  # events with metrics among their details
_STYLES = {"running": "green", "succeeded": "green", "failed": "red", "died": "red", "interrupted": "yellow"}


def title(run: WatchedRun) -> str:
    """Return the run's name and what it trains."""
    if run.job is None:
        return run.reader.name
    state, names = TrainingState(), ("model", "data", "backend", "mode", "nodes", "procs_per_node")
    state.begin(Job.model_validate({name: run.job[name] for name in names if name in run.job}), None)
    return one_line(f"{run.reader.name}: {state.title}")


def state_line(run: WatchedRun) -> str:
    """Return the state, with its cause and a long silence, if any."""
    if run.state == "died":
        driver = run.reader.status()["driver"]
        return f"died: its driver process {driver['pid']} on {driver['host']} is gone and recorded no end state"
    cause = f": {one_line(run.cause)}" if run.cause else ""
    tens = int(run.silent_seconds / SILENT_SECONDS)
    silent = f", silent for {tens * SILENT_SECONDS} s" if tens and run.state == "running" else ""
    return f"{run.state}{cause}{silent}"


def figures_line(run: WatchedRun) -> str | None:
    """Return the training progress in one line; None before its first update."""
    training, speed, left = run.training, run.training.speed(), run.time_left
    if training.loss is None:
        return None
    total = f"/{run.total_steps:,} ({run.progress:.0%})" if run.total_steps and run.progress is not None else ""
    parts = [f"step {training.step:,}{total}", f"epoch {training.epoch + 1}", f"loss {number_text(training.loss)}"]
    if speed is not None:
        parts += [_per_second(speed.steps_per_second, "steps/s"), _per_second(speed.examples_per_second, "examples/s")]
    if left is not None:
        unknown = ", not counting the final translation" if left.translate_seconds is None else ""
        parts.append(f"{duration_text(left.seconds)} left{unknown}")
    return "  ".join(parts)


def _per_second(value: float, unit: str) -> str:
    return f"{rate_text(value).removesuffix('/s')} {unit}"


def node_lines(run: WatchedRun) -> list[str]:
    """Return a line for each node, or some for many nodes together."""
    return [node_text(row) for row in run.nodes.rows(run.node_count)]


def news_line(record: News, metrics: Sequence[MetricInfo]) -> str:
    """Return an evaluation or event in one line, with its time on the run clock."""
    if not isinstance(record, EventRecord):
        return f"{duration_text(record.time_seconds)}  {evaluation_text(record, metrics)}"
    labels = {info.name: info.label for info in metrics} if record.event in _WITH_FIGURES else {}
    detail = ", ".join(_detail(name, value, labels) for name, value in record.detail.items() if value not in (None, {}, []))
    words = record.event.replace("_", " ")
    when = f"{duration_text(record.time_seconds)}  " if record.time_seconds >= 0 else ""
    return one_line(f"{when}{words}: {detail}" if detail else f"{when}{words}")


def _detail(name: str, value: Any, labels: Mapping[str, str]) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name in labels:
            return f"{labels[name]} {number_text(value)}"
        if name.endswith("seconds"):
            return f"{name.removesuffix('seconds').replace('_', ' ').strip() or 'took'} {duration_text(value)}"
        if name.endswith("bytes"):
            return f"{name.removesuffix('bytes').replace('_', ' ')}{bytes_text(value)}"
    shown = " ".join(map(str, value)) if isinstance(value, list) else value
    return f"{name.replace('_', ' ')} {shown}"


def last_evaluation(record: EvalRecord, metrics: Sequence[MetricInfo]) -> str:
    """Return the last evaluation in one line."""
    return f"last {evaluation_text(record, metrics)}"


def is_in_summary(run: WatchedRun) -> bool:
    """Return whether a summary follows, whose figures are of the training alone."""
    return run.ended and run.reader.summary() is not None


def picture(run: WatchedRun) -> RenderableType:
    """Return the whole view for a terminal; of an ended run only what its summary does not show."""
    parts: list[RenderableType] = [Text(title(run), style="bold"), Text(state_line(run), style=_STYLES.get(run.state, ""))]
    if is_in_summary(run):
        return Group(*parts)
    if run.progress is not None:
        line = Table.grid()  # a bar alone does not end its line
        line.add_row(ProgressBar(total=1.0, completed=run.progress, width=BAR_WIDTH))
        parts.append(line)
    figures = figures_line(run)
    if figures is not None:
        parts.append(Text(figures))
    if run.evaluation is not None:
        parts.append(Text(last_evaluation(run.evaluation, run.metrics), style="cyan"))
    rows = run.nodes.rows(run.node_count)
    if rows:
        parts.append(table_of([{name: value or UNKNOWN for name, value in row.items()} for row in rows]))
    return Group(*parts)
