"""The report as a single HTML file that loads nothing."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...core.cluster import workers_by_node
from ...core.console import shown
from ...core.drafts import replacing
from ...core.errors import UsageError
from ...records.text import UNKNOWN, bytes_text, code_text, count_text, instructions_text, number_text
from ..analysis.advice import advise
from ..analysis.conclusion import conclude
from ..analysis.diagnosis import diagnose
from ..analysis.diagnosis_text import HEADER as DIAGNOSIS_HEADER
from ..analysis.diagnosis_text import answers, diagnose_several, headline, notes
from ..analysis.sentences import QUESTION
from ..analysis.sentences import render_conclusion as sentences
from ..compare.cells import holds_figures
from ..compare.comparison import compare_runs
from ..compare.comparison_tables import ComparisonTable, default_tables, difference_lines, table_notes
from ..compare.run_tables import SYNTHETIC
from ..runs.run import Run, as_recorded, config_text, lost_updates, repeat_command
from .figure import REPEATS, Bars, Picture, Stroke, colour, dash, legend_curves, legend_marks, make_lines, marker
from .pictures import pictures
from .plotly_renderer import plots

SETTINGS = ("run", "state", "backend", "mode", "model", "data", "precision", "nodes", "workers", "parameter servers", "global batch")
ENVIRONMENT = ("node", "host", "processor", "cores available", "memory", "kernel", "Python", "packages", "GPUs")


def describe_run(run: Run) -> dict[str, Any]:
    """Return a run's values in the page's template."""
    segments = run.job.get("segments") or [{"command": run.job.get("command") or ()}]
    return {
        "number": run.number,
        "label": run.name,
        "state": run.state,
        "cause": run.cause,
        "diverged": run.diverged.sentence if run.diverged is not None else "",
        "synthetic": _synthetic(run),
        "lost": lost_updates(run),
        "settings": _settings(run),
        "started": _when(segments[0].get("started_at")),
        "path": str(run.path.resolve()),
        **_diagnosis_of_run(run),
        "environment": [_node(number, node) for number, node in enumerate(run.nodes)],
        "code": code_text(run.code),
        "segments": [shlex.join(map(str, segment.get("command") or ())) for segment in segments],
        "repeat": repeat_command(run.job, {}),
        "config": config_text(run.job),
    }


def _when(text: str | None) -> str:
    return UNKNOWN if text is None else datetime.fromisoformat(text).isoformat(sep=" ", timespec="seconds")


def _synthetic(run: Run) -> bool:
    return run.has_summary and bool(run.summary.get("synthetic"))


def _settings(run: Run) -> list[str]:
    job = run.job
    nodes = int(job["nodes"])
    workers = sum(workers_by_node(job["procs_per_node"], nodes))
    data = f"{job['data']} (synthetic)" if _synthetic(run) else str(job["data"])
    precision = (run.has_summary and run.summary.get("precision_used")) or job["precision"]
    servers = count_text(job["ps"]) if job["mode"] == "async" else UNKNOWN
    tokens = job.get("batch_tokens")
    batch = count_text(job.get("global_batch_size_resolved")) if tokens is None else f"{count_text(tokens)} tokens a worker"
    if job["mode"] == "async" and tokens is None and job.get("global_batch_size_resolved") is not None:
        batch += f" ({count_text(-(-job['global_batch_size_resolved'] // workers))} per update)"
    return [job["backend"], job["mode"], job["model"], data, precision, count_text(nodes), count_text(workers), servers, batch]


def _diagnosis_of_run(run: Run) -> dict[str, Any]:
    if not run.has_summary and next(run.steps(), None) is None:
        return {"verdict": None, "questions": []}
    known = as_recorded(run)
    diagnosis = diagnose(known)
    verdict = {"text": headline(diagnosis), "notes": notes(diagnosis), "advice": [entry.sentence for entry in advise(diagnosis)]}
    return {"verdict": verdict, "questions": [(answer.question, answer.text) for answer in answers(known, diagnosis)]}


def _node(number: int, node: Mapping[str, Any]) -> list[str]:
    limit = node.get("memory_limit_bytes")
    memory = bytes_text(node.get("memory_total_bytes")) + (f", limit {bytes_text(limit)}" if limit else "")
    packages = ", ".join(f"{name} {version}" for name, version in (node.get("packages") or {}).items() if version)
    return [
        str(number),
        str(node.get("hostname") or UNKNOWN),
        ", ".join(filter(None, [node.get("cpu_model"), instructions_text(node.get("cpu_flags"))])) or UNKNOWN,
        number_text(node.get("cores_available"), 2),
        memory,
        f"{node.get('operating_system') or ''} {node.get('kernel') or UNKNOWN}".strip(),
        str(node.get("python") or UNKNOWN),
        packages or UNKNOWN,
        ", ".join(f"{gpu['name']} ({bytes_text(gpu['memory_total_bytes'])})" for gpu in node.get("gpus") or ()) or "none",
    ]


MADE_BY = "crosstrain: trainer report"  # at the top of every page, to recognise earlier reports
_MARK_WITHIN = 2000  # characters from the beginning
_TEMPLATES = Path(__file__).parent / "templates"
_MARKER_PATHS = {
    "circle": "M11 4a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "square": "M11 0h8v8h-8z",
    "diamond": "M15 0l4 4l-4 4l-4 -4z",
    "triangle-up": "M15 0l4 8h-8z",
    "triangle-down": "M11 0h8l-4 8z",
    "pentagon": "M15 0l4 3l-1.5 5h-5l-1.5 -5z",
}  # shapes of points in a legend entry, 30 wide and 8 high


def write_page(runs: Sequence[Run], path: Path) -> Path:
    """Write the report atomically. Raises UsageError for foreign or unwritable files."""
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
    """Return the page. Raises DamagedRunError for unreadable records."""
    lines = make_lines(runs)
    known = frozenset((line.label, line.stroke) for line in lines.all if len(lines.all) > 1)
    drawn = [replace(picture, note=picture.note.replace(REPEATS, "").strip()) for picture in pictures(runs, lines)]  # shown above all
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
    descriptions = [describe_run(run) for run in runs]
    environment_right = _are_figures([row for run in descriptions for row in run["environment"]] or [ENVIRONMENT])
    environment.globals.update(environment=ENVIRONMENT, environment_right=environment_right)
    ended = [run for run in runs if run.has_summary]
    concluded = conclude(ended) if len(ended) > 1 else None
    conclusion = sentences(concluded) if concluded is not None and concluded.is_conclusive else None
    return environment.get_template("report.html").render(
        made_by=MADE_BY,
        version=version("crosstrain"),
        question=QUESTION,
        conclusion=conclusion,
        synthetic=SYNTHETIC,
        settings=SETTINGS,
        settings_right=_are_figures([[run["label"], run["state"], *run["settings"]] for run in descriptions]),
        runs=descriptions,
        lines=lines.all,
        lines_note=REPEATS if lines.repeated else "",
        explained=diagnose_several(ended) if len(ended) > 1 else None,
        explained_header=DIAGNOSIS_HEADER,
        **_compared(ended),
        pictures=shown,
        plots=[plot for picture in shown for plot in picture["plots"]],
        style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup((_TEMPLATES / "report.js").read_text(encoding="utf-8")),
        plotly=Markup(files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")),
    )


def _shown(value: Any) -> Any:
    """Escape what is invisible in a text, unless it is a part of the page itself."""
    return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _are_figures(rows: Sequence[Sequence[str]]) -> list[bool]:
    return [index > 0 and holds_figures(column, False) for index, column in enumerate(zip(*rows, strict=True))]


def _compared(ended: Sequence[Run]) -> dict[str, Any]:
    if not ended:
        return {"above": [], "blocks": [], "below": []}
    nodes = {run.summary.get("nodes") for run in ended}
    comparison = compare_runs(ended, by=("nodes",) if len(nodes) > 1 else ())
    blocks = [_labelled(block) for block in default_tables(comparison)]
    return {"above": _nested(difference_lines(comparison)), "blocks": blocks, "below": table_notes(comparison)}


def _nested(lines: Sequence[str]) -> list[tuple[str, list[str]]]:
    nested: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(" ") and nested:
            nested[-1][1].append(line.strip())
        else:
            nested.append((line.strip(), []))
    return nested


def _labelled(block: ComparisonTable) -> ComparisonTable:
    rows: list[tuple[str, ...]] = []
    for row in block.rows:
        rows.append((row[0] or rows[-1][0], *row[1:]) if rows else row)
    return replace(block, rows=tuple(rows))


def _picture(number: int, picture: Picture, known: Collection[tuple[str, Stroke]]) -> dict[str, Any]:
    drawn = plots(picture)
    legend = legend_curves(picture)
    bars = [panel for panel in picture.panels if isinstance(panel, Bars)]
    for plot, panel in zip(drawn, bars, strict=False):
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
        "small": len(picture.panels) > _MAX_LARGE,
        "legend": [] if picture.place != "first" and all((entry.name, entry.stroke) in known for entry in legend) else legend,
        "marks": legend_marks(picture.marks),
        "plots": [{"segments": None, **plot} for plot in drawn],
    }


_MAX_LARGE = 3  # large panels of a picture; more are smaller
