"""The list of runs as plain text: a table of rich takes over a second for 2,000 runs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import PurePath
from typing import Any

from rich.cells import cell_len as text_width

from ...core.console import shown
from ...records.text import UNKNOWN, duration_text, figure_text
from ..runs.columns import COLUMNS, Column, metric_figures, plain
from ..runs.run import batch_text
from .cells import GAP, holds_figures, plain_lines
from .run_tables import SYNTHETIC

Row = Mapping[str, Any]


def _name(row: Row) -> str:
    name = PurePath(row["path"]).name
    return f"{row['folder']}/{name}" if row["folder"] else name


def _created(row: Row) -> str:
    try:
        return f"{datetime.fromisoformat(row['created_at'] or '').astimezone():%Y-%m-%d %H:%M}"
    except ValueError:
        return UNKNOWN


def _to_target(row: Row) -> str:
    return "not reached" if row["target_reached"] is False else duration_text(row["time_to_target_seconds"])


_TEXTS: Mapping[str, Callable[[Row], str]] = {
    "run": _name,
    "data": lambda row: f"{plain(row['data'])}{' (synthetic)' if row['synthetic'] else ''}",
    "global_batch_size": lambda row: batch_text(row["global_batch_size"], row.get("batch_tokens")),
    "time_to_target_seconds": _to_target,
    "created_at": _created,
}  # of columns whose text depends on other figures
_CREATED = Column("created_at", "when", listed=(40, 3))
_METRICS = (20, 10)  # places of metrics in the list, as of `Column.listed`


def runs_table(rows: Sequence[Row], width: int | None = None, requested: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return a table of `rows`, and the titles dropped to fit `width` characters (None: any)."""
    # Names are never shortened, as other commands take them. The `requested` figures (keys of a row) always have a column.
    metrics = [Column(figure, show=partial(_any, figure), listed=_METRICS) for figure in _evaluated(rows, requested)]
    usual = sorted((column for column in (*COLUMNS, _CREATED, *metrics) if any(column.listed)), key=lambda column: column.listed[0])
    further = [
        Column(figure, show=partial(_any, figure)) for figure in dict.fromkeys(requested) if figure not in {column.key for column in usual}
    ]
    columns = [*usual, *further]
    cells = {column.key: [_title(column), *(_printable(_text(column, row)) for row in rows)] for column in columns}
    widths = {key: max(map(text_width, texts)) for key, texts in cells.items()}
    dropped: list[str] = []
    for column in sorted(
        (column for column in reversed(columns) if column.listed[1] and column.key not in requested), key=lambda column: column.listed[1]
    ):
        if width is None or sum(widths[column.key] for column in columns) + len(GAP) * (len(columns) - 1) <= width:
            break
        columns.remove(column)
        dropped.append(_title(column))
    right = [column.show is not plain and holds_figures(cells[column.key][1:]) for column in columns]
    lines = plain_lines([cells[column.key] for column in columns], right)
    notes = ["", *textwrap.wrap(SYNTHETIC, width or len(SYNTHETIC))] if any(row["synthetic"] for row in rows) else []
    return "\n".join([*lines, *notes]) + "\n", dropped


def _text(column: Column, row: Row) -> str:
    return _TEXTS[column.key](row) if column.key in _TEXTS else column.show(row.get(column.key))


def _any(figure: str, value: Any) -> str:
    entries = value if isinstance(value, list) else [value]
    return ", ".join(
        figure_text(figure, entry) if isinstance(entry, float) else UNKNOWN if entry is None else str(entry) for entry in entries
    )


def _title(column: Column) -> str:
    if column.listed not in (_METRICS, (0, 0)):
        return column.names[0].replace("_", " ") if column.names else column.header
    if column.key.startswith("end_"):
        return f"{column.key.removeprefix('end_').replace('_', ' ')} at the end"
    return column.key.replace("eval_", "").replace("_", " ") if column.key.startswith(("eval_", "best_eval_")) else column.key


def _evaluated(rows: Sequence[Row], requested: Sequence[str]) -> list[str]:
    """Return the keys of the metrics to show: the accuracy if known or requested, then others."""
    # Final metrics come first, as they are of more sentences. The error is shown if a run has it without an accuracy.
    own_error = any(row.get("eval_error") is not None and row.get("eval_accuracy") is None for row in rows)
    further_metrics = [figure for figure in metric_figures(rows) if figure.startswith(("eval_", "end_"))]
    further = [*(["eval_error"] if own_error else []), *sorted(further_metrics, key=lambda figure: not figure.startswith("end_"))]
    has_accuracy = not further or "eval_accuracy" in requested or any(row["eval_accuracy"] is not None for row in rows)
    return [*(["eval_accuracy"] if has_accuracy else []), *further]


def _printable(text: str) -> str:
    """Return text in one line without control characters: names of folders may contain them."""
    return shown(text).replace("\n", r"\x0a").replace("\t", r"\x09")
