"""Charts of each node's CPU, memory, network and GPU over time, with events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...records.text import MOST_NODES_SHOWN, bytes_text, number_text, statistic
from ..runs.run import Run
from ..runs.series import BAND_PERCENTILES, ENDS, UNEVEN_NOTE, bands
from ..runs.series_arrays import Floats, NodeSeries
from .figure import COLOURS, INK, Curve, Kind, Mark, Panel, Picture, Unit, curve, stroke

_POINTS = 800
_MOST_MARKS = 40
_FEW_SAMPLES = 40  # up to so many are shown as points: a line through a single one is invisible
_MARGIN = 0.02
_NOTE = (
    "All panels share the axis of time; their heights are the same for every run. "
    "Cores and bytes per second are means between two samples. {source}{thinned}"
)
_SOURCES = {
    "interface": "Network: whole frames at the node's own interface.",
    "sockets": "Network: TCP payload of the node's tasks, as all nodes share one host.",
}
_BAND_POINTS = 400
_BAND_NOTE = (
    f" Of {{:,}} nodes: the median at each moment; pale the {BAND_PERCENTILES[0]}th and {BAND_PERCENTILES[1]}th percentiles, or the lowest "
    f"and the highest node where {UNEVEN_NOTE}."
)
_Figure = Callable[[NodeSeries], Floats]
_MEASURES: tuple[tuple[str, str, Unit, _Figure], ...] = (
    ("CPU", "cores used", "", lambda node: node.cpu_cores_used),
    ("Memory", "resident (RSS)", "B", lambda node: node.memory_rss_bytes),
    ("Sent", "per second", "B/s", lambda node: node.sent_bytes_per_second),
    ("Received", "per second", "B/s", lambda node: node.received_bytes_per_second),
    ("GPU", "utilization", "%", lambda node: 100 * node.gpu_utilization),
)
_FAILURES = ("checkpoint_failed", "attempt_failed", "task_failed", "run_failed", "run_interrupted")
_MARKS: dict[str, tuple[str, tuple[float, ...], tuple[str, ...]]] = {
    "run start and end": (INK, (), ("run_started", "run_ended")),
    "epoch end": (INK, (1, 3), ("epoch_ended",)),
    "evaluation": (COLOURS[5], (4, 2), ()),
    "checkpoint": (COLOURS[4], (6, 2, 1, 2), ("checkpoint_saved",)),
    "resumed": (COLOURS[3], (8, 2), ("run_resumed",)),
    "restarted": (COLOURS[1], (8, 2), ("run_restarted", "task_restarted")),
    "goal reached": (COLOURS[2], (), ("target_reached",)),
    "patience at its end": (COLOURS[2], (2, 2), ("patience_exhausted",)),
    "failure": (COLOURS[1], (), _FAILURES),
}  # colour, dash and events of each kind of mark


def resources(runs: Sequence[Run], nodes: Sequence[Sequence[NodeSeries]]) -> list[Picture]:
    """Return a picture for each run with samples; `nodes` has the samples of each run's nodes."""
    tops = [_top(figure, runs, nodes) for _, _, _, figure in _MEASURES]
    return [_picture(run, own, tops, alone=len(runs) == 1) for run, own in zip(runs, nodes, strict=True) if own]


def _top(figure: _Figure, runs: Sequence[Run], nodes: Sequence[Sequence[NodeSeries]]) -> float | None:
    highest = []
    for run, own in zip(runs, nodes, strict=True):
        first, last = _range(run, own) if own else (0.0, 0.0)
        shown = [figure(node)[(first <= node.time_seconds) & (node.time_seconds <= last)] for node in own]
        if _are_many(own):
            shown = [bands(own, figure, first, last, _BAND_POINTS).high]
        highest += [float(np.nanmax(values)) for values in shown if np.isfinite(values).any()]
    return 1.05 * max(highest) if highest and max(highest) > 0 else None


def _range(run: Run, nodes: Sequence[NodeSeries]) -> tuple[float, float]:
    end = run.run_seconds or max(float(node.time_seconds[-1]) for node in nodes)
    margin = max(_MARGIN * end, 0.1)
    return -margin, end + margin


