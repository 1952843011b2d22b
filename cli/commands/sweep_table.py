"""The table at the end of a sweep: a comparison of its runs in which what was swept comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.settings.sweeps import value_text
from ...report.catalog.run import Run
from ...report.comparison.comparison import compare_paths, setting_name
from ...report.comparison.factors import NOTHING, Factor
from ...report.comparison.ordering import BY_FIELD, natural
from ...report.tables.formats import as_text

__all__ = ["points_text"]


def points_text(points: Sequence[tuple[Path, Mapping[str, Any]]], *, repeats: bool, width: int | None) -> str:
    """Return the comparison of some runs (directory, settings of the point) with a row a point, as text.

    With `repeats`, runs of points that differ by their seed alone are one row. `width` is that of the terminal in characters, if it is one.
    What was swept marks figures as it does for `trainer compare`; how to have it without marks is said below.
    """
    settings = dict(points)
    swept = [name for name in dict.fromkeys(name for values in settings.values() for name in values) if not (repeats and name == "seed")]
    comparison = compare_paths(list(settings), fold=repeats, by=[_swept(name, settings) for name in swept], by_confounds=True)
    text = as_text(comparison, layout="rows", width=width)
    confounding = [one.key for one in comparison.comparability.faults if one.confounds and one.key in set(map(setting_name, swept))]
    return f"{text}\n{_without_marks(confounding)}" if confounding else text


def _without_marks(confounding: Sequence[str]) -> str:
    return f"`trainer compare --by {','.join(confounding)}` takes that for what is compared, and marks nothing for it."


def _swept(field: str, settings: Mapping[Path, Mapping[str, Any]]) -> Factor:
    """Return a setting as the points have it, whether or not it does something in each of their runs."""

    def value(run: Run) -> Any:
        found = settings[run.path].get(field)
        return tuple(found) if isinstance(found, list) else found

    return Factor(setting_name(field), field, value, NOTHING, "", True, show=value_text, order=BY_FIELD.get(field, natural))
