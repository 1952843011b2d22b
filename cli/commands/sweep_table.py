"""The end of a sweep: what follows from its runs, and a comparison of them in which what was swept comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.settings.sweeps import value_text
from ...report.catalog.run import Run, finished_run
from ...report.comparison.comparison import compare_runs, setting_name
from ...report.comparison.factors import NOTHING, Factor
from ...report.comparison.ordering import BY_FIELD, natural
from ...report.conclusion.conclusion import conclude
from ...report.conclusion.sentences import told
from ...report.conclusion.text import as_text as conclusion_as_text
from ...report.conclusion.text import closing_text
from ...report.tables.formats import as_text

__all__ = ["points_conclusion", "points_text"]


def points_conclusion(points: Sequence[tuple[Path, Mapping[str, Any]]]) -> dict[str, Any] | None:
    """Return what the runs of some points say together as a JSON object; None where there are not several."""
    settings = dict(points)
    if not settings:
        return None
    found = conclude([finished_run(path) for path in settings], _axes(_swept_settings(settings)))
    return found.to_json(told(found).sentences) if found.concludes else None


def points_text(
    points: Sequence[tuple[Path, Mapping[str, Any]]], *, repeats: bool, width: int | None, height: int = 0, tables: bool = True
) -> str:
    """Return what some runs (directory, settings of the point) say together and, with `tables`, their comparison with a row a point.

    With `repeats`, runs of points that differ by their seed alone are one row. `width` and `height` are those of the terminal in
    characters, if it is one: text that is longer ends with the answer once more. A single row has no other, so that it is shown.
    What was swept marks figures as it does for `trainer compare`; how to have it without marks is said below.
    """
    settings = dict(points)
    by = [rule for rule in _swept_settings(settings) if not (repeats and rule.key == "seed")]
    axes = _axes(by)
    comparison = compare_runs([finished_run(path) for path in settings], fold=repeats, by=by, by_confounds=True)
    found = conclude(comparison.runs, axes)
    words = told(found) if found.concludes else None
    text = "" if words is None else conclusion_as_text(words, width)
    if tables or words is None or len(comparison.entries) == 1:
        text += as_text(comparison, layout="rows", width=width)
        confounding = [one.key for one in comparison.comparability.faults if one.confounds and one.key in {rule.key for rule in by}]
        text += f"\n{_without_marks(confounding)}" if confounding else ""
    return text + ("" if words is None or text.count("\n") < height else closing_text(words, width))


def _swept_settings(settings: Mapping[Path, Mapping[str, Any]]) -> list[Factor]:
    return [_swept(name, settings) for name in dict.fromkeys(name for values in settings.values() for name in values)]


def _axes(swept: Sequence[Factor]) -> list[Factor]:
    """Return what was swept, apart from the seed, which makes repeats."""
    return [rule for rule in swept if rule.key != "seed"]


def _without_marks(confounding: Sequence[str]) -> str:
    return f"`trainer compare --by {','.join(confounding)}` takes that for what is compared, and marks nothing for it."


def _swept(field: str, settings: Mapping[Path, Mapping[str, Any]]) -> Factor:
    """Return a setting as the points have it, whether or not it does something in each of their runs."""

    def value(run: Run) -> Any:
        found = settings[run.path].get(field)
        return tuple(found) if isinstance(found, list) else found

    return Factor(setting_name(field), field, value, NOTHING, "", True, show=value_text, order=BY_FIELD.get(field, natural))