def _picture(run: Run, nodes: Sequence[NodeSeries], tops: Sequence[float | None], *, alone: bool) -> Picture:
    first, last = _range(run, nodes)
    panels = tuple(
        Panel(title, "wall-clock time (s)", y_title, curves, unit, from_zero=True, top=top)
        for (title, y_title, unit, figure), top in zip(_MEASURES, tops, strict=True)
        if (curves := _curves(run, nodes, figure, first, last))
    )
    marks, thinned = _marks(run)
    sources = sorted({_SOURCES[node.network_source] for node in nodes if node.network_source in _SOURCES})
    return Picture(
        "resources" if alone else f"resources-{run.name}",
        f"What each node used: {run.name}",
        _NOTE.format(source=" ".join(sources), thinned=thinned).strip() + (_BAND_NOTE.format(len(nodes)) if _are_many(nodes) else ""),
        "; ".join(_said(run, nodes)),
        panels,
        stacked=True,
        marks=tuple(mark for mark in marks if first <= mark.x <= last),
        x_range=(first, last),
        run=run.number,
        place="plots" if alone else "run",
    )


def _are_many(nodes: Sequence[NodeSeries]) -> bool:
    return len(nodes) > MOST_NODES_SHOWN


def _band_curves(run: Run, nodes: Sequence[NodeSeries], figure: _Figure, first: float, last: float) -> tuple[Curve, ...]:
    found = bands(nodes, figure, max(first, min(float(node.time_seconds[0]) for node in nodes)), last, _BAND_POINTS)
    if not np.isfinite(found.median).any():
        return ()
    low, high = ("lowest node", "highest node") if found.percentiles == ENDS else (f"{each}th percentile" for each in BAND_PERCENTILES)
    return (
        curve(low, stroke(1), found.time_seconds, found.low, run.number, "faint"),
        curve(high, stroke(2), found.time_seconds, found.high, run.number, "faint"),
        curve(f"median of {len(nodes):,} nodes", stroke(0), found.time_seconds, found.median, run.number),
    )


def _curves(run: Run, nodes: Sequence[NodeSeries], figure: _Figure, start: float, end: float) -> tuple[Curve, ...]:
    if _are_many(nodes):
        return _band_curves(run, nodes, figure, start, end)
    found = []
    for node in nodes:
        shown = node.time_seconds >= start
        values = figure(node)[shown]
        if np.isfinite(values).any():
            kind: Kind = "points" if len(values) <= _FEW_SAMPLES else "line"
            drawn_as = stroke(node.node)
            found.append(curve(f"node {node.node}", drawn_as, node.time_seconds[shown], values, run.number, kind, points=_POINTS))
    return tuple(found)


def _marks(run: Run) -> tuple[list[Mark], str]:
    marks: list[Mark] = []
    said = []
    for kind, (colour, dash, events) in _MARKS.items():
        found = [event.time_seconds for event in run.events if event.event in events]
        if kind == "evaluation":
            found = [record.time_seconds for record in run.evals]
        every = max(1, -(-len(found) // _MOST_MARKS))
        marks += [Mark(kind, seconds, colour, dash) for seconds in found[every - 1 :: every]]
        if every > 1:
            said.append(f" Of kind “{kind}”, each {every}th of {len(found):,} is marked.")
    return marks, "".join(said)


def _said(run: Run, nodes: Sequence[NodeSeries]) -> Iterator[str]:
    names, rows = [f"node {node.node}" for node in nodes], [_used(run, node) for node in nodes]
    if _are_many(nodes):
        names, rows = [f"median of {len(nodes):,} nodes"], [tuple(statistic("median", column) for column in zip(*rows, strict=True))]
    over = "over the training time" if run.has_summary else "on average of its samples"
    for name, (cores, peak, pss, sent, received) in zip(names, rows, strict=True):
        yield (
            f"{name}: {number_text(cores, 2)} cores, RSS at most {bytes_text(peak)}, PSS {bytes_text(pss)} in its largest sample, "
            f"sent {bytes_text(sent, per_second=True)}, received {bytes_text(received, per_second=True)} {over}"
        )


def _used(run: Run, node: NodeSeries) -> tuple[float | None, ...]:
    if run.has_summary and node.node < len(run.summary["per_node"]):
        figures = run.summary["per_node"][node.node]
        cores = figures["cpu_cores_used"] and figures["cpu_cores_used"]["mean"]
        peak = figures["memory_rss_bytes"] and figures["memory_rss_bytes"]["max"]
        pss = (figures.get("memory_pss_bytes") or {}).get("max")
        return cores, peak, pss, figures["network_sent_bytes_per_train_second"], figures["network_received_bytes_per_train_second"]
    rates = (node.sent_bytes_per_second, node.received_bytes_per_second)
    cores, sent, received = (_mean(values, node) for values in (node.cpu_cores_used, *rates))
    return cores, node.memory_peak_bytes, None, sent, received


def _mean(values: Floats, node: NodeSeries) -> float | None:
    known = np.isfinite(values)
    if not known.any():
        return None
    weights = None if node.samples is None else node.samples[known]
    return float(np.average(values[known], weights=weights))
