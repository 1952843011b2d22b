"""Tables with a column for each run: one run, or several side by side."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from ...core.untrusted.console import one_line
from ...records.summary.summary import FINAL_LOSS_UPDATES
from ...records.text.numbers import UNKNOWN, count_text, figure_text, memory_basis, saving_text
from ..catalog.batches import batch_text
from ..catalog.divergence import diverged_text
from ..catalog.run import Run
from ..comparison.caveats import changed_text
from ..comparison.factors import SPEED, TARGET
from ..comparison.rows import Row, entry_of
from ..comparison.scaling import relative_speed, relative_target
from .columns import IN_TRAINING, MARK, NODE, cell, named_node, node_cell, node_lines, relative, run_columns

__all__ = ["ACROSS_MODES", "SYNTHETIC", "aligned", "columns_of", "one_run", "plain_table", "side_by_side", "to_text"]

ACROSS_MODES = (
    "A step is one update of the parameters: of the global batch in sync mode, of one worker's batch in async mode.\n"
    "So do not compare sync and async runs by steps/s, but by time to target, or by examples/s if the quality is comparable."
)
"""Stands under every table that has steps of runs of both modes."""

SYNTHETIC = "Synthetic data: images and labels are random. Speed and resources mean something, loss and metrics do not."
"""Stands under every table that has a run on synthetic data."""

NODES_BASIS = "CPU cores: means over the whole run, evaluations and pauses included; sent and received: over the training time."
"""Stands under the nodes of one run."""

_PSS = "node_memory_pss_bytes_max"

REPEATED = "Sent and received are not known over the training time: restarts repeated work. explain shows them with that work."
"""Stands under the nodes of a run that has them not for this reason."""

Show = Callable[[Any], str]

_ROOM = "\u2800"  # a blank that is no white space, which would be cut off at the end of a cell


def _text(value: Any) -> str:
    return UNKNOWN if value is None else one_line(str(value))


def _source(value: Any) -> str:
    return _text("+".join(value) if isinstance(value, list) else value)


_ASKED: tuple[tuple[str, str, Show], ...] = (
    ("state", "state", _text),
    ("backend", "backend", _text),
    ("mode", "mode", _text),
    ("model", "model", _text),
    ("data", "data", _text),
    ("precision", "precision_used", _text),
    ("nodes", "nodes", count_text),
    ("workers", "workers", count_text),
    ("parameter servers", "parameter_servers", count_text),
    ("exchange", "exchange", _text),
    ("global batch", "global_batch_size", _text),
)

_WHERE_THEY_DIFFER = frozenset({"exchange"})
"""Left out side by side where all runs that have it have the same."""

_ONLY_SIDE_BY_SIDE = frozenset({"eval_error", "node_cpu_fraction_mean"})
"""They follow from figures that the table of one run has."""


def plain_table(**options: Any) -> Table:
    """Return an empty table with a line under its header and no frame."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, **options)


