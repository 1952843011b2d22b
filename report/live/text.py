"""A watched run as text: the same figures as plain lines, and drawn on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...core.job import Job
from ...core.untrusted.console import one_line
from ...metrics import MetricInfo
from ...records.schema import EvalRecord, EventRecord
from ...records.text.numbers import UNKNOWN, bytes_text, duration_text, number_text, rate_text
from ...records.text.progress import TrainingState, evaluation_text, node_text
from .watched_run import News, WatchedRun

__all__ = ["figures_line", "is_in_summary", "last_evaluation", "news_line", "node_lines", "picture", "state_line", "title"]

SILENT_SECONDS = 10
"""A silence of a run at work is shown in multiples of this: of a run on another host nobody here can tell whether it lives."""

BAR_WIDTH = 40
"""Characters of the progress bar."""

_WITH_FIGURES = ("translated",)
"""Events that have metrics among their details."""

_STYLES = {"running": "green", "succeeded": "green", "failed": "red", "died": "red", "interrupted": "yellow"}


def title(run: WatchedRun) -> str:
    """Return the run's name and what it trains."""
    if run.job is None:
        return run.reader.name
    state = TrainingState()
    state.begin(_job(run.job), None)
    return one_line(f"{run.reader.name}: {state.title}")


def _job(values: Mapping[str, Any]) -> Job:
    """Read the fields that a title needs; a job of another release may have others, which do not matter here."""
    names = ("model", "data", "backend", "mode", "nodes", "procs_per_node")
    return Job.model_validate({name: values[name] for name in names if name in values})


def state_line(run: WatchedRun) -> str:
    """Return the state, why where that is known, and how long the run has been silent where that is long."""
    if run.state == "died":
        driver = run.reader.status()["driver"]
        return f"died: its driver process {driver['pid']} on {driver['host']} is gone and recorded no end state"
    cause = f": {one_line(run.cause)}" if run.cause else ""
    tens = int(run.silent_seconds / SILENT_SECONDS)
    silent = f", silent for {tens * SILENT_SECONDS} s" if tens and run.state == "running" else ""
    return f"{run.state}{cause}{silent}"


def figures_line(run: WatchedRun) -> str | None:
    """Return where the training stands, in one line; None before its first update."""
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


def node_rows(run: WatchedRun) -> list[Mapping[str, str]]:
    """Return what to show of each node that the run has now, or of many of them together."""
    return run.nodes.rows(run.node_count)


def node_lines(run: WatchedRun) -> list[str]:
    """Return a line for each node, or some for many nodes together."""
    return [node_text(row) for row in node_rows(run)]


def news_line(record: News, metrics: Sequence[MetricInfo]) -> str:
    """Return an evaluation or an event of a run with these metrics in one line, with its time on the run clock."""
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
    """Return the last evaluation of a run with these metrics in one line."""
    return f"last {evaluation_text(record, metrics)}"


def is_in_summary(run: WatchedRun) -> bool:
    """Return whether a summary follows: its figures are of the training alone, while the last samples are of what came after it."""
    return run.ended and run.reader.summary() is not None


def picture(run: WatchedRun) -> RenderableType:
    """Return the whole of it for a terminal; of a run that has ended only what its summary does not say, or better."""
    parts: list[RenderableType] = [Text(title(run), style="bold"), Text(state_line(run), style=_STYLES.get(run.state, ""))]
    if is_in_summary(run):
        return Group(*parts)
    if run.progress is not None:
        line = Table.grid()  # a bar by itself does not end its line
        line.add_row(ProgressBar(total=1.0, completed=run.progress, width=BAR_WIDTH))
        parts.append(line)
    figures = figures_line(run)
    if figures is not None:
        parts.append(Text(figures))
    if run.evaluation is not None:
        parts.append(Text(last_evaluation(run.evaluation, run.metrics), style="cyan"))
    rows = node_rows(run)
    if rows:
        parts.append(_node_table(rows))
    return Group(*parts)


def _node_table(rows: list[Mapping[str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "node" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(value or UNKNOWN for value in row.values()))
    return table
