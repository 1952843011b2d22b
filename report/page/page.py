"""Writes runs as one page that opens anywhere: tables, plots and words in a single HTML file, which loads nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...core.drafts import replacing
from ...core.errors import UsageError
from ...core.untrusted.console import shown
from ..catalog.run import Run
from ..comparison.comparison import compare_runs
from ..conclusion.conclusion import conclude
from ..conclusion.sentences import Told
from ..conclusion.sentences import told as sentences
from ..conclusion.several_explanations import HEADER as EXPLAINED
from ..conclusion.several_explanations import explain_several
from ..conclusion.text import QUESTION
from ..plots.figure import Bars, Picture, Stroke, colour, dash, keys, kinds, marker
from ..plots.lines import REPEATS, Lines, lines_of
from ..plots.pictures import pictures
from ..plots.plotly_renderer import plots
from ..tables.alignment import holds_figures
from ..tables.comparison_tables import ComparisonTable, default_tables
from ..tables.footnotes import above, below
from ..tables.run_tables import SYNTHETIC
from .run_section import ENVIRONMENT, SETTINGS, described

__all__ = ["MADE_BY", "render", "write_page"]

MADE_BY = "crosstrain: trainer report"
"""Stands at the top of every page, and tells a report of ours from another file."""

_MARK_WITHIN = 2000  # characters from the beginning

_TEMPLATES = Path(__file__).parent / "templates"

_MARKER_PATHS = {
    "circle": "M11 4a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "square": "M11 0h8v8h-8z",
    "diamond": "M15 0l4 4l-4 4l-4 -4z",
    "triangle-up": "M15 0l4 8h-8z",
    "triangle-down": "M11 0h8l-4 8z",
    "pentagon": "M15 0l4 3l-1.5 5h-5l-1.5 -5z",
}
"""The shapes of points in a key, whose pictures are 30 wide and 8 high."""


def write_page(runs: Sequence[Run], path: Path) -> Path:
    """Write the report of the runs to `path`, in one move; an earlier report is replaced. Returns the path.

    Raises UsageError, before anything is read, where another file has that name or the folder does not exist.
    """
    _check(path)
    text = render(runs)
    try:
        with replacing(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output: {str(path)!r} cannot be written ({error.strerror}). Give another place.") from error
    return path


def _check(path: Path) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"--output: there is no folder {str(path.parent)!r}. Make it, or give another place.")
    if path.is_dir():
        raise UsageError(f"--output: {str(path)!r} is a folder; give the name of a file, such as {str(path / 'report.html')!r}.")
    if path.exists() and not path.is_file():
        raise UsageError(f"--output: {str(path)!r} is a device or a pipe, and a file is to be written. Give another name.")
    if path.exists():
        with path.open("rb") as file:
            if MADE_BY.encode() not in file.read(_MARK_WITHIN):
                raise UsageError(f"--output: {str(path)!r} was not written by `trainer report` and stays as it is. Give another name.")


def render(runs: Sequence[Run]) -> str:
    """Return the page. Raises DamagedRunError where a run's records cannot be read."""
    lines = lines_of(runs)
    known = frozenset((line.label, line.stroke) for line in lines.all if len(lines.all) > 1)
    drawn = [replace(one, note=one.note.replace(REPEATS, "").strip()) for one in pictures(runs, lines)]  # it stands above them all
    shown = [_picture(number, picture, known) for number, picture in enumerate(drawn)]
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(colour=colour, dash=dash, marker=marker, marker_paths=_MARKER_PATHS)
    told = [described(run) for run in runs]
    environment_right = _right([row for run in told for row in run["environment"]] or [ENVIRONMENT])
    environment.globals.update(environment=ENVIRONMENT, environment_right=environment_right)
    conclusion = _concluded(runs)
    return environment.get_template("report.html").render(
        title=_title(runs, lines),
        made_by=MADE_BY,
        version=version("crosstrain"),
        sections=_sections(runs, conclusion is not None),
        question=QUESTION,
        conclusion=conclusion,
        warnings=_warnings(told),
        settings=SETTINGS,
        settings_right=_right([[run["label"], run["state"], *run["settings"]] for run in told]),
        runs=told,
        lines=lines.all,
        lines_note=REPEATS if lines.repeated else "",
        explained=_explained(runs),
        **_compared(runs),
        pictures=shown,
        plots=[plot for picture in shown for plot in picture["plots"]],
        style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup((_TEMPLATES / "report.js").read_text(encoding="utf-8")),
        plotly=Markup(files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")),
    )


def _title(runs: Sequence[Run], lines: Lines) -> str:
    if len(runs) == 1:
        return f"Run {runs[0].label}"
    return f"{len(runs)} runs compared" + (f", {len(lines.all)} configurations" if len(lines.all) < len(runs) else "")


def _sections(runs: Sequence[Run], concludes: bool) -> list[tuple[str, str]]:
    """Return the contents: the anchor of each section, and what it is called."""
    first = [(f"run-{runs[0].number}", "Bottleneck")] if len(runs) == 1 else []
    first += [("conclusion", QUESTION)] if concludes else []
    return [*first, ("plots-heading", "Plots"), ("figures", "Metrics"), ("runs", "Settings"), ("each", "Each run")]


_MOST_WARNINGS = 5


def _warnings(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what stands in the way of trusting the figures, a line each; of many runs that failed, how many more there are."""
    found = []
    failed = [run for run in told if run["state"] != "succeeded"]
    for run in failed[:_MOST_WARNINGS]:
        cause = f" ({run['cause']})" if run["cause"] else ""
        found.append(f"{run['label']}: {run['state']}{cause}. What is shown of it is what was recorded until then.")
    if len(failed) > _MOST_WARNINGS:
        found.append(f"{len(failed) - _MOST_WARNINGS} more runs have not succeeded; see their settings.")
    found += [f"{run['lost']}." for run in told if run["lost"]]
    return [*found, SYNTHETIC] if any(run["synthetic"] for run in told) else found


def _shown(value: Any) -> Any:
    """Return what the page has of a value: of a text that is no part of the page itself, what is to be seen."""
    return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _right(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return which columns of a table hold figures; the first one says what a row is called."""
    return [index > 0 and holds_figures(column, False) for index, column in enumerate(zip(*rows, strict=True))]


def _concluded(runs: Sequence[Run]) -> Told | None:
    """Return what the runs that have figures say together, in words; None where there are not several."""
    ended = [run for run in runs if run.has_summary]
    if len(ended) < 2:
        return None
    found = conclude(ended)
    return sentences(found) if found.concludes else None


def _compared(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the tables of the runs that have figures, with their scaling where they ran on several numbers of nodes."""
    ended = [run for run in runs if run.has_summary]
    if not ended:
        return {"above": [], "blocks": [], "below": []}
    nodes = {run.summary.get("nodes") for run in ended}
    comparison = compare_runs(ended, by=("nodes",) if len(nodes) > 1 else ())
    blocks = [_labelled(block) for block in default_tables(comparison)]
    return {"above": _nested(above(comparison)), "blocks": blocks, "below": below(comparison)}


def _explained(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return what holds each run back, and what changes along the axes; None where not several have figures."""
    ended = [run for run in runs if run.has_summary]
    if len(ended) < 2:
        return None
    found = explain_several(ended)
    return {
        "header": EXPLAINED,
        "rows": found.rows,
        "right": [False, True, False],
        "changes": [change.sentence for change in found.changes],
    }


def _nested(lines: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each line with those that are indented below it."""
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(" ") and found:
            found[-1][1].append(line.strip())
        else:
            found.append((line.strip(), []))
    return found


def _labelled(block: ComparisonTable) -> ComparisonTable:
    """Return a table in which every row says what it is about, as a reader aloud needs it."""
    rows: list[tuple[str, ...]] = []
    for row in block.rows:
        rows.append((row[0] or rows[-1][0], *row[1:]) if rows else row)
    return replace(block, rows=tuple(rows))


def _picture(number: int, picture: Picture, known: Collection[tuple[str, Stroke]]) -> dict[str, Any]:
    """Return what the template shows of a picture; it has no key of its own where that of the page has all of its lines (`known`)."""
    found = plots(picture)
    legend = keys(picture)
    bars = [panel for panel in picture.panels if isinstance(panel, Bars)]
    for plot, panel in zip(found, bars, strict=False):
        plot["segments"] = [{"name": segment.name, "colour": segment.colour} for segment in panel.segments]
    return {
        "id": number,
        "place": picture.place,
        "run": picture.run,
        "title": picture.title,
        "note": picture.note,
        "words": picture.words,
        "stacked": picture.stacked,
        "whole": picture.stacked or bool(bars),
        "small": len(picture.panels) > _MOST_LARGE,
        "legend": [] if picture.place != "first" and all((one.name, one.stroke) in known for one in legend) else legend,
        "marks": kinds(picture.marks),
        "plots": [{"segments": None, **plot} for plot in found],
    }


_MOST_LARGE = 3
"""Panels of one picture that stand two abreast; more are smaller."""
