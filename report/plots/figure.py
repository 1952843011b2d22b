"""What a chart consists of (panels, curves, bars, marks), whoever draws it: Plotly in the report's page, or matplotlib into a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..series.arrays import Floats
from ..series.downsample import POINTS, thinned

__all__ = [
    "COLOURS",
    "DASHES",
    "INK",
    "MARKERS",
    "NEUTRAL",
    "Band",
    "Bars",
    "Curve",
    "Dots",
    "EndLabel",
    "Kind",
    "Mark",
    "Panel",
    "Picture",
    "Place",
    "Segment",
    "Stroke",
    "Unit",
    "band",
    "colour",
    "curve",
    "dash",
    "end_labels",
    "keys",
    "kinds",
    "marker",
    "stroke",
]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, which the colour-blind can tell apart, without yellow and black: those vanish on white or on black."""

INK = "#808080"
"""For what is no run's and no node's; seen on white and on black."""

DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (2, 2), (6, 2, 2, 2), (10, 3))
"""Lengths in points of line and gap; the first is a whole line. Five dashes and six colours give thirty different curves."""

MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon")
"""Shapes of points, each filled and open: colour alone tells some eyes and printers nothing, and dashes are hard to tell apart."""

Kind = Literal["line", "faint", "points", "crosses"]
Unit = Literal["", "B", "B/s", "%", "s"]


Place = Literal["first", "plots", "more", "run"]
"""Where a page has a picture: on the first screen, among the plots, behind a click, or in the section of its run."""


def colour(number: int) -> str:
    """Return the n-th colour; `INK` for what is no run's, a number below 0."""
    return INK if number < 0 else COLOURS[number % len(COLOURS)]


def dash(number: int) -> tuple[float, ...]:
    """Return the n-th dash, for eyes and printers that know no colours."""
    return DASHES[number % len(DASHES)]


@dataclass(frozen=True, slots=True)
class Stroke:
    """How a curve is drawn: the numbers of its colour and of its dash."""

    colour: int
    dash: int


def marker(drawn: Stroke) -> str:
    """Return the shape of a curve's points, ``-open`` where it is not filled.

    Two colours of five dashes, five of two, and the first ten of `stroke` have ten different ones.
    """
    number = (drawn.colour + 5 * drawn.dash) % (2 * len(MARKERS))
    return MARKERS[number % len(MARKERS)] + ("-open" if number >= len(MARKERS) else "")


NEUTRAL = Stroke(-1, 2)
"""Of a line that is no run's, such as the ideal one."""


def stroke(number: int) -> Stroke:
    """Return how the n-th of several is drawn that differ in nothing else: neighbours in both, thirty of them from one another."""
    return Stroke(number % len(COLOURS), 3 * number % len(DASHES))


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points [n]; NaN in `y` is a gap. `line` is the number of the line in the key that it is shown and hidden with.

    `kind` is ``line``, ``faint`` (the raw figures behind a smoothed line), ``points`` (a line with its points) or ``crosses`` (points
    that stand for figures that are none).
    """

    name: str
    stroke: Stroke
    x: Floats
    y: Floats
    line: int
    kind: Kind = "line"


@dataclass(frozen=True, slots=True)
class Band:
    """What lies between two heights [n] over `x`, pale, in the colour of its line: all finite, at least two points."""

    stroke: Stroke
    x: Floats
    low: Floats
    high: Floats
    line: int


@dataclass(frozen=True, slots=True)
class Mark:
    """An upright line through all panels at `x`, because something happened; marks of one `kind` are drawn alike."""

    kind: str
    x: float
    colour: str
    dash: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. `unit` is that of `y`; `top` is where the axis ends, where several panels are to be compared.

    `level` is a dashed line across, at a height and with a name. `counts` says that `x` counts something, and has no halves;
    `logarithmic` that equal ratios of `x` are equally far apart; `ticks` are where its axis has figures, where there are any.
    """

    title: str
    x_title: str
    y_title: str
    curves: tuple[Curve, ...]
    unit: Unit = ""
    from_zero: bool = False
    top: float | None = None
    level: tuple[float, str] | None = None
    bands: tuple[Band, ...] = ()
    counts: bool = False
    logarithmic: bool = False
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of each bar [rows]; NaN where it is not known."""

    name: str
    values: Floats
    colour: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Stacked bars that lie on their side, a row a bar. A row without figures says what `missing` has for it."""

    title: str
    x_title: str
    rows: tuple[str, ...]
    segments: tuple[Segment, ...]
    unit: Unit
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dots:
    """A row a set-up, the first on top: a dot for each of its `values`, and the interval of their mean as a bar.

    `means` and `intervals` are None where there is none; a row without values says what `missing` has for it.
    """

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
    """Panels that belong together. `name` is that of its file; `words` says what there is to see, for those who cannot.

    `stacked`: the panels stand one over another on one axis of `x`, which is `x_range`, and the `marks` go through all of them. `run` is
    the number of the run that the picture is of, None where all are in it.
    """

    name: str
    title: str
    note: str
    words: str
    panels: tuple[Panel | Bars | Dots, ...]
    stacked: bool = False
    marks: tuple[Mark, ...] = ()
    x_range: tuple[float, float] | None = None
    run: int | None = None
    place: Place = "plots"


