"""Charts as files, drawn by matplotlib without display, reproducible to the byte."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontEntry, FontProperties, findfont, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator

from ...core.console import note, shown
from ...core.drafts import replacing
from ...core.errors import UsageError
from .figure import INK, Bars, Curve, Dots, Panel, Picture, colour, dash, end_labels, legend_curves, legend_marks, marker

Format = Literal["png", "svg", "pdf"]
FORMATS: tuple[str, ...] = get_args(Format)
_MADE_BY = "crosstrain: trainer plot"  # to recognise earlier figures; without a date, for identical bytes
_METADATA: Mapping[str, Mapping[str, Any]] = {
    "png": {"Software": _MADE_BY},
    "svg": {"Creator": _MADE_BY, "Date": None},
    "pdf": {"Creator": _MADE_BY, "CreationDate": None},
}
_STYLE = {
    "svg.hashsalt": "crosstrain",
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3, and its text cannot be edited
    "ps.fonttype": 42,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_PANEL_INCHES, _STRIP_INCHES, _BAR_INCHES, _DOTS_INCHES = 3.0, 1.4, 0.3, 0.34
_LABEL_CHARACTERS, _LINE_INCHES = 36, 0.16  # a run's usual name and its node take two lines at a bar
_CHARACTER_INCHES, _HANDLE_INCHES = 0.075, 0.7  # of an entry in a key: a wide character, and line and gaps
MIN_WIDTH_INCHES = 2.0
_HATCHES = ("", "//", "..", "xx")
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "triangle-down": "v", "pentagon": "p"}
_MAX_NAME = 100
_MARKER_EVERY = 0.12  # of the diagonal of a panel, along a line
_END_LABEL, _AXIS_POINTS = 7.0, 50.0  # points of a name at a line's end, and of what is above and below the axes of a panel
_BESIDE: dict[str, Any] = {"xytext": (3, 0), "textcoords": "offset points", "annotation_clip": False}


@dataclass(frozen=True, slots=True)
class Look:
    """A figure's width and text size; constants in inches are for 9 points and scale with it."""

    width_inches: float = 9.0
    font_points: float = 9.0

    @property
    def scale(self) -> float:
        """Text size relative to 9 points."""
        return self.font_points / 9.0


