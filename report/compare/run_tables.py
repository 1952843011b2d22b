"""Tables with a column for each run: one run, or several side by side."""

from __future__ import annotations

import io
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from ...core.console import one_line
from ...core.setting import TARGET
from ...records.summary import FINAL_LOSS_UPDATES
from ...records.text import count_text, figure_text, memory_basis, saving_text
from ..runs.columns import COLUMNS, IN_TRAINING, Column, node_columns, run_columns
from ..runs.run import Run, batch_text, diverged_text
from .caveats import changed_text
from .cells import MARK, cell, cells, named_node, node_lines, relative
from .rows import Row, make_entry

ACROSS_MODES = (
    "A step is one update of the parameters: of the global batch in sync mode, of one worker's batch in async mode.\n"
    "So do not compare sync and async runs by steps/s, but by time to target, or by examples/s if the quality is comparable."
)  # below a table with steps of runs of both modes
SYNTHETIC = "Synthetic data: images and labels are random. Speed and resources mean something, loss and metrics do not."
NODES_BASIS = "CPU cores: means over the whole run, evaluations and pauses included; sent and received: over the training time."
_PSS = "node_memory_pss_bytes_max"
REPEATED = "Sent and received are not known over the training time: restarts repeated work. explain shows them with that work."
_ROOM = "\u2800"  # rich does not strip this blank at the end of a cell


