"""The parts of a chart for Plotly and matplotlib, and the lines of configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..analysis.configurations import Configuration, ConfigurationSet, configuration_set, values_label
from ..compare.factors import some_of
from ..runs.cpu_starvation import contention_judged
from ..runs.run import Run
from ..runs.series import POINTS, thinned
from ..runs.series_arrays import Floats

# Okabe and Ito's colour-blind-safe colours, without yellow and black, which vanish on white or on black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK = "#808080"  # for neither run nor node; visible on white and on black
# Lengths in points of line and gap; () is solid. Five dashes and six colours give thirty different curves.
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (2, 2), (6, 2, 2, 2), (10, 3))
MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon")  # each filled and open
Kind = Literal["line", "faint", "points", "crosses"]
Unit = Literal["", "B", "B/s", "%", "s"]
Place = Literal["first", "plots", "more", "run"]  # where a page shows a picture: first screen, plots, behind a click, or the run's section


def colour(number: int) -> str:
    """Return the n-th colour; `INK` for a negative number."""
    return INK if number < 0 else COLOURS[number % len(COLOURS)]


def dash(number: int) -> tuple[float, ...]:
    """Return the n-th dash."""
    return DASHES[number % len(DASHES)]


@dataclass(frozen=True, slots=True)
class Stroke:
    """The numbers of a curve's colour and dash."""

    colour: int
    dash: int


def marker(drawn: Stroke) -> str:
    """Return the shape of a curve's points, with ``-open`` if unfilled; ten `stroke`s differ."""
    number = (drawn.colour + 5 * drawn.dash) % (2 * len(MARKERS))
    return MARKERS[number % len(MARKERS)] + ("-open" if number >= len(MARKERS) else "")


NEUTRAL = Stroke(-1, 2)  # of lines of no run, such as the ideal


