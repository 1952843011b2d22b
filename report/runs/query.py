"""The runs of a folder as flat rows of figures, with filters and sort orders.

A filter is such as ``accuracy>=0.9``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from ...core.console import note
from ...core.errors import TrainerError, UsageError
from ...records.store.jsonl import NON_FINITE
from ...records.summary import job_fields, read_job
from .columns import COLUMNS, figure_key, figure_type
from .columns import row as flat_row
from .locate import is_run, run_names
from .run import Run

Row = Mapping[str, Any]
DAMAGED = "damaged"  # the state of a run with unreadable files; `problem` says why
STATES = ("starting", "running", "succeeded", "failed", "interrupted", "died", DAMAGED)
# Keys of a row: those of `columns.row`, and path, start (ISO 8601), problem and folder (such as a sweep's).
FIGURES = ("path", "folder", "created_at", "problem", *flat_row({"per_node": []}))
_TYPES: Mapping[str, Any] = {"created_at": str | None, "problem": str | None}


def row_type(name: str) -> Any:
    """Return the pydantic type of one of `FIGURES`; each may be None."""
    return str if name == "path" else _TYPES.get(name) or figure_type(name)


def list_runs(out: Path) -> list[dict[str, Any]]:
    """Return a row for each run below `out`, by name. Raises UnreadableFolderError for `out`."""
    # Keys are `FIGURES`, None if unknown. Runs without summary have their job's figures, unreadable ones the state `DAMAGED`.
    rows = []
    skipped: list[Path] = []
    for name in sorted(run_names(out, skipped)):
        try:
            figures = run_row(Run(out / name))
        except UsageError:
            continue  # removed by another process
        if figures["state"] != DAMAGED or is_run(out / name):
            rows.append({"path": figures["path"], "folder": name.rpartition("/")[0] or None, **figures})
    if skipped:
        note(f"passed over, as they cannot be read: {', '.join(sorted(map(str, skipped)))}")
    return rows


def run_row(run: Run) -> dict[str, Any]:
    """Return the row of one run from its files, without `folder`."""
    created, problem = None, None
    try:
        created = str(run.status["created_at"])
        summary = run.known_figures
        figures = _without_summary(run) if summary is None else flat_row(summary)
        state = run.state
    except (TrainerError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        problem = str(error) if isinstance(error, TrainerError) else f"{run.path}: {type(error).__name__}: {error}"
        figures, state = {**flat_row({"per_node": []}), "run": run.path.name}, DAMAGED
    return {"path": str(run.path), "created_at": created, "problem": problem, **figures, "state": state}


def _without_summary(run: Run) -> dict[str, Any]:
    job = read_job(run.job)
    return flat_row({**job_fields(job, run.own_name), "target": job.until, "per_node": []})


_TITLES = {column.names[0]: column.key for column in COLUMNS if column.names and column.listed[0]}
ALIASES: Mapping[str, str] = {"name": "run", "when": "created_at", "accuracy": "eval_accuracy", **_TITLES, "cause": "problem"}
"""Short names, with the titles of the list of runs."""

_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": lambda value, wanted: bool(value >= wanted),
    "<=": lambda value, wanted: bool(value <= wanted),
    "!=": lambda value, wanted: bool(value != wanted),
    "=": lambda value, wanted: bool(value == wanted),
    ">": lambda value, wanted: bool(value > wanted),
    "<": lambda value, wanted: bool(value < wanted),
}
_UNITS = {"min": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


def figure_name(key: str, name: str, further: Sequence[str] = ()) -> str:
    """Return the row key that `name` gives. Raises UsageError, with the option `key`."""
    return figure_key(key, name, [*FIGURES, *further], ALIASES)


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of a figure with a typed value; null matches unobserved figures."""

    text: str
    figure: str
    operator: str
    value: str

    @classmethod
    def parse(cls, text: str, further: Sequence[str] = ()) -> Condition:
        """Parse a condition such as ``accuracy>=0.9``; see `figure_name`. Raises UsageError."""
        match = re.fullmatch(r"\s*([\w-]+)\s*(>=|<=|!=|==|=|>|<)\s*(.*?)\s*", text)
        if not match or not match[3]:
            raise UsageError.of("--where", text, "FIGURE>=VALUE, or with <=, >, <, = or !=, such as accuracy>=0.9 or precision=bf16")
        return cls(text, figure_name("--where", match[1], further), "=" if match[2] == "==" else match[2], match[3])

    def holds(self, row: Row) -> bool:
        """Return whether a row matches: any entry of a list is enough; null matches only ``=null``."""
        entries = _entries(row.get(self.figure))
        if self.value == "null":
            return (self.operator == "=") == (not entries)
        return any(self._compare(item) for item in entries)

    def _compare(self, item: Any) -> bool:
        wanted = _read_as(_kind(item), self.value)
        return wanted is not None and _OPERATORS[self.operator](_plain(item), wanted)

    def check(self, rows: Iterable[Row]) -> None:
        """Raise UsageError if value or operator are invalid for every figure of that name in `rows`."""
        kinds = {_kind(item) for row in rows for item in _entries(row.get(self.figure))}
        if self.value != "null" and kinds and all(_read_as(kind, self.value) is None for kind in kinds):
            raise UsageError.of("--where", self.text, f"a value as {self.figure} has them: {' or '.join(sorted(kinds))}")
        if self.operator not in ("=", "!=") and (self.value == "null" or (kinds and "a number" not in kinds)):
            raise UsageError.of("--where", self.text, "= and != only, where it is not about a number")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(_plain(value), int | float) else "a text"


