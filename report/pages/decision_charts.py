"""The decision chart: target time or throughput of configurations, and learning curves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...records.text import duration_text, number_text, rate_text
from ..analysis.set_ups import FIGURES, Figure, SetUp
from ..compare.ratios import geometric_mean
from ..runs.cpu_starvation import timed_runs
from ..runs.series import one_by_one
from ..runs.summary_rows import searched
from .figure import COLOURS, Dots, Panel, Picture, stroke
from .lines import Line, Lines
from .training_charts import course, evaluations, goal, metrics_of_all

MOST_ROWS = 12  # readable on a first screen
TARGET, _ = FIGURES


def decision(lines: Lines) -> Picture | None:
    """Return the picture; None for one configuration, or without any of the figures."""
    found = [line for line in lines.all if line.set_up is not None]
    if lines.set_ups is None or len(found) < 2:
        return None
    by_figure = ((one, lines.set_ups.all_comparable(one)) for one in FIGURES)
    figure, among = next(((one, members) for one, members in by_figure if members), (None, []))
    if figure is None:
        return None
    comparable = {id(one) for one in among}
    ranked = sorted(found, key=lambda line: _rank(_of(line), figure, id(line.set_up) in comparable))
    rows = ranked[:MOST_ROWS]
    panels: list[Panel | Dots] = [_dots(lines, rows, figure, len(ranked), comparable)]
    if (learnt := _learnt(lines, ranked)) is not None:
        panels.append(learnt)
    widened = any(_of(line).contended for line in rows if id(line.set_up) in comparable)
    bar = f" Tick: geometric mean. Bar: its 95 % confidence interval{', widened for CPU contention' * widened}."
    note = f"Dot: a run.{bar * lines.repeated} "
    words = "; ".join(_said(lines, line, figure, comparable) for line in rows)
    title = "Fastest first, no recommendation" if lines.set_ups.quality.undecided and figure is not TARGET else "Best first"
    return Picture("decision", title, (note + lines.note).strip(), words, tuple(panels), place="first")


def _of(line: Line) -> SetUp:
    assert line.set_up is not None
    return line.set_up


def _rank(one: SetUp, figure: Figure, comparable: bool) -> tuple[bool, float, float]:
    if comparable:
        return False, 0.0, -figure.better * geometric_mean(one.figures(figure))
    return True, -(one.row.converged or 0) / len(one.runs), 0.0


def _dots(lines: Lines, rows: list[Line], figure: Figure, of: int, comparable: Collection[int]) -> Dots:
    values = [_of(line).figures(figure) if id(line.set_up) in comparable else () for line in rows]
    title = f"Time to {_of(rows[0]).row.figures['target']}" if figure is TARGET else "Examples per second"
    if of > len(rows):
        title += f", the best {len(rows)} of {of} configurations"
    return Dots(
        title,
        "seconds, less is better" if figure is TARGET else "examples per second, more is better",
        tuple(line.named(len(each) or len(line.runs)) for line, each in zip(rows, values, strict=True)),
        tuple(values),
        tuple(geometric_mean(each) if each else None for each in values),
        tuple(_of(line).interval(figure) if each else None for line, each in zip(rows, values, strict=True)),
        tuple(line.stroke for line in rows),
        tuple(line.number for line in rows),
        tuple("" if each else _missing(lines, _of(line), figure) for line, each in zip(rows, values, strict=True)),
    )


def _missing(lines: Lines, one: SetUp, figure: Figure) -> str:
    assert lines.set_ups is not None
    quality, place = lines.set_ups.quality, lines.set_ups.place(one)
    if place in quality.diverged:
        return f"diverged: {quality.diverged[place]}"
    if not quality.ranks(place) and place not in quality.judged:
        why = [fault.label for fault in lines.set_ups.why_not_judged(one)]
        return f"not ranked: other {' and '.join(why)}" if why else "not ranked: quality not comparable"
    if not quality.ranks(place) and quality.info is not None:
        return f"test {quality.info.label} significantly worse: {quality.text(place)}"
    if not timed_runs(one.runs):
        return "CPU contention from other programs"
    if one.figures(figure):
        return "not comparable with those above"
    if figure is TARGET and one.row.converged is not None:
        return f"{one.row.converged} of {len(one.runs)} reached {one.row.figures['target']}"
    return "no target" if figure is TARGET else "speed not known"


def _learnt(lines: Lines, ranked: list[Line]) -> Panel | None:
    metrics = metrics_of_all(lines)
    if not metrics:
        return None
    info = next((one for one in metrics if goal(lines, one.name) is not None), metrics[0])
    some = len(lines.parts) > 1 or len(ranked) > MOST_ROWS
    curves, bands = [], []
    for place, line in enumerate(ranked[: len(COLOURS)] if some else ranked):
        known = [found for run in line.timed if (found := evaluations(run, info)) is not None]
        if known:
            drawn_as = replace(line, stroke=stroke(place)) if some else line
            own, pale = course(drawn_as, [(seconds, values) for _, seconds, values in known], "points", one_by_one)
            curves += own
            bands += pale
    if not curves:
        return None
    of = searched(info, lines.runs)
    title = f"Test {info.label}{of} over time" + (f", the best {len(curves)} configurations" if some else "")
    return Panel(title, "wall-clock time (s)", f"test {info.label}", tuple(curves), level=goal(lines, info.name), bands=tuple(bands))


def _said(lines: Lines, line: Line, figure: Figure, comparable: Collection[int]) -> str:
    values = _of(line).figures(figure)
    if not values or id(line.set_up) not in comparable:
        return f"{line.label}: {_missing(lines, _of(line), figure)}"
    show = duration_text if figure is TARGET else rate_text
    scatter = _of(line).interval(figure)
    within = "" if scatter is None else f" (95 % CI {' to '.join(map(show, scatter))})"
    return (
        f"{line.label}: {show(geometric_mean(values))}{within} in {number_text(len(values), 0)} runs"
        if len(values) > 1
        else (f"{line.label}: {show(values[0])}")
    )