def plain_table(**options: Any) -> Table:
    """Return an empty table with a line under its header and no frame."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, **options)


def one_run(summary: Mapping[str, Any], job: Mapping[str, Any] | None = None, path: Path | None = None) -> RenderableType:
    """Return the end-of-run table: the figures, then what each node used."""
    # `job` is the run's ``job.json``, with the segments of a resumed run; `path` the run directory, for a suggested command.
    run = Run.of_documents(summary, job or {}, label=str(summary["run"]))
    entry = _as_shown(make_entry([run]))
    main = plain_table(show_header=False)
    main.add_column(no_wrap=True)
    main.add_column(no_wrap=True)
    for label, text in (*_settings(entry.figures), *_results(entry), *_outcomes(entry, path)):
        main.add_row(label, text)
    pss = any(value is not None for value in entry.figures[_PSS] or ())
    repeated = [REPEATED] if summary.get("restart_seconds_lost") else []
    notes = [SYNTHETIC if summary.get("synthetic") else None, diverged_text(summary), changed_text(run)]
    apart = [text for note in notes if note for text in ("", note)]
    return Group(main, "", _nodes(entry, pss), NODES_BASIS, memory_basis(pss), *repeated, *apart)


def _settings(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for column in _setting_lines():
        label, value = column.label, figures[column.key]
        if column.key == "global_batch_size" and figures["mode"] == "async":  # an update is of one worker's batch
            label, value = "batch of an update", figures["batch_size"]
        if value is not None and (column.key, value) != _USUAL_METHOD:
            yield label, one_line(column.show(value))


_USUAL_METHOD = "model_method", "native"  # not shown alone


def _setting_lines() -> list[Column]:
    return sorted((column for column in COLUMNS if column.setting), key=lambda column: column.setting)


def _results(entry: Row) -> Iterator[tuple[str, str]]:
    figures = entry.figures
    for column in run_columns(entry.runs):
        if figures.get(column.key) is not None and not column.derived:
            mean = f" (mean of the last {min(FINAL_LOSS_UPDATES, figures['steps'])} updates)" if column.key == "final_train_loss" else ""
            yield column.label, column.show(figures[column.key]) + mean


def _outcomes(entry: Row, path: Path | None) -> Iterator[tuple[str, str]]:
    figures, summary = entry.figures, entry.runs[0].summary
    if (missing := _not_translated(summary, entry.runs[0], path)) is not None:
        yield "test sentences", missing
    if figures["target"] is not None:
        yield "target", f"{one_line(figures['target'])} {'reached' if figures['target_reached'] else 'NOT reached within the budget'}"
    if (patience := summary.get("patience")) is not None and patience["exhausted"]:
        yield "patience", _patience(patience, entry.runs[0])
    if (saving := summary.get("checkpoints") or {}).get("failed") or saving.get("saved"):
        yield "checkpoints", saving_text(saving)
    if figures["updates_by_worker"] is not None:
        yield "updates by worker", ", ".join(map(count_text, figures["updates_by_worker"]))
    if (figures["nodes_sharing_cores"] or 1) > 1:
        yield "cores", f"shared by {figures['nodes_sharing_cores']} nodes, which compete for them (virtual nodes: --cores-per-node)"
    if (source := figures["network_source"]) is not None:
        yield "traffic counted at", one_line("+".join(source) if isinstance(source, list) else source)


def _not_translated(summary: Mapping[str, Any], run: Run, path: Path | None) -> str | None:
    if summary["state"] != "succeeded" or summary.get("translated") or not run.job.get("translation_signatures"):
        return None
    saved = (summary.get("checkpoints") or {}).get("saved")
    return f"not translated: trainer evaluate {one_line(shlex.quote(str(path)))}" if path is not None and saved else "not translated"


def _patience(patience: Mapping[str, Any], run: Run) -> str:
    since = count_text(patience["without_improvement"])
    metric = next((info.label for info in run.metrics if info.name == patience["metric"]), one_line(patience["metric"]))
    evaluations = "evaluation" if patience["without_improvement"] == 1 else "evaluations"
    ended = f"ended by {since} {evaluations} without a better {metric}"
    if patience["best"] is None:
        return ended
    return f"{ended}: best {figure_text(patience['metric'], patience['best'])} after {count_text(patience['best_step'])} updates"


def _as_shown(entry: Row) -> Row:
    figures = dict(entry.figures)
    if figures["synthetic"]:
        figures["data"] = f"{figures['data']} (synthetic)"
    for batch in ("global_batch_size", "batch_size"):
        figures[batch] = batch_text(figures[batch], entry.runs[0].job.get("batch_tokens"))
    figures["precision_used"] = figures["precision_used"] or figures["precision"]
    return replace(entry, figures=figures)


def _nodes(entry: Row, pss: bool) -> Table:
    columns = [column for column in node_columns() if not column.derived and (pss or column.key != _PSS)]
    table = plain_table()
    table.add_column("node", no_wrap=True)
    for column in columns:
        table.add_column(column.label.removesuffix(IN_TRAINING), justify="right", no_wrap=True)
    for node, label in node_lines([entry]):
        table.add_row(label, *(cell(entry, column, node=node) for column in columns))
    return table


def side_by_side_table(entries: Sequence[Row], marks: Sequence[Collection[str]]) -> Table:
    """Return a table with a column per row of a comparison; `marks` are by row."""
    shown = [_as_shown(entry) for entry in entries]
    main = _figure_lines(shown, marks)
    nodes = [
        (named_node(node, label, column.label), cells(shown, marks, column, node))
        for node, label in node_lines(shown)
        for column in node_columns()
    ]
    table = plain_table()
    table.add_column("", no_wrap=True)
    for entry in shown:
        table.add_column(entry.label, justify="right", overflow="fold")
    padded = aligned([texts for _, texts in (*main, *nodes)])
    for index, ((label, _), texts) in enumerate(zip((*main, *nodes), padded, strict=True), 1):
        table.add_row(label, *texts, end_section=index == len(main))
    return table


_SHOWN_WHERE_THEY_DIFFER = ("exchange", "model_method")


def _figure_lines(entries: Sequence[Row], marks: Sequence[Collection[str]]) -> list[tuple[str, list[str]]]:
    lines = [
        (column.label, [one_line(column.show(entry.figures[column.key])) for entry in entries])
        for column in _setting_lines()
        if column.key not in _SHOWN_WHERE_THEY_DIFFER or len({entry.figures[column.key] for entry in entries} - {None}) > 1
    ]
    for column in run_columns(run for entry in entries for run in entry.runs):
        lines.append((column.label, cells(entries, marks, column)))
        if column.better and (column.group != TARGET or any(entry.converged is not None for entry in entries)):
            lines.append((f"  relative to {entries[0].label}", relative(entries, marks, column)))
    if any((entry.figures["nodes_sharing_cores"] or 1) > 1 for entry in entries):
        lines.append(("nodes sharing cores", [count_text(entry.figures["nodes_sharing_cores"]) for entry in entries]))
    return lines


def aligned(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Pad the cells of columns with marks, so that figures are aligned."""
    marked = [any(text.endswith(MARK) for text in column) for column in zip(*lines, strict=True)]
    return [
        [f"{text}{_ROOM}" if room and not text.endswith(MARK) else text for text, room in zip(line, marked, strict=True)] for line in lines
    ]


def to_text(renderable: RenderableType, width: int = 10_000) -> str:
    """Return plain text without colours, in lines of at most `width` characters."""
    stream = io.StringIO()
    plain: dict[str, Any] = {"color_system": None, "force_terminal": False, "legacy_windows": False, "markup": False, "emoji": False}
    plain["force_jupyter"] = False  # else a notebook shows the table besides returning it
    Console(file=stream, width=width, **plain).print(renderable)
    return "\n".join(line.replace(_ROOM, " ").rstrip() for line in stream.getvalue().splitlines()) + "\n"
