"""Charts as Plotly JSON: traces and layouts, with arrays as packed float32."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.console import shown
from ..runs.series_arrays import Floats
from .figure import (
    INK,
    Band,
    Bars,
    Curve,
    Dots,
    EndLabel,
    Panel,
    Picture,
    Stroke,
    colour,
    dash,
    end_labels,
    marker,
)

_GRID = "rgba(128,128,128,0.25)"
_PANEL_PIXELS, _SMALL_PIXELS, _STRIP_PIXELS, _BAR_PIXELS, _DOTS_PIXELS, _FRAME_PIXELS = 270, 210, 150, 46, 36, 70
_SMALL_FROM = 4  # panels of one picture
_LABEL_PIXELS = 7  # of a character next to a plot
_END_LABEL_PIXELS, _END_LABEL_WIDTH, _END_LABEL_CHARACTERS, _AXIS_PIXELS = 12, 6, 18, 55  # of a name at a line's end; around a plot
_MAX_MARKERS = 8  # along a line
_FEW_COUNTS = 10
_GAP = 0.09  # of the height, between the strips of a stack
_ROW_LABEL = {"x": 0, "xref": "paper", "yref": "y", "xanchor": "left", "showarrow": False}
_PATTERNS = ("", "/", ".", "x")
_EXACT = 1 << 24  # whole numbers up to here are exact in float32
_UNITS = {
    "": {},
    "s": {},
    "%": {"ticksuffix": " %"},
    "B": {"tickformat": "~s", "ticksuffix": "B"},
    "B/s": {"tickformat": "~s", "ticksuffix": "B/s"},
}


def plots(picture: Picture) -> list[dict[str, Any]]:
    """Return a picture's plots (``id``, ``title``, ``data``, ``layout``); a stack is one plot."""
    if picture.stacked:
        drawn = [_stack(picture, [panel for panel in picture.panels if isinstance(panel, Panel)])]
    else:
        pixels = _SMALL_PIXELS if len(picture.panels) >= _SMALL_FROM or picture.place == "first" else _PANEL_PIXELS
        dots = [_dots(panel) for panel in picture.panels if isinstance(panel, Dots)]
        pixels = max([pixels, *(plot["layout"]["height"] for plot in dots)])
        drawn = [
            _bars(panel) if isinstance(panel, Bars) else _dots(panel) if isinstance(panel, Dots) else _panel(panel, pixels)
            for panel in picture.panels
        ]
    return [{"id": f"plot-{picture.name}-{number}", **plot} for number, plot in enumerate(drawn)]


def packed(values: Floats) -> dict[str, str]:
    """Return an array as base64 of float32, or float64 if float32 would merge steps."""
    kind = "f8" if np.nanmax(np.abs(values), initial=0.0) > _EXACT else "f4"
    return {"dtype": kind, "bdata": base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()}


def _panel(panel: Panel, pixels: int) -> dict[str, Any]:
    labels = end_labels(panel, _END_LABEL_PIXELS / (pixels - _AXIS_PIXELS), _END_LABEL_CHARACTERS)
    right_margin = 10 if panel.level is None or labels else _LABEL_PIXELS * len(panel.level[1]) + 10
    right_margin += max((_END_LABEL_WIDTH * len(label.text) for label in labels), default=0)
    layout = {
        "height": pixels,
        "margin": {"l": 60, "r": right_margin, "t": 10, "b": 45},
        "xaxis": {**_axis(panel.x_title), **_places(panel)},
        "yaxis": _height(panel),
        **_level(panel, at_left=bool(labels)),
    }
    data = [*map(_band, panel.bands), *(_trace(drawn, panel) for drawn in panel.curves), *map(_end_label, labels)]
    return {"title": panel.title, "data": data, "layout": layout}


def _places(panel: Panel) -> dict[str, Any]:
    places: dict[str, Any] = {"type": "log"} if panel.logarithmic else {}
    if panel.ticks:
        return {**places, "tickvals": list(panel.ticks), "ticktext": [f"{tick:,.6g}" for tick in panel.ticks]}
    if panel.counts:
        largest = max((float(drawn.x[-1]) for drawn in panel.curves if len(drawn.x)), default=0.0)
        places |= {"tickformat": ",d", **({"dtick": 1} if largest <= _FEW_COUNTS else {})}
    return places