def stroke(number: int) -> Stroke:
    """Return the n-th stroke: neighbours differ in colour and dash, the first thirty all differ."""
    return Stroke(number % len(COLOURS), 3 * number % len(DASHES))


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points [n]."""

    name: str
    stroke: Stroke
    x: Floats
    y: Floats  # NaN is a gap
    line: int  # number of the legend entry that toggles it
    kind: Kind = "line"  # faint: raw values behind a smoothed line; points: with markers; crosses: non-finite values


@dataclass(frozen=True, slots=True)
class Band:
    """A pale area between two heights [n] over `x`: all finite, at least two points."""

    stroke: Stroke
    x: Floats
    low: Floats
    high: Floats
    line: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line through all panels for an event at `x`; marks of one `kind` look the same."""

    kind: str
    x: float
    colour: str
    dash: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    x_title: str
    y_title: str
    curves: tuple[Curve, ...]
    unit: Unit = ""  # of `y`
    from_zero: bool = False
    top: float | None = None  # limit of `y`
    level: tuple[float, str] | None = None  # a named horizontal line
    bands: tuple[Band, ...] = ()
    counts: bool = False  # whole numbers only, of `x`
    logarithmic: bool = False  # of `x`
    ticks: tuple[float, ...] = ()  # of `x`


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of each bar [rows]; NaN if unknown."""

    name: str
    values: Floats
    colour: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Stacked horizontal bars, one a row; `missing` is the text of a row without values."""

    title: str
    x_title: str
    rows: tuple[str, ...]
    segments: tuple[Segment, ...]
    unit: Unit
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dots:
    """A dot plot of configurations' `values` with their mean's interval, or `missing` text."""

    title: str
    x_title: str
    rows: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    means: tuple[float | None, ...]
    intervals: tuple[tuple[float, float] | None, ...]
    strokes: tuple[Stroke, ...]
    lines: tuple[int, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels that belong together."""

    name: str  # of the file
    title: str
    note: str
    words: str  # for screen readers
    panels: tuple[Panel | Bars | Dots, ...]
    stacked: bool = False  # panels share one axis of x (`x_range`)
    marks: tuple[Mark, ...] = ()  # across all panels
    x_range: tuple[float, float] | None = None
    run: int | None = None  # number of its run; None: all runs
    place: Place = "plots"


def curve(name: str, drawn_as: Stroke, x: Floats, y: Floats, line: int, kind: Kind = "line", points: int = POINTS) -> Curve:
    """Return the curve through points [n], thinned to about `points`, with non-finite gaps."""
    picked = thinned(y, points)
    heights = np.asarray(y[picked], np.float64)
    return Curve(name, drawn_as, np.asarray(x[picked], np.float64), np.where(np.isfinite(heights), heights, np.nan), line, kind)


def visible_bands(drawn_as: Stroke, x: Floats, low: Floats, high: Floats, line: int) -> list[Band]:
    """Return the band between two curves [n] where both are finite; none if nothing is visible."""
    known = np.isfinite(low) & np.isfinite(high)
    if np.count_nonzero(known) < 2 or not np.any(high[known] > low[known]):
        return []
    return [Band(drawn_as, x[known], low[known], high[known], line)]


def legend_curves(picture: Picture) -> list[Curve]:
    """Return the legend's curve for each name in a picture, preferably with points."""
    by_name: dict[str, Curve] = {}
    for panel in picture.panels:
        for drawn in panel.curves if isinstance(panel, Panel) else ():
            if drawn.name not in by_name or drawn.kind == "points":
                by_name[drawn.name] = drawn
    return list(by_name.values())


@dataclass(frozen=True, slots=True)
class EndLabel:
    """A line's name at the right edge (`x_label`, `y_label`); the line ends at (`x`, `y`)."""

    text: str
    curve: Curve
    x: float
    y: float
    x_label: float
    y_label: float


def end_labels(panel: Panel, apart: float, characters: int) -> list[EndLabel]:
    """Return the lines' labels, lowest first, `apart` as a fraction of the panel's height."""
    # Words common to all names are dropped, and longer names cut to `characters`. Empty for one line, or without room for all.
    last: dict[str, tuple[float, float, Curve]] = {}
    for drawn in panel.curves:
        known = np.flatnonzero(np.isfinite(drawn.y))
        if drawn.kind in ("line", "points") and len(known) and (drawn.name not in last or drawn.x[known[-1]] > last[drawn.name][0]):
            last[drawn.name] = float(drawn.x[known[-1]]), float(drawn.y[known[-1]]), drawn
    if len(last) < 2 or (len(last) - 1) * apart > 1.0:
        return []
    drawn_heights = [
        height for panel_curve in panel.curves if panel_curve.kind != "faint" for height in panel_curve.y[np.isfinite(panel_curve.y)]
    ]
    heights = [*drawn_heights, *([] if panel.level is None else [panel.level[0]]), *([0.0] if panel.from_zero else [])]
    low, high = min(heights), panel.top or max(heights)
    if not high > low:
        low, high = low - 0.05 * (abs(low) or 1.0), low + 0.05 * (abs(low) or 1.0)
    ordered = sorted(last.items(), key=lambda item: item[1][1])
    places: list[float] = []
    for _, (_, y, _) in ordered:
        wanted = min(max((y - low) / (high - low), 0.0), 1.0)
        places.append(max([wanted, *(places[-1:] and [places[-1] + apart])]))
    for number in reversed(range(len(places))):
        places[number] = min(places[number], 1.0 - apart * (len(places) - 1 - number))
    edge = max(float(panel_curve.x[-1]) for panel_curve in panel.curves if len(panel_curve.x))
    texts = _short(list(last), characters)
    return [
        EndLabel(texts[name], drawn, x, y, edge, low + place * (high - low))
        for (name, (x, y, drawn)), place in zip(ordered, places, strict=True)
    ]


def _short(names: Sequence[str], characters: int) -> dict[str, str]:
    words = [name.split() for name in names]
    if len({len(words_of_name) for words_of_name in words}) == 1:
        columns = [column for column in zip(*words, strict=True) if len(set(column)) > 1]
        words = [list(words_of_name) for words_of_name in zip(*columns, strict=True)] if columns else words
    texts = [" ".join(words_of_name).rstrip(",") for words_of_name in words]
    half = characters // 2
    return {
        name: text if len(text) <= characters else f"{text[: half - 1]}…{text[-half:]}" for name, text in zip(names, texts, strict=True)
    }


def legend_marks(marks: Sequence[Mark]) -> list[Mark]:
    """Return a mark of each kind, for a legend."""
    return list({mark.kind: mark for mark in marks}.values())


REPEATS = "Line: mean over the repeats, up to where the shortest ends. Band: minimum to maximum. Thin pale line: a repeat that ran longer."


@dataclass(frozen=True, slots=True)
class Line:
    """A configuration with its repeats, or a run without figures, and how it is drawn."""

    number: int
    label: str
    stroke: Stroke
    part: str  # name of its small multiple
    runs: tuple[Run, ...]
    configuration: Configuration | None
    timed: tuple[Run, ...]  # without CPU contention, drawn over time
    repeated: bool = False  # whether some line of the picture has repeats

    def named(self, count: int) -> str:
        """Return the label, with the number of drawn runs if some line of the picture has repeats."""
        return f"{self.label} (n={count})" if self.repeated else self.label


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines, the contended runs, and the keys of the axes that colour and dash show."""

    all: tuple[Line, ...]
    skipped: tuple[Run, ...]
    configurations: ConfigurationSet | None
    coloured: str | None = None
    dashed: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the small multiples; one empty name if there are none."""
        return tuple(dict.fromkeys(line.part for line in self.all))

    @property
    def runs(self) -> list[Run]:
        """All runs."""
        return [run for line in self.all for run in line.runs]

    @property
    def repeated(self) -> bool:
        """Whether a line represents several runs."""
        return any(len(line.runs) > 1 for line in self.all)

    @property
    def note(self) -> str:
        """The note on repeats and CPU contention; may be empty."""
        return " ".join(filter(None, [REPEATS if self.repeated else "", self.contention_note]))

    @property
    def contention_note(self) -> str:
        """The note on runs with CPU contention, or with unknown contention; may be empty."""
        unjudged = [run.name for line in self.all for run in line.runs if run.has_summary and not contention_judged(run.summary)]
        names = some_of([run.name for run in self.skipped])
        every = len(self.skipped) == len(self.runs)
        void = f"Not drawn over time, because of CPU contention from other programs: {names}."
        void = "All runs had CPU contention from other programs: their speeds and times are not their own." if every else void
        unknown = f"CPU contention was not measured (run under 2 s, or no samples): {some_of(unjudged)}."
        return " ".join([*([void] if self.skipped else []), *([unknown] if unjudged else [])])


def make_lines(runs: Sequence[Run]) -> Lines:
    """Return the lines for labelled runs; without any uncontended run, all are drawn over time."""
    ended = [run for run in runs if run.has_summary]
    unfinished = [run for run in runs if not run.has_summary]
    configs = configuration_set(ended) if ended else None
    if configs is None:
        return Lines(tuple(Line(number, run.name, stroke(number), "", (run,), None, (run,)) for number, run in enumerate(runs)), (), None)
    coloured, dashed, looks = _looks(configs)
    ordered = [(config, looks[config.index]) for config in configs.in_order]
    every = sum(len(config.runs) for config in configs.all)
    contended = {id(run) for run in configs.contended_runs} if len(configs.contended_runs) < every else set()
    timed = [tuple(run for run in config.runs if id(run) not in contended) for config, _ in ordered]
    repeated = bool(configs.axes) and any(len(config.runs) > 1 for config in configs.all)
    labels = [config.label if configs.axes else config.row.label for config, _ in ordered] if len(runs) > 1 else [runs[0].name]
    lines = [
        Line(number, labels[number], drawn, part, config.runs, config, timed[number], repeated)
        for number, (config, (drawn, part)) in enumerate(ordered)
    ]
    used = len(set(looks))
    part = "" if {line.part for line in lines} == {""} else "without figures"
    lines += [
        Line(len(lines) + place, run.name, Stroke(used + place, used + place), part, (run,), None, (run,))
        for place, run in enumerate(unfinished)
    ]
    return Lines(tuple(lines), configs.contended_runs, configs, coloured, dashed)


def _looks(configs: ConfigurationSet) -> tuple[str | None, str | None, list[tuple[Stroke, str]]]:
    """Return the axes of colour and dash, and each configuration's stroke and small multiple."""
    # Colour shows the first axis with a colour for each value (numbers have pictures of their own), dash the next, small multiples the
    # others. If two would look equal, or without axes, configurations are numbered, as many to a picture as there are colours.
    ordered = sorted(configs.axes, key=lambda axis: are_numbers(configs.sorted_values(axis)))
    coloured = next((axis for axis in ordered if len(configs.sorted_values(axis)) <= len(COLOURS)), None)
    dashed = next((axis for axis in ordered if axis is not coloured and len(configs.sorted_values(axis)) <= len(DASHES)), None)
    rest = [axis for axis in configs.axes if axis is not coloured and axis is not dashed]
    numbers = {axis.key: {value: place for place, value in enumerate(configs.sorted_values(axis))} for axis in (coloured, dashed) if axis}
    looks = [
        (
            Stroke(*(0 if axis is None else numbers[axis.key][config.values[axis.key]] for axis in (coloured, dashed))),
            values_label(rest, config.values) if rest else "",
        )
        for config in configs.all
    ]
    if coloured is not None and len(set(looks)) == len(looks):
        return coloured.key, None if dashed is None else dashed.key, looks
    size, count = len(COLOURS), len(configs.all)
    parts = [f"{first + 1} to {min(first + size, count)} of {count}" for first in range(0, count, size)]
    return None, None, [(stroke(index % size), parts[index // size] if count > size else "") for index in range(count)]


def are_numbers(values: Sequence[Any]) -> bool:
    """Return whether all values of an axis are numbers."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