def write_figures(pictures: Sequence[Picture], folder: Path, image: Format, look: Look | None = None) -> list[Path]:
    """Write each picture as ``NAME.FORMAT``. Raises UsageError, first, if a file is not ours."""
    paths = [folder / f"{name}.{image}" for name in _file_names(pictures)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            if path.exists() and not (path.is_file() and _MADE_BY.encode() in path.read_bytes()):
                raise UsageError(f"--output: {str(path)!r} was not written by `trainer plot` and stays as it is. Give another folder.")
        unknown = [_write(picture, path, image, look or Look()) for picture, path in zip(pictures, paths, strict=True)]
    except OSError as error:
        raise UsageError(f"--output: {str(folder)!r} cannot hold figures ({error.strerror}). Give another folder.") from error
    if missing := frozenset[str]().union(*unknown):
        note(missing_characters_text(missing))
    return paths


def _file_names(pictures: Sequence[Picture]) -> list[str]:
    names: list[str] = []
    for picture in pictures:
        name = re.sub(r"[^\w.-]+", "_", picture.name)[:_MAX_NAME]
        numbered = chain([name], (f"{name}-{number}" for number in count(2)))
        names.append(next(candidate for candidate in numbered if candidate not in names))
    return names


def _write(picture: Picture, path: Path, image: Format, look: Look) -> frozenset[str]:
    with drawn(picture, look) as (figure, missing), replacing(path) as draft:
        figure.savefig(draft, format=image, dpi=150, metadata=dict(_METADATA[image]))
    return missing


@contextmanager
def drawn(picture: Picture, look: Look | None = None) -> Iterator[tuple[Figure, frozenset[str]]]:
    """Draw a picture; yield the figure, and characters that no font has, in its style."""
    look = look or Look()
    with matplotlib.rc_context({**_STYLE, "font.size": look.font_points}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")  # the caller reports it once for all figures
        figure = _draw(picture, look)
        families = list(matplotlib.rcParams["font.family"])
        missing = missing_characters(figure, families)
        if missing and (fallbacks := families_for(missing)):
            families += fallbacks
            missing = missing_characters(figure, families)
            matplotlib.rcParams["font.family"] = families
            figure = _draw(picture, look)
        yield figure, missing


def _draw(picture: Picture, look: Look) -> Figure:
    bars = [panel for panel in picture.panels if isinstance(panel, Bars)]
    if bars:
        return _bars(picture, bars, look)
    panels = len(picture.panels)
    columns = 1 if picture.stacked else max(1, min(panels, int(look.width_inches / look.scale / 2.8)))
    rows = -(-panels // columns)
    panel_inches = _STRIP_INCHES if picture.stacked else min(_PANEL_INCHES, 0.9 * look.width_inches / look.scale / columns)
    handles = _key(picture, look)
    labels = [str(handle.get_label()) for handle in handles]
    abreast, deep = _abreast(labels, look), max((label.count("\n") + 1 for label in labels), default=1)
    dots = [len(panel.rows) for panel in picture.panels if isinstance(panel, Dots)]
    panel_inches = max([panel_inches, *(0.9 + _DOTS_INCHES * dot_rows for dot_rows in dots)])
    height = rows * panel_inches + (0.8 if picture.stacked else 0.0) + 0.2 * deep * -(-len(handles) // abreast)
    figure = Figure(figsize=(look.width_inches, look.scale * height), layout="constrained")
    figure.suptitle(_plain(picture.title))
    axes = figure.subplots(rows, columns, sharex=picture.stacked, squeeze=False).ravel()
    for place, (axis, panel) in enumerate(zip(axes, picture.panels, strict=False)):
        if isinstance(panel, Panel):
            _panel(axis, panel, picture, last=not picture.stacked or place == panels - 1)
            if not picture.stacked:
                _end_labels(axis, panel, look, panel_inches, look.width_inches / look.scale / columns)
            if not picture.stacked and panels > 2:
                axis.set_title(_plain(panel.title), fontsize=look.font_points)
        elif isinstance(panel, Dots):
            _dots(axis, panel, look)
    for axis in axes[panels:]:
        axis.set_axis_off()
    figure.legend(handles=handles, loc="outside lower center", ncols=abreast, frameon=False)
    return figure


def _abreast(labels: Sequence[str], look: Look) -> int:
    widest = max((_CHARACTER_INCHES * len(line) for label in labels for line in label.splitlines()), default=0.0)
    return max(1, min(3, int(look.width_inches / look.scale / (widest + _HANDLE_INCHES))))


def _panel(axis: Axes, panel: Panel, picture: Picture, *, last: bool) -> None:
    for pale in panel.bands:
        axis.fill_between(pale.x, pale.low, pale.high, color=colour(pale.stroke.colour), alpha=0.2, linewidth=0)
    several = len({drawn.name for drawn in panel.curves}) > 1
    for drawn in panel.curves:
        axis.plot(drawn.x, drawn.y, **_look(drawn, several=several))
    for mark in picture.marks:
        axis.axvline(mark.x, color=mark.colour, linestyle=_pattern(mark.dash), linewidth=0.8, zorder=1)
    if panel.level:
        axis.axhline(panel.level[0], color=INK, linestyle="--", linewidth=1.0)
        where: dict[str, Any] = {"va": "bottom", "xytext": (3, 1)} if several else {"va": "center"}  # the lines' names are on the right
        place = (0 if several else 1, panel.level[0])
        axis.annotate(panel.level[1], place, xycoords=("axes fraction", "data"), color=INK, **{**_BESIDE, **where})
    axis.set_ylabel(f"{panel.title}\n{panel.y_title}" if picture.stacked else panel.y_title)
    if last:
        axis.set_xlabel(panel.x_title)
    if panel.unit in ("B", "B/s"):
        axis.yaxis.set_major_formatter(EngFormatter(unit=panel.unit))
    if panel.from_zero:
        axis.set_ylim(bottom=0, top=panel.top)
    if picture.x_range:
        axis.set_xlim(*picture.x_range)
    _scale_x(axis, panel)


def _scale_x(axis: Axes, panel: Panel) -> None:
    if panel.logarithmic:
        axis.set_xscale("log")
    if panel.ticks:
        axis.set_xticks(panel.ticks, [f"{tick:,.6g}" for tick in panel.ticks], minor=False)
        axis.xaxis.set_minor_locator(NullLocator())
    elif panel.counts:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _end_labels(axis: Axes, panel: Panel, look: Look, height_inches: float, width_inches: float) -> None:
    apart = 1.2 * _END_LABEL / (72.0 * height_inches - _AXIS_POINTS)
    for label in end_labels(panel, apart, int(0.3 * width_inches / _CHARACTER_INCHES)):
        paint = colour(label.curve.stroke.colour)
        axis.plot([label.x, label.x_label], [label.y, label.y_label], color=paint, linewidth=0.5, linestyle=":", alpha=0.4, zorder=1.2)
        size = _END_LABEL * look.scale
        axis.annotate(_plain(label.text), (label.x_label, label.y_label), color=paint, fontsize=size, va="center", **_BESIDE)


def _dots(axis: Axes, panel: Dots, look: Look) -> None:
    for place, (values, mean, interval) in enumerate(zip(panel.values, panel.means, panel.intervals, strict=True)):
        paint = colour(panel.strokes[place].colour)
        if mean is not None and interval is not None:
            axis.plot(interval, [place, place], color=paint, linewidth=2.5, alpha=0.6, solid_capstyle="butt")
            axis.plot([mean], [place], color=paint, marker="|", markersize=11, linestyle="none")
        axis.plot(values, [place] * len(values), color=paint, marker="o", markersize=4, alpha=0.75, linestyle="none")
    _rows(axis, panel, [place for place, values in enumerate(panel.values) if not values], look)
    axis.set_ylim(len(panel.rows) - 0.5, -0.5)
    axis.set_xlim(left=0)


def _rows(axis: Axes, panel: Dots | Bars, missing: Iterable[int], look: Look) -> None:
    for place in missing:
        axis.annotate(panel.missing[place], (0, place), xytext=(4, 0), textcoords="offset points", va="center", color=INK)
    axis.set_yticks(range(len(panel.rows)), [_plain(_wrapped(row, look)) for row in panel.rows])
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(panel.x_title)
    axis.set_title(_plain(panel.title), loc="left", fontsize=look.font_points)


def _look(drawn: Curve, *, several: bool) -> dict[str, Any]:
    paint = colour(drawn.stroke.colour)
    if drawn.kind == "faint":
        return {"color": paint, "linewidth": 0.7, "alpha": 0.25, "zorder": 1.5}
    if drawn.kind == "crosses":
        return {"color": paint, "linestyle": "none", "marker": "x", "markersize": 5}
    return {"color": paint, "linewidth": 1.6, "linestyle": _pattern(dash(drawn.stroke.dash)), **_points(drawn, several=several)}


def _points(drawn: Curve, *, several: bool) -> dict[str, Any]:
    if drawn.kind != "points" and not (drawn.kind == "line" and several and drawn.stroke.colour >= 0):
        return {}
    shape = marker(drawn.stroke)
    style: dict[str, Any] = {"marker": _MARKERS[shape.removesuffix("-open")], "markersize": 4.0}
    if shape.endswith("-open"):
        style["markerfacecolor"] = "white"
    return style if drawn.kind == "points" else {**style, "markevery": (_MARKER_EVERY * (drawn.line % 5) / 5, _MARKER_EVERY)}


def _pattern(lengths: Sequence[float]) -> Any:
    return (0, tuple(lengths)) if lengths else "-"


def _key(picture: Picture, look: Look) -> list[Line2D]:
    curves = legend_curves(picture)
    longest_line = max(8, int((look.width_inches / look.scale - _HANDLE_INCHES) / _CHARACTER_INCHES))
    lines = [
        Line2D(
            [],
            [],
            label=_plain(textwrap.fill(drawn.name, longest_line)),
            color=colour(drawn.stroke.colour),
            linestyle=_pattern(dash(drawn.stroke.dash)),
            linewidth=1.6,
            **{**_points(drawn, several=len(curves) > 1), "markevery": None},
        )
        for drawn in curves
    ]
    marks = legend_marks(picture.marks)
    return lines + [Line2D([], [], color=mark.colour, linestyle=_pattern(mark.dash), linewidth=0.8, label=mark.kind) for mark in marks]


def _plain(name: str) -> str:
    """Escape a name: matplotlib hides labels with a leading underscore; $ is mathematics."""
    escaped = shown(name).replace("$", r"\$")
    return f"\u200b{escaped}" if escaped.startswith("_") else escaped


def _bars(picture: Picture, panels: Sequence[Bars], look: Look) -> Figure:
    lines = [max((_wrapped(row, look).count("\n") for row in panel.rows), default=0) for panel in panels]
    heights = [1.2 + len(panel.rows) * (_BAR_INCHES + _LINE_INCHES * more) for panel, more in zip(panels, lines, strict=True)]
    figure = Figure(figsize=(look.width_inches, look.scale * (sum(heights) + 0.4)), layout="constrained")
    figure.suptitle(_plain(picture.title))
    parts = figure.subfigures(len(panels), 1, squeeze=False, height_ratios=heights).ravel()
    for part, panel in zip(parts, panels, strict=True):
        _bar_panel(part, panel, look)
    return figure


def _wrapped(label: str, look: Look) -> str:
    most = int(0.4 * look.width_inches / look.scale / _CHARACTER_INCHES)  # leaves most of the width to the bars
    return textwrap.fill(re.sub(r" (?=[^()]*\))", "\u00a0", label), max(8, min(_LABEL_CHARACTERS, most)))


def _bar_panel(part: SubFigure, panel: Bars, look: Look) -> None:
    axis = part.subplots()
    places = np.arange(len(panel.rows))
    left = np.zeros(len(panel.rows))
    for number, segment in enumerate(panel.segments):
        widths = np.nan_to_num(segment.values)
        axis.barh(places, widths, left=left, color=segment.colour, hatch=_HATCHES[number % len(_HATCHES)], edgecolor="white", height=0.7)
        left += widths
    missing = np.isnan(np.array([segment.values for segment in panel.segments])).all(axis=0)
    _rows(axis, panel, np.flatnonzero(missing).tolist(), look)
    axis.invert_yaxis()
    axis.set_xlim(0, 100 if panel.unit == "%" else None)
    axis.xaxis.set_major_locator(MaxNLocator(max(2, min(8, int(look.width_inches / look.scale)))))
    handles = [
        Patch(facecolor=segment.colour, hatch=_HATCHES[number % len(_HATCHES)], edgecolor="white", label=segment.name)
        for number, segment in enumerate(panel.segments)
    ]
    abreast = min(len(handles), 2 * _abreast([segment.name for segment in panel.segments], look))
    part.legend(handles=handles, loc="outside lower center", ncols=abreast, frameon=False, fontsize=8 * look.scale)


_LIKED = ("noto sans cjk", "noto sans", "source han sans", "wenquanyi", "droid sans fallback", "dejavu")
# Matplotlib's fonts that have a box for every character, or mathematical symbols in place of others.
_NOT_FOR_NAMES = ("last resort", "stixnon", "stixsize", "cmb10", "cmex10", "cmmi10", "cmr10", "cmss10", "cmsy10", "cmtt10")
_SHOWN = 12


def missing_characters(figure: Figure, families: Collection[str]) -> frozenset[str]:
    """Return the visible characters of a figure that none of the font `families` has."""
    used = {character for text in figure.findobj(Text) for character in text.get_text() if not character.isspace()}
    known = frozenset[int]().union(*(_characters(findfont(FontProperties(family=[family]))) for family in families))
    return frozenset(character for character in used if ord(character) not in known)


def families_for(characters: Collection[str]) -> list[str]:
    """Return installed font families that together have as many of the characters as possible."""
    missing = {ord(character) for character in characters}
    chosen = []
    for font in _candidates():
        if not missing:
            break
        covered = missing & _characters(font.fname)
        if covered:
            chosen.append(font.name)
            missing -= covered
    return chosen


def missing_characters_text(characters: Collection[str]) -> str:
    """Return the note on missing characters, with the fix."""
    some = "".join(sorted(characters)[:_SHOWN])
    more = f"… ({len(characters)} characters)" if len(characters) > _SHOWN else ""
    return f"no installed font has {some}{more}: boxes stand for them; install one that does, such as Noto Sans CJK (fonts-noto-cjk)"


def _candidates() -> Iterator[FontEntry]:
    usual = [font for font in fontManager.ttflist if font.style == "normal" and font.weight in (400, "normal", "regular")]

    def rank(font: FontEntry) -> tuple[int, str]:
        name = font.name.lower()
        return next((place for place, liked in enumerate(_LIKED) if name.startswith(liked)), len(_LIKED)), name

    return (font for font in sorted(usual, key=rank) if not font.name.lower().startswith(_NOT_FOR_NAMES))


@cache
def _characters(path: str) -> frozenset[int]:
    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):  # FreeType raises RuntimeError for a font that it cannot scale
        return frozenset()