def _dots(panel: Dots) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    notes = []
    for place, row in enumerate(panel.rows):
        notes.append({**_ROW_LABEL, "y": place - 0.12, "text": _text(row), "yanchor": "bottom"})
        if not panel.values[place]:
            notes.append({**_ROW_LABEL, "y": place + 0.2, "text": _text(panel.missing[place]), "yanchor": "middle"})
            continue
        paint, mean, interval = colour(panel.strokes[place].colour), panel.means[place], panel.intervals[place]
        common = {"type": "scatter", "mode": "markers", "meta": {"line": panel.lines[place], "kind": "dots"}, "name": _text(row)}
        hover = {"hovertemplate": f"%{{x:.4~g}}<extra>{_text(row)}</extra>"}
        if mean is not None and interval is not None:
            ends = {"array": [interval[1] - mean], "arrayminus": [mean - interval[0]]}
            bar = {"error_x": {"type": "data", "symmetric": False, **ends, "color": paint, "thickness": 3, "width": 6}}
            tick = {"color": paint, "symbol": "line-ns-open", "size": 12}
            data.append({**common, "x": [mean], "y": [place + 0.2], **bar, **hover, "marker": tick})
        dot = {"color": paint, "size": 8, "opacity": 0.75}
        data.append({**common, "x": list(panel.values[place]), "y": [place + 0.2] * len(panel.values[place]), **hover, "marker": dot})
    return {"title": panel.title, "data": data, "layout": _rows_layout(panel, notes, _DOTS_PIXELS, len(panel.rows) - 0.4)}


def _rows_layout(panel: Bars | Dots, notes: list[dict[str, Any]], row_pixels: int, bottom: float) -> dict[str, Any]:
    return {
        "height": row_pixels * len(panel.rows) + _FRAME_PIXELS,
        "margin": {"l": 10, "r": 15, "t": 5, "b": 45},
        "xaxis": {**_axis(panel.x_title), "rangemode": "tozero"},
        "yaxis": {"visible": False, "range": [bottom, -0.8], "fixedrange": True},
        "annotations": notes,
    }


def _pale(drawn_as: Stroke, opacity: float) -> str:
    red, green, blue = (int(colour(drawn_as.colour)[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _band(drawn: Band) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": packed(np.concatenate([drawn.x, drawn.x[::-1]])),
        "y": packed(np.concatenate([drawn.high, drawn.low[::-1]])),
        "fill": "toself",
        "fillcolor": _pale(drawn.stroke, 0.2),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "meta": {"line": drawn.line, "kind": "band"},
    }


def _stack(picture: Picture, panels: Sequence[Panel]) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "height": _STRIP_PIXELS * len(panels) + _FRAME_PIXELS,
        "margin": {"l": 75, "r": 10, "t": 25, "b": 45},
        "annotations": [],
    }
    share = (1 + _GAP) / len(panels)
    for number, panel in enumerate(panels):
        name = "" if number == 0 else str(number + 1)
        top = 1 - share * number
        layout[f"yaxis{name}"] = {**_height(panel), "domain": [max(0.0, top - share + _GAP), top], "nticks": 4}
        title = {"text": _text(f"{panel.title}, {panel.y_title}"), "x": 0, "y": top, "xref": "paper", "yref": "paper"}
        layout["annotations"].append({**title, "xanchor": "left", "yanchor": "bottom", "showarrow": False})
        layout[f"yaxis{name}"].pop("title")
        data += [{**_trace(drawn, panel), "yaxis": f"y{name}"} for drawn in panel.curves]
    last = "" if len(panels) == 1 else str(len(panels))
    layout["xaxis"] = {**_axis(panels[-1].x_title), "anchor": f"y{last}", "range": list(picture.x_range or ()) or None}
    layout["shapes"] = [
        {**_straight((mark.x, mark.x), (0, 1), mark.colour, _dashed(mark.dash)), "xref": "x", "yref": "paper", "layer": "below"}
        for mark in picture.marks
    ]
    return {"title": picture.title, "data": data, "layout": layout}


def _bars(panel: Bars) -> dict[str, Any]:
    places = list(range(len(panel.rows)))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": segment.name,
            "x": packed(segment.values),
            "y": places,
            "width": 0.45,
            "marker": {
                "color": segment.colour,
                "line": {"width": 0},
                "pattern": {"shape": _PATTERNS[number % len(_PATTERNS)], "fillmode": "overlay", "fgcolor": "#ffffff", "size": 7},
            },
            "hovertemplate": f"%{{x:.3~g}}{'' if panel.unit == '%' else ' '}{panel.unit}<extra>{segment.name}</extra>",
        }
        for number, segment in enumerate(panel.segments)
    ]
    missing = np.isnan(np.array([segment.values for segment in panel.segments])).all(axis=0)
    notes = [{**_ROW_LABEL, "y": place - 0.22, "text": _text(row), "yanchor": "bottom"} for place, row in enumerate(panel.rows)]
    for place in np.flatnonzero(missing).tolist():
        notes.append({**_ROW_LABEL, "y": place, "text": _text(panel.missing[place]), "yanchor": "middle"})
    layout = {**_rows_layout(panel, notes, _BAR_PIXELS, len(panel.rows) - 0.5), "barmode": "stack"}
    if panel.unit == "%":
        layout["xaxis"]["range"] = [0, 100]
    return {"title": panel.title, "data": data, "layout": layout}


