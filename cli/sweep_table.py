"""The table at the end of a sweep: a comparison of its runs in which what was swept comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.sweeps import value_text
from ..metrics.display import UNKNOWN
from ..report.comparison import compare_paths, is_setting
from ..report.entries import Entry
from ..report.formats import as_text

__all__ = ["points_text"]


def points_text(points: Sequence[tuple[Path, Mapping[str, Any]]], *, repeats: bool, width: int | None) -> str:
    """Return the comparison of some runs (directory, settings of the point) with a row a point, as text.

    With `repeats`, runs that differ by their seed alone are one row. `width` is that of the terminal in characters, if it is one.
    """
    settings = {path.name: values for path, values in points}
    swept = [name for name in dict.fromkeys(name for values in settings.values() for name in values) if not (repeats and name == "seed")]
    comparison = compare_paths([path for path, _ in points], fold=repeats, by=[name for name in swept if is_setting(name)])

    def named(entry: Entry) -> dict[str, str]:
        found = settings[entry.runs[0].name]
        return {name: value_text(found[name]) if name in found else UNKNOWN for name in swept} or {"run": entry.label}

    return as_text(replace(comparison, settings=tuple(map(named, comparison.entries))), layout="rows", width=width)