def curve(name: str, drawn_as: Stroke, x: Floats, y: Floats, line: int, kind: Kind = "line", points: int = POINTS) -> Curve:
    """Return the curve through so many of the points [n] as can be seen; a figure that is not finite becomes a gap."""
    picked = thinned(y, points)
    heights = np.asarray(y[picked], np.float64)
    return Curve(name, drawn_as, np.asarray(x[picked], np.float64), np.where(np.isfinite(heights), heights, np.nan), line, kind)


def band(drawn_as: Stroke, x: Floats, low: Floats, high: Floats, line: int) -> Band | None:
    """Return the band between two curves [n] where both are finite; None where that leaves nothing to be seen."""
    known = np.isfinite(low) & np.isfinite(high)
    if np.count_nonzero(known) < 2 or not np.any(high[known] > low[known]):
        return None
    return Band(drawn_as, x[known], low[known], high[known], line)


def keys(picture: Picture) -> list[Curve]:
    """Return a curve for each name in a picture, for a key: one with points where some of that name have them."""
    found: dict[str, Curve] = {}
    for panel in picture.panels:
        for drawn in panel.curves if isinstance(panel, Panel) else ():
            if drawn.name not in found or drawn.kind == "points":
                found[drawn.name] = drawn
    return list(found.values())


@dataclass(frozen=True, slots=True)
class EndLabel:
    """A line's name, `text`, beside the right edge of its panel: from its end at `x` and `y` to the edge at `x_label` and `y_label`."""

    text: str
    curve: Curve
    x: float
    y: float
    x_label: float
    y_label: float


def end_labels(panel: Panel, apart: float, characters: int) -> list[EndLabel]:
    """Return the names of a panel's lines, the lowest first, no two nearer than `apart`, a fraction of its height; none of one line alone.

    Words that all names have in one place are left out, and what is longer than `characters` then is cut in its middle. None where there is
    no room for all.
    """
    last: dict[str, tuple[float, float, Curve]] = {}
    for drawn in panel.curves:
        known = np.flatnonzero(np.isfinite(drawn.y))
        if drawn.kind in ("line", "points") and len(known) and (drawn.name not in last or drawn.x[known[-1]] > last[drawn.name][0]):
            last[drawn.name] = float(drawn.x[known[-1]]), float(drawn.y[known[-1]]), drawn
    if len(last) < 2 or (len(last) - 1) * apart > 1.0:
        return []
    drawn_heights = [each for one in panel.curves if one.kind != "faint" for each in one.y[np.isfinite(one.y)]]
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
    edge = max(float(one.x[-1]) for one in panel.curves if len(one.x))
    texts = _short(list(last), characters)
    return [
        EndLabel(texts[name], drawn, x, y, edge, low + place * (high - low))
        for (name, (x, y, drawn)), place in zip(ordered, places, strict=True)
    ]


def _short(names: Sequence[str], characters: int) -> dict[str, str]:
    """Return short texts for names: without the words that all have in one place, and cut in the middle where they are longer."""
    words = [name.split() for name in names]
    if len({len(each) for each in words}) == 1:
        columns = [column for column in zip(*words, strict=True) if len(set(column)) > 1]
        words = [list(each) for each in zip(*columns, strict=True)] if columns else words
    texts = [" ".join(each).rstrip(",") for each in words]
    half = characters // 2
    return {
        name: text if len(text) <= characters else f"{text[: half - 1]}…{text[-half:]}" for name, text in zip(names, texts, strict=True)
    }


def kinds(marks: Sequence[Mark]) -> list[Mark]:
    """Return the first mark of each kind, for a key."""
    first: dict[str, Mark] = {}
    for mark in marks:
        first.setdefault(mark.kind, mark)
    return list(first.values())