def one_run(summary: Mapping[str, Any], job: Mapping[str, Any] | None = None, path: Path | None = None) -> RenderableType:
    """Return the end-of-run table: the figures, then what each node used.

    `job` is the run's ``job.json``, which knows of the segments of a run that was resumed; `path` the run directory, for a command that
    makes up for what is missing.
    """
    entry = _as_shown(_entry(summary, job))
    figures = entry.figures
    main = plain_table(show_header=False)
    main.add_column(no_wrap=True)
    main.add_column(no_wrap=True)
    for label, key, show in _ASKED:
        if key == "global_batch_size" and figures["mode"] == "async":  # an update is of one worker's batch
            label, key = "batch of an update", "batch_size"
        if figures[key] is not None:
            main.add_row(label, show(figures[key]))
    for one in run_columns(entry.runs):
        if figures.get(one.key) is not None and one.key not in _ONLY_SIDE_BY_SIDE:
            mean = f" (mean of the last {min(FINAL_LOSS_UPDATES, figures['steps'])} updates)" if one.key == "final_train_loss" else ""
            main.add_row(one.label, one.show(figures[one.key]) + mean)
    if (missing := _not_translated(summary, entry.runs[0], path)) is not None:
        main.add_row("test sentences", missing)
    if figures["target"] is not None:
        main.add_row(
            "target", f"{one_line(figures['target'])} {'reached' if figures['target_reached'] else 'NOT reached within the budget'}"
        )
    if (patience := summary.get("patience")) is not None and patience["exhausted"]:
        main.add_row("patience", _patience(patience, entry.runs[0]))
    if (saving := summary.get("checkpoints") or {}).get("failed") or saving.get("saved"):
        main.add_row("checkpoints", saving_text(saving))
    if figures["updates_by_worker"] is not None:
        main.add_row("updates by worker", ", ".join(count_text(count) for count in figures["updates_by_worker"]))
    if (figures["nodes_sharing_cores"] or 1) > 1:
        main.add_row("cores", f"shared by {figures['nodes_sharing_cores']} nodes, which compete for them (virtual nodes: --cores-per-node)")
    if figures["network_source"] is not None:
        main.add_row("traffic counted at", _source(figures["network_source"]))
    changed = changed_text(_run(summary, job))
    mixed = ["", changed] if changed else []
    pss = any(value is not None for value in figures[_PSS] or ())
    return Group(main, "", _nodes(entry, pss), NODES_BASIS, memory_basis(pss), *_unknown_rates(summary), *_notes([summary]), *mixed)


def _unknown_rates(summary: Mapping[str, Any]) -> list[str]:
    return [REPEATED] if summary.get("restart_seconds_lost") else []


def _not_translated(summary: Mapping[str, Any], run: Run, path: Path | None) -> str | None:
    """Return what there is to say of a run that did all but the translation at its end; None of any other."""
    if summary["state"] != "succeeded" or summary.get("translated") or not run.job.get("translation_signatures"):
        return None
    saved = (summary.get("checkpoints") or {}).get("saved")
    return f"not translated: trainer evaluate {one_line(shlex.quote(str(path)))}" if path is not None and saved else "not translated"


def _patience(found: Mapping[str, Any], run: Run) -> str:
    since = count_text(found["without_improvement"])
    metric = next((info.label for info in run.metrics if info.name == found["metric"]), one_line(found["metric"]))
    best = (
        ""
        if found["best"] is None
        else f": best {figure_text(found['metric'], found['best'])} after {count_text(found['best_step'])} updates"
    )
    evaluations = "evaluation" if found["without_improvement"] == 1 else "evaluations"
    return f"ended by {since} {evaluations} without a better {metric}{best}"