def _read_as(kind: str, text: str) -> Any:
    if kind == "a text":
        return text
    if kind == "true or false":
        return {"true": True, "false": False}.get(text.lower())
    try:
        return float(text)
    except ValueError:
        return None


def _plain(value: Any) -> Any:
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def _entries(value: Any) -> list[Any]:
    return [item for item in (value if isinstance(value, list) else [value]) if item is not None]


def fitting(rows: Iterable[Row], conditions: Sequence[Condition]) -> list[Row]:
    """Return the rows that meet all conditions. Raises UsageError for a value of the wrong type."""
    known = list(rows)
    for condition in conditions:
        condition.check(known)
    return [row for row in known if all(condition.holds(row) for condition in conditions)]


def parse_order(order: str, further: Sequence[str] = ()) -> tuple[str, str]:
    """Parse ``FIGURE``, with ``:asc`` or ``:desc``, into key and direction. Raises UsageError."""
    name, _, direction = order.partition(":")
    if direction not in ("", "asc", "desc"):
        raise UsageError.of("--sort", order, "FIGURE, FIGURE:asc or FIGURE:desc", ["asc", "desc"])
    return figure_name("--sort", name, further), direction


def in_order(rows: Iterable[Row], order: str | None, further: Sequence[str] = ()) -> list[Row]:
    """Sort rows by a figure (lists by maximum; texts, then unknown last), else newest first."""
    newest = sorted(rows, key=lambda row: _moment(row["created_at"]), reverse=True)
    if order is None:
        return newest
    figure, direction = parse_order(order, further)
    key = {id(row): _sort_key(row, figure) for row in newest}
    sortable = sorted((row for row in newest if key[id(row)][0] < 2), key=lambda row: key[id(row)], reverse=direction == "desc")
    return [*sortable, *sorted((row for row in newest if key[id(row)][0] >= 2), key=lambda row: key[id(row)])]


def _sort_key(row: Row, figure: str) -> tuple[int, Any]:
    if figure == "created_at":
        return (3, 0) if row[figure] is None else (0, _moment(row[figure]))
    entries = [_plain(item) for item in _entries(row.get(figure))]
    numbers = [item for item in entries if isinstance(item, int | float) and item == item]
    if numbers:
        return 0, max(numbers)
    if not entries:
        return 3, 0
    return (2, 0) if isinstance(entries[0], float) else (1, str(entries[0]))


def _moment(text: str | None) -> float:
    """Return an ISO time in seconds, -inf if invalid: a damaged run must not abort the listing."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return -math.inf


def parse_since(text: str, now: datetime) -> datetime:
    """Parse ``30min``, ``12h``, ``7d``, ``2w`` before `now`, or a date. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(min|h|d|w)", text.strip().lower(), re.ASCII)
    try:
        if match:
            return now - float(match[1]) * _UNITS[match[2]]
        moment = datetime.fromisoformat(text.strip())
        return moment if moment.tzinfo else moment.replace(tzinfo=now.tzinfo)
    except (ValueError, OverflowError):
        raise UsageError.of("--since", text, "30min, 12h, 7d or 2w, or a date such as 2026-11-01") from None
