"""The list of runs as plain text: a table of rich takes over a second for 2,000 runs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import PurePath
from typing import Any, NamedTuple

from ...core.console import shown
from ...records.text import UNKNOWN, count_text, duration_text, figure_text, number_text, rate_text
from ..runs.run import batch_text
from ..runs.summary_rows import metric_figures
from .columns import GAP, holds_figures, plain_lines
from .formats import text_width
from .run_tables import SYNTHETIC

Row = Mapping[str, Any]


class _Column(NamedTuple):
    title: str
    figure: str  # key of a row
    right: bool  # right-aligned, if it may hold figures
    text: Callable[[Row], str]


def _name(row: Row) -> str:
    name = PurePath(row["path"]).name
    return f"{row['folder']}/{name}" if row["folder"] else name


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: UNKNOWN if row[key] is None else str(row[key])


def _any(key: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value = row.get(key)
        entries = value if isinstance(value, list) else [value]
        return ", ".join(
            figure_text(key, entry) if isinstance(entry, float) else UNKNOWN if entry is None else str(entry) for entry in entries
        )

    return text


def _data(row: Row) -> str:
    return f"{_text('data')(row)}{' (synthetic)' if row['synthetic'] else ''}"


def _to_target(row: Row) -> str:
    return "not reached" if row["target_reached"] is False else duration_text(row["time_to_target_seconds"])


def _created(row: Row) -> str:
    try:
        return f"{datetime.fromisoformat(row['created_at'] or '').astimezone():%Y-%m-%d %H:%M}"
    except ValueError:
        return UNKNOWN


_COLUMNS = (
    _Column("name", "run", False, _name),
    _Column("state", "state", False, _text("state")),
    _Column("backend", "backend", False, _text("backend")),
    _Column("mode", "mode", False, _text("mode")),
    _Column("model", "model", False, _text("model")),
    _Column("data", "data", False, _data),
    _Column("nodes", "nodes", True, lambda row: count_text(row["nodes"])),
    _Column("batch", "global_batch_size", True, lambda row: batch_text(row["global_batch_size"], row.get("batch_tokens"))),
    _Column("examples/s", "examples_per_second", True, lambda row: rate_text(row["examples_per_second"]).removesuffix("/s")),
    _Column("loss", "eval_loss", True, lambda row: number_text(row["eval_loss"])),
    _Column("time to target", "time_to_target_seconds", True, _to_target),
    _Column("when", "created_at", False, _created),
)
_METRICS_BEFORE = "time to target"  # the metrics come after this column
# Dropped in this order on a narrow terminal; then the metrics, the headline last, then examples/s.
_DISPENSABLE = ("data", "model", "when", "nodes", "mode", "backend", "loss", "batch", "time to target")


def runs_table(rows: Sequence[Row], width: int | None = None, asked: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return a table of `rows`, and the titles dropped to fit `width` characters (None: any)."""
    # Names are never shortened, as other commands take them. Figures `asked` for (keys of a row) always have a column.
    place = next(index for index, column in enumerate(_COLUMNS) if column.title == _METRICS_BEFORE)
    metrics = [_Column(_title(figure), figure, True, _any(figure)) for figure in _evaluated(rows, asked)]
    usual = {column.figure for column in (*_COLUMNS, *metrics)}
    others = [_Column(_title(figure), figure, True, _any(figure)) for figure in dict.fromkeys(asked) if figure not in usual]
    columns = [*_COLUMNS[:place], *metrics, *_COLUMNS[place:], *others]
    cells = {column: [column.title, *(_printable(column.text(row)) for row in rows)] for column in columns}
    widths = {column: max(map(text_width, cells[column])) for column in columns}
    left_out: list[str] = []
    by_title = {column.title: column for column in columns if column.figure not in asked}
    dispensable = (*_DISPENSABLE, *(column.title for column in reversed(metrics)), "examples/s")
    for column in (by_title[title] for title in dispensable if title in by_title):
        if width is None or sum(widths[kept] for kept in columns) + len(GAP) * (len(columns) - 1) <= width:
            break
        columns.remove(column)
        left_out.append(column.title)
    right = [column.right and holds_figures(cells[column][1:]) for column in columns]
    lines = plain_lines([cells[column] for column in columns], right)
    notes = ["", *textwrap.wrap(SYNTHETIC, width or len(SYNTHETIC))] if any(row["synthetic"] for row in rows) else []
    return "\n".join([*lines, *notes]) + "\n", left_out


def _title(figure: str) -> str:
    if figure.startswith("end_"):
        return f"{figure.removeprefix('end_').replace('_', ' ')} at the end"
    return figure.replace("eval_", "").replace("_", " ") if figure.startswith(("eval_", "best_eval_")) else figure


def _evaluated(rows: Sequence[Row], asked: Sequence[str]) -> list[str]:
    """Return the keys of the metrics to show: the accuracy if known or requested, then others."""
    # Final metrics come first, as they are of more sentences. The error is shown if a run has it without an accuracy.
    own_error = any(row.get("eval_error") is not None and row.get("eval_accuracy") is None for row in rows)
    others = [figure for figure in metric_figures(rows) if figure.startswith(("eval_", "end_"))]
    further = [*(["eval_error"] if own_error else []), *sorted(others, key=lambda figure: not figure.startswith("end_"))]
    has_accuracy = not further or "eval_accuracy" in asked or any(row["eval_accuracy"] is not None for row in rows)
    return [*(["eval_accuracy"] if has_accuracy else []), *further]


def _printable(text: str) -> str:
    """Return text in one line without control characters: names of folders may contain them."""
    return shown(text).replace("\n", r"\x0a").replace("\t", r"\x09")
