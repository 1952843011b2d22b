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
    "Bars",
    "Curve",
    "Kind",
    "Mark",
    "Panel",
    "Picture",
    "Segment",
    "Unit",
    "colour",
    "curve",
    "dash",
    "kinds",
]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, which the colour-blind can tell apart, without yellow and black: those vanish on white or on black."""

INK = "#808080"
"""For what is no run's and no node's; seen on white and on black."""

DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (2, 2), (6, 2, 2, 2), (10, 3))
"""Lengths in points of line and gap; the first is a whole line. Five dashes and six colours give thirty different curves."""

Kind = Literal["line", "faint", "points", "crosses"]
Unit = Literal["", "B", "B/s", "%", "s"]


def colour(number: int) -> str:
    """Return the colour of the n-th run or node."""
    return COLOURS[number % len(COLOURS)]


def dash(number: int) -> tuple[float, ...]:
    """Return the dash of the n-th run or node: neighbours differ in it as in colour, for eyes and printers that know no colours."""
    return DASHES[number % len(DASHES)]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points [n]; NaN in `y` is a gap. `number` tells runs (or nodes) apart, `run` is the run that it belongs to.

    `kind` is ``line``, ``faint`` (the raw figures behind a smoothed line), ``points`` (a line with its points) or ``crosses`` (points
    that stand for figures that are none).
    """

    name: str
    number: int
    x: Floats
    y: Floats
    run: int
    kind: Kind = "line"


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

    `level` is a dashed line across, at a height and with a name.
    """

    title: str
    x_title: str
    y_title: str
    curves: tuple[Curve, ...]
    unit: Unit = ""
    from_zero: bool = False
    top: float | None = None
    level: tuple[float, str] | None = None


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
class Picture:
    """Panels that belong together. `name` is that of its file; `words` says what there is to see, for those who cannot.

    `stacked`: the panels stand one over another on one axis of `x`, which is `x_range`, and the `marks` go through all of them. `run` is
    the number of the run that the picture is of, None where all are in it.
    """

    name: str
    title: str
    note: str
    words: str
    panels: tuple[Panel | Bars, ...]
    stacked: bool = False
    marks: tuple[Mark, ...] = ()
    x_range: tuple[float, float] | None = None
    run: int | None = None


def curve(name: str, number: int, x: Floats, y: Floats, run: int, kind: Kind = "line", points: int = POINTS) -> Curve:
    """Return the curve through so many of the points [n] as can be seen; a figure that is not finite becomes a gap."""
    picked = thinned(y, points)
    heights = np.asarray(y[picked], np.float64)
    return Curve(name, number, np.asarray(x[picked], np.float64), np.where(np.isfinite(heights), heights, np.nan), run, kind)


def kinds(marks: Sequence[Mark]) -> list[Mark]:
    """Return the first mark of each kind, for a key."""
    first: dict[str, Mark] = {}
    for mark in marks:
        first.setdefault(mark.kind, mark)
    return list(first.values())