def _axis(title: str) -> dict[str, Any]:
    return {
        "title": {"text": _text(title), "standoff": 8},
        "gridcolor": _GRID,
        "zerolinecolor": _GRID,
        "linecolor": INK,
        "automargin": True,
    }


def _height(panel: Panel) -> dict[str, Any]:
    axis = {**_axis(panel.y_title), **_UNITS[panel.unit]}
    if panel.top is not None:
        axis["range"] = [0, panel.top]
    elif panel.from_zero:
        axis["rangemode"] = "tozero"
    return axis


def _level(panel: Panel, *, at_left: bool) -> dict[str, Any]:
    if panel.level is None:
        return {}
    height, name = panel.level
    line = {**_straight((0, 1), (height, height), INK, "dash"), "xref": "paper"}
    x, anchor = (0.01, "bottom") if at_left else (1.01, "middle")  # the lines' names, if any, are on the right
    text = {"text": _text(name), "xref": "paper", "x": x, "y": height, "xanchor": "left", "yanchor": anchor, "showarrow": False}
    return {"shapes": [line], "annotations": [text]}


def _straight(x: tuple[float, float], y: tuple[float, float], paint: str, dashes: str) -> dict[str, Any]:
    line = {"color": paint, "width": 1, "dash": dashes}
    return {"type": "line", "x0": x[0], "x1": x[1], "y0": y[0], "y1": y[1], "line": line}


def _trace(drawn: Curve, panel: Panel) -> dict[str, Any]:
    paint = colour(drawn.stroke.colour)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": {"points": "lines+markers", "crosses": "markers"}.get(drawn.kind, "lines"),
        "name": _text(drawn.name),
        "x": packed(drawn.x),
        "y": packed(drawn.y),
        "meta": {"line": drawn.line, "kind": drawn.kind},
        "line": {"color": paint, "width": 2, "dash": _dashed(dash(drawn.stroke.dash))},
        "hovertemplate": f"{_text(panel.y_title)} %{{y}}<br>{_text(panel.x_title)} %{{x:,~r}}<extra>{_text(drawn.name)}</extra>",
    }
    if drawn.kind == "faint":
        trace |= {"line": {"color": paint, "width": 1}, "opacity": 0.3, "hoverinfo": "skip", "hovertemplate": None}
    if drawn.kind == "line" and drawn.stroke.colour >= 0 and len({other_curve.name for other_curve in panel.curves}) > 1:
        trace["mode"] = "lines+markers"
        trace["marker"] = {"color": paint, "size": 6, "symbol": marker(drawn.stroke), "maxdisplayed": _MAX_MARKERS}
    if drawn.kind in ("points", "crosses"):
        trace["marker"] = {
            "color": paint,
            "size": 6 if drawn.kind == "points" else 8,
            "symbol": "x" if drawn.kind == "crosses" else marker(drawn.stroke),
        }
    return trace


def _end_label(label: EndLabel) -> dict[str, Any]:
    paint = colour(label.curve.stroke.colour)
    return {
        "type": "scatter",
        "mode": "lines+text",
        "name": _text(label.curve.name),
        "x": packed(np.array([label.x, label.x_label])),
        "y": packed(np.array([label.y, label.y_label])),
        "text": ["", f"\u2002{_text(label.text)}"],
        "textposition": "middle right",
        "textfont": {"color": paint, "size": 10},
        "line": {"color": _pale(label.curve.stroke, 0.35), "width": 1, "dash": "dot"},
        "cliponaxis": False,
        "hoverinfo": "skip",
        "meta": {"line": label.curve.line, "kind": "label"},
    }


def _dashed(lengths: Sequence[float]) -> str:
    return ",".join(f"{length:g}px" for length in lengths) or "solid"


def _text(text: str) -> str:
    return shown(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "%\u200b{")
