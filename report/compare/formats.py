"""A comparison as text for a terminal, as Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.cells import cell_len as text_width
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...core.console import cell_text
from ...records.store.jsonl import finite_json
from ..runs.columns import COLUMNS, Column
from .cells import relative_to_first
from .comparison import Comparison
from .comparison_tables import ComparisonTable, default_tables, difference_lines, selected_table, table_notes
from .run_tables import aligned, plain_table, side_by_side_table, to_text

_MAX_COLUMNS = 4  # by default, more runs have rows instead of columns
_PROSE = 120  # maximum line length of sentences, and without a terminal of a table with columns
_GAP = 3  # between the columns of a table


def as_text(comparison: Comparison, columns: Sequence[Column] = (), *, layout: str = "auto", width: int | None = None) -> str:
    """Return differences, tables and notes; with `columns` one table of these figures."""
    # ``auto`` has a column per run for a few runs, if they fit. `width` is that of the terminal in characters, None without one.
    prose = min(width or _PROSE, _PROSE)
    blocks = selected_table(comparison, columns) if columns else default_tables(comparison)
    table = None if columns or comparison.scaling is not None else _side_by_side(comparison, layout, width)
    parts: list[RenderableType] = [table] if table is not None else _fitting(blocks, width)
    paragraphs = [
        _wrapped(difference_lines(comparison), prose),
        to_text(Group(*parts), width or 10_000),
        *(_wrapped([text], prose) for text in table_notes(comparison, columns, side_by_side=table is not None)),
    ]
    return "\n".join(text for text in paragraphs if text)


def _side_by_side(comparison: Comparison, layout: str, width: int | None) -> Table | None:
    if layout == "rows":
        return None
    table = side_by_side_table(comparison.entries, comparison.marks)
    if layout == "columns":
        return table
    fits = max(map(text_width, to_text(table).splitlines())) <= (width or _PROSE)
    return table if fits and len(comparison.entries) <= _MAX_COLUMNS else None


def _wrapped(lines: Sequence[str], width: int) -> str:
    broken = []
    for line in "\n".join(lines).splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        hanging = f"{indent}  " if indent else ""
        broken += textwrap.wrap(line, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in broken)


def _fitting(blocks: Sequence[ComparisonTable], width: int | None) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for block in blocks:
        for piece in _pieces(block, width):
            table = plain_table()
            for index, (label, right) in enumerate(zip(piece.header, piece.right, strict=True)):
                table.add_column(Text(label), justify="right" if right else "left", no_wrap=index >= piece.names, overflow="fold")
            for row in aligned(piece.rows):
                table.add_row(*map(Text, row))
            parts += ["", table] if parts else [table]
    return parts


def _pieces(block: ComparisonTable, width: int | None) -> list[ComparisonTable]:
    widths = [max(map(text_width, column)) for column in zip(block.header, *aligned(block.rows), strict=True)]
    names = sum(widths[: block.names]) + _GAP * (block.names - 1)
    groups: list[list[int]] = []
    used = 0
    for index in range(block.names, len(block.header)):
        if not groups or (width is not None and used + widths[index] + _GAP > width):
            groups.append([])
            used = names
        groups[-1].append(index)
        used += (_GAP if used else 0) + widths[index]
    return [_only(block, group) for group in groups]


def _only(block: ComparisonTable, columns: Sequence[int]) -> ComparisonTable:
    columns_shown = [*range(block.names), *columns]
    header, *rows = (tuple(row[index] for index in columns_shown) for row in (block.header, *block.rows))
    return replace(block, header=header, rows=tuple(rows), words=sum(index < block.words for index in columns_shown))


def as_markdown(comparison: Comparison, columns: Sequence[Column] = (), before: Sequence[str] = ()) -> str:
    """Return as Markdown the lines `before`, the differences, the tables and the notes."""
    parts = ["\n".join(_markdown_text(line) for line in _items(lines)) for lines in (before, difference_lines(comparison))]
    for block in selected_table(comparison, columns) if columns else default_tables(comparison):
        rule = f"| {' | '.join('---:' if right else '---' for right in block.right)} |"
        parts.append("\n".join([_markdown_row(block.header), rule, *map(_markdown_row, block.rows)]))
    parts += [_markdown_text(text.replace("\n", " ")) for text in table_notes(comparison, columns)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _items(lines: Sequence[str]) -> list[str]:
    return [f"{line[: len(line) - len(line.lstrip())]}- {line.strip()}" for line in lines]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_markdown_text, cells))} |"


def _markdown_text(text: str) -> str:
    """Escape Markdown inside a line; a list's dash at its start stays."""
    return "".join(f"\\{character}" if character in "\\|*_`<>[]" else character for character in text)


def as_csv(comparison: Comparison, columns: Sequence[Column] = ()) -> str:
    """Return a line per row: its settings, and its unrounded figures."""
    # ``…_sigma`` are standard deviations, ``…_n`` the number of runs of a mean, if contention leaves fewer; ``not_comparable`` has the
    # kinds of figures not comparable with the first row's.
    ratios = {column.relative_key: relative_to_first(comparison.entries, column) for column in COLUMNS if column.better}
    rows = []
    for index, (entry, settings) in enumerate(zip(comparison.entries, comparison.settings, strict=True)):
        names: dict[str, Any] = {label: text for label, text in settings.items() if label != "run"}
        values: dict[str, Any] = {"run": entry.label, **names, "runs": len(entry.runs)}
        values["not_comparable"] = "; ".join(comparison.comparability.called(comparison.marks[index]))
        for key in [column.key for column in columns] or entry.figures:
            if key != "run":
                values |= _flat(key, entry.figures.get(key), entry.sigmas.get(key))
                values[f"{key}_n"] = entry.counts.get(key)
        if not columns:
            values |= {key: ratio[index] for key, ratio in ratios.items()}
        rows.append(values)
    return write_csv(rows)


def _flat(key: str, value: Any, sigma: Any) -> dict[str, Any]:
    if isinstance(value, list) and key.startswith("node_"):
        by_node: dict[str, Any] = {}
        for node, item in enumerate(value):
            name = f"node_{node}_{key.removeprefix('node_')}"
            by_node |= {name: item, f"{name}_sigma": None if sigma is None else sigma[node]}
        return by_node
    return {key: value, f"{key}_sigma": sigma}


def write_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, without empty columns ``…_sigma`` and ``…_n``; no text is a formula."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns_shown = [name for name in names if not name.endswith(("_sigma", "_n")) or any(row.get(name) is not None for row in rows)]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(cell_text, columns_shown))
    for row in rows:
        writer.writerow([_value(row.get(name)) for name in columns_shown])
    return stream.getvalue()


def _value(value: Any) -> Any:
    value = finite_json(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        listed = " ".join(map(str, value))
        return cell_text(listed) if any(isinstance(item, str) for item in value) else listed
    if isinstance(value, str):
        return cell_text(value)
    return repr(value) if isinstance(value, float) else value