def _entry(summary: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> Row:
    return entry_of([_run(summary, job)])


def _run(summary: Mapping[str, Any], job: Mapping[str, Any] | None) -> Run:
    return Run.of_documents(summary, job or {}, label=str(summary["run"]))


def _as_shown(entry: Row) -> Row:
    """Return a row as tables show it: its batch in words, what the run computed in where it is known, and synthetic data named so."""
    figures = dict(entry.figures)
    if figures["synthetic"]:
        figures["data"] = f"{figures['data']} (synthetic)"
    for batch in ("global_batch_size", "batch_size"):
        figures[batch] = batch_text(figures[batch], entry.runs[0].job.get("batch_tokens"))
    figures["precision_used"] = figures["precision_used"] or figures["precision"]
    return replace(entry, figures=figures)


def _notes(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what has to be said under a table of these runs, an empty line before each."""
    notes = []
    if len({summary["mode"] for summary in summaries}) > 1:
        notes += ["", ACROSS_MODES]
    if any(summary.get("synthetic") for summary in summaries):
        notes += ["", SYNTHETIC]
    if len(summaries) == 1 and (diverged := diverged_text(summaries[0])) is not None:
        notes += ["", diverged]
    return notes


def _nodes(entry: Row, pss: bool) -> Table:
    columns = [one for one in NODE if one.key not in _ONLY_SIDE_BY_SIDE and (pss or one.key != _PSS)]
    table = plain_table()
    table.add_column("node", no_wrap=True)
    for one in columns:
        table.add_column(one.label.removesuffix(IN_TRAINING), justify="right", no_wrap=True)
    for node, label in node_lines([entry]):
        table.add_row(label, *(node_cell(entry, one, node) for one in columns))
    return table


def side_by_side(summaries: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with a line a figure and a column a run, and what has to be said under it."""
    entries = [_entry(summary) for summary in summaries]
    return Group(columns_of(entries, [frozenset()] * len(entries)), *_notes(summaries))


def columns_of(entries: Sequence[Row], marks: Sequence[Collection[str]]) -> Table:
    """Return a table with a line a figure and a column a row of the comparison; a dash stands for what was not observed or does not apply.

    `marks` are the kinds of figures of each that cannot be compared. Relative are examples/s over those of the first, and how many times
    as fast it reached the target.
    """
    shown = [_as_shown(entry) for entry in entries]
    main = _figure_lines(shown, marks)
    nodes = [
        (named_node(node, label, one.label), [node_cell(entry, one, node, own) for entry, own in zip(shown, marks, strict=True)])
        for node, label in node_lines(shown)
        for one in NODE
    ]
    table = plain_table()
    table.add_column("", no_wrap=True)
    for entry in shown:
        table.add_column(entry.label, justify="right", overflow="fold")
    cells = aligned([texts for _, texts in (*main, *nodes)])
    for index, ((label, _), texts) in enumerate(zip((*main, *nodes), cells, strict=True), 1):
        table.add_row(label, *texts, end_section=index == len(main))
    return table


Line = tuple[str, list[str]]


def _figure_lines(entries: Sequence[Row], marks: Sequence[Collection[str]]) -> list[Line]:
    lines: list[Line] = [
        (label, [show(entry.figures[key]) for entry in entries])
        for label, key, show in _ASKED
        if key not in _WHERE_THEY_DIFFER or len({entry.figures[key] for entry in entries} - {None}) > 1
    ]
    relative_to = f"  relative to {entries[0].label}"
    for one in run_columns(run for entry in entries for run in entry.runs):
        lines.append((one.label, [cell(entry, one, own) for entry, own in zip(entries, marks, strict=True)]))
        if one.key == "examples_per_second":
            lines.append((relative_to, _relative(relative_speed(entries), SPEED, marks)))
        if one.key == "time_to_target_seconds" and any(entry.converged is not None for entry in entries):
            lines.append((relative_to, _relative(relative_target(entries), TARGET, marks)))
    if any((entry.figures["nodes_sharing_cores"] or 1) > 1 for entry in entries):
        lines.append(("nodes sharing cores", [count_text(entry.figures["nodes_sharing_cores"]) for entry in entries]))
    return lines


def _relative(values: Sequence[float | None], group: str, marks: Sequence[Collection[str]]) -> list[str]:
    return [relative(value, marked=group in own) for value, own in zip(values, marks, strict=True)]


def aligned(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the lines of a table with room for a mark in every cell of a column that has one, so that figures stand below each other."""
    marked = [any(text.endswith(MARK) for text in column) for column in zip(*lines, strict=True)]
    return [
        [f"{text}{_ROOM}" if room and not text.endswith(MARK) else text for text, room in zip(line, marked, strict=True)] for line in lines
    ]


def to_text(renderable: RenderableType, width: int = 10_000) -> str:
    """Return plain text without colours; lines are as long as they need to be unless `width` (in characters) is given."""
    stream = io.StringIO()
    plain: dict[str, Any] = {"color_system": None, "force_terminal": False, "legacy_windows": False, "markup": False, "emoji": False}
    Console(file=stream, width=width, **plain).print(renderable)
    return "\n".join(line.replace(_ROOM, " ").rstrip() for line in stream.getvalue().splitlines()) + "\n"
