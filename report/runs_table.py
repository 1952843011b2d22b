"""Many runs as a table for people, a line a run. Plain text: a table of rich takes over a second for 2,000 of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from ..metrics.display import UNKNOWN, count_text, duration_text, number_text, rate_text
from .tables import SYNTHETIC

__all__ = ["runs_table"]

Row = Mapping[str, Any]

_GAP = "  "


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: UNKNOWN if row[key] is None else str(row[key])


def _data(row: Row) -> str:
    return f"{_text('data')(row)}{' (synthetic)' if row['synthetic'] else ''}"


def _to_target(row: Row) -> str:
    return "not reached" if row["target_reached"] is False else duration_text(row["time_to_target_seconds"])


def _when(row: Row) -> str:
    """Return the local time at which the run was made; a damaged run may not tell."""
    try:
        return f"{datetime.fromisoformat(row['created_at'] or '').astimezone():%Y-%m-%d %H:%M}"
    except ValueError:
        return UNKNOWN


_COLUMNS: Mapping[str, tuple[bool, Callable[[Row], str]]] = {
    "name": (False, _text("run")),
    "state": (False, _text("state")),
    "backend": (False, _text("backend")),
    "mode": (False, _text("mode")),
    "model": (False, _text("model")),
    "data": (False, _data),
    "nodes": (True, lambda row: count_text(row["nodes"])),
    "batch": (True, lambda row: count_text(row["global_batch_size"])),
    "examples/s": (True, lambda row: rate_text(row["examples_per_second"]).removesuffix("/s")),
    "loss": (True, lambda row: number_text(row["eval_loss"])),
    "accuracy": (True, lambda row: number_text(row["eval_accuracy"])),
    "time to target": (True, _to_target),
    "when": (False, _when),
}
"""Title: whether it stands at the right, and a row's text."""

_DISPENSABLE = ("data", "model", "when", "nodes", "mode", "backend", "loss", "batch", "time to target", "accuracy", "examples/s")
"""What is left out first where a terminal is narrow; `show` and --json have all of it."""


def runs_table(rows: Sequence[Row], width: int | None = None) -> tuple[str, list[str]]:
    """Return the lines of a table of `rows`, and the titles that were left out to fit `width` characters (None: as wide as need be).

    Names are never shortened: they are what other commands take.
    """
    titles = list(_COLUMNS)
    cells = {title: [title, *(_printable(show(row)) for row in rows)] for title, (_, show) in _COLUMNS.items()}
    widths = {title: max(map(len, column)) for title, column in cells.items()}
    left_out: list[str] = []
    for title in _DISPENSABLE:
        if width is None or sum(widths[kept] for kept in titles) + len(_GAP) * (len(titles) - 1) <= width:
            break
        titles.remove(title)
        left_out.append(title)
    aligned = [
        [cell.rjust(widths[title]) if _COLUMNS[title][0] else cell.ljust(widths[title]) for cell in cells[title]] for title in titles
    ]
    lines = [_GAP.join(line).rstrip() for line in zip(*aligned, strict=True)]
    notes = ["", SYNTHETIC] if any(row["synthetic"] for row in rows) else []
    return "\n".join([*lines, *notes]) + "\n", left_out


def _printable(text: str) -> str:
    """Return text without what a terminal would take for a command: names of folders may hold anything."""
    return "".join(character if character.isprintable() else "?" for character in text)
