"""Charts of what each node used over time, and of where a run's time went."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...records.text import MAX_NODES_SHOWN, bytes_text, duration_text, ends_of, number_text, statistic
from ..analysis.evidence import PAUSE_COMPONENTS, calibrated_segment, idle_fraction
from ..runs.run import Run
from ..runs.series import BAND_PERCENTILES, ENDS, UNEVEN_NOTE, bands
from ..runs.series_arrays import Floats, NodeSeries
from .figure import COLOURS, INK, Bars, Curve, Kind, Line, Lines, Mark, Panel, Picture, Segment, Unit, curve, stroke

_POINTS = 800
_MAX_MARKS = 40
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
    return [_picture(run, run_nodes, tops, single=len(runs) == 1) for run, run_nodes in zip(runs, nodes, strict=True) if run_nodes]


def _top(figure: _Figure, runs: Sequence[Run], nodes: Sequence[Sequence[NodeSeries]]) -> float | None:
    highest = []
    for run, run_nodes in zip(runs, nodes, strict=True):
        first, last = _range(run, run_nodes) if run_nodes else (0.0, 0.0)
        shown = [figure(node)[(first <= node.time_seconds) & (node.time_seconds <= last)] for node in run_nodes]
        if _are_many(run_nodes):
            shown = [bands(run_nodes, figure, first, last, _BAND_POINTS).high]
        highest += [float(np.nanmax(values)) for values in shown if np.isfinite(values).any()]
    return 1.05 * max(highest) if highest and max(highest) > 0 else None


def _range(run: Run, nodes: Sequence[NodeSeries]) -> tuple[float, float]:
    end = run.run_seconds or max(float(node.time_seconds[-1]) for node in nodes)
    margin = max(_MARGIN * end, 0.1)
    return -margin, end + margin


def _picture(run: Run, nodes: Sequence[NodeSeries], tops: Sequence[float | None], *, single: bool) -> Picture:
    first, last = _range(run, nodes)
    panels = tuple(
        Panel(title, "wall-clock time (s)", y_title, curves, unit, from_zero=True, top=top)
        for (title, y_title, unit, figure), top in zip(_MEASURES, tops, strict=True)
        if (curves := _curves(run, nodes, figure, first, last))
    )
    marks, thinned = _marks(run)
    sources = sorted({_SOURCES[node.network_source] for node in nodes if node.network_source in _SOURCES})
    return Picture(
        "resources" if single else f"resources-{run.name}",
        f"What each node used: {run.name}",
        _NOTE.format(source=" ".join(sources), thinned=thinned).strip() + (_BAND_NOTE.format(len(nodes)) if _are_many(nodes) else ""),
        "; ".join(_words_of_nodes(run, nodes)),
        panels,
        stacked=True,
        marks=tuple(mark for mark in marks if first <= mark.x <= last),
        x_range=(first, last),
        run=run.number,
        place="plots" if single else "run",
    )


def _are_many(nodes: Sequence[NodeSeries]) -> bool:
    return len(nodes) > MAX_NODES_SHOWN


def _band_curves(run: Run, nodes: Sequence[NodeSeries], figure: _Figure, first: float, last: float) -> tuple[Curve, ...]:
    spread = bands(nodes, figure, max(first, min(float(node.time_seconds[0]) for node in nodes)), last, _BAND_POINTS)
    if not np.isfinite(spread.median).any():
        return ()
    low, high = (
        ("lowest node", "highest node") if spread.percentiles == ENDS else (f"{percentile}th percentile" for percentile in BAND_PERCENTILES)
    )
    return (
        curve(low, stroke(1), spread.time_seconds, spread.low, run.number, "faint"),
        curve(high, stroke(2), spread.time_seconds, spread.high, run.number, "faint"),
        curve(f"median of {len(nodes):,} nodes", stroke(0), spread.time_seconds, spread.median, run.number),
    )


def _curves(run: Run, nodes: Sequence[NodeSeries], figure: _Figure, start: float, end: float) -> tuple[Curve, ...]:
    if _are_many(nodes):
        return _band_curves(run, nodes, figure, start, end)
    curves = []
    for node in nodes:
        shown = node.time_seconds >= start
        values = figure(node)[shown]
        if np.isfinite(values).any():
            kind: Kind = "points" if len(values) <= _FEW_SAMPLES else "line"
            drawn_as = stroke(node.node)
            curves.append(curve(f"node {node.node}", drawn_as, node.time_seconds[shown], values, run.number, kind, points=_POINTS))
    return tuple(curves)


def _marks(run: Run) -> tuple[list[Mark], str]:
    marks: list[Mark] = []
    notes = []
    for kind, (colour, dash, events) in _MARKS.items():
        times = [event.time_seconds for event in run.events if event.event in events]
        if kind == "evaluation":
            times = [record.time_seconds for record in run.evals]
        every = max(1, -(-len(times) // _MAX_MARKS))
        marks += [Mark(kind, seconds, colour, dash) for seconds in times[every - 1 :: every]]
        if every > 1:
            notes.append(f" Of kind “{kind}”, each {every}th of {len(times):,} is marked.")
    return marks, "".join(notes)


def _words_of_nodes(run: Run, nodes: Sequence[NodeSeries]) -> Iterator[str]:
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


NOT_CALIBRATED = "not calibrated"
_NO_UPDATES = "made no updates"
_CLOCK_COMPONENTS = {
    "training": ("train_seconds", COLOURS[0]),
    "training, workers idle": ("idle_seconds", COLOURS[1]),
    "evaluation": ("eval_seconds", COLOURS[5]),
    "translation at the end": ("translate_seconds", COLOURS[2]),
    "checkpoints": ("checkpoint_seconds", COLOURS[4]),
    "profiling": ("profile_seconds", COLOURS[3]),
    "coordination": ("other_seconds", INK),
}
_SELDOM = ("idle_seconds", "translate_seconds", "profile_seconds")  # shown if some run has it
_STEP_COMPONENTS = {
    "data": ("data_seconds", COLOURS[4]),
    "computing": ("compute_seconds", COLOURS[0]),
    "waiting for peers": ("peers_seconds", COLOURS[3]),
    "communicating": ("communicate_seconds", COLOURS[1]),
}
_SHARES_NOTE = (
    "Steps: from the calibration at a run's end, when the workers repeat the parts of a step. Communicating is what the exchange adds "
    "beyond what computing hides. In async mode workers may have no steps for a part of training, nobody waits for peers, and queueing "
    "at the parameter server is part of communicating. Of a run that was resumed the steps are those of its last part."
)
_SOME = " Of many nodes those are shown that wait least for their peers, and those that wait most."
_MEAN = " Of several nodes the mean."
_TYPICAL = " With repeats: the most typical run (step breakdown closest to the median)."
_MAX_NODES = 12  # with more nodes in all, a bar is the mean of a configuration's nodes


def time_shares(lines: Lines) -> Picture:
    """Return bars for each configuration with figures, and for its nodes unless too many."""
    representatives = [(line, line.runs[0] if line.configuration is None else line.configuration.median_run) for line in lines.all]
    ended = [(line, run) for line, run in representatives if run.has_summary]
    clocks = [_clock(run.summary) for _, run in ended]
    shows_nodes = len(ended) == 1 or sum(len(_nodes(run)) for _, run in ended) <= _MAX_NODES
    nodes: list[tuple[str, Mapping[str, Any] | None]] = []
    some = False
    for line, run in ended:
        shown, some_skipped = _end_nodes(run)
        some = some or (some_skipped and shows_nodes)
        if shows_nodes:
            nodes += [(_row(line, node, figures, single=len(ended) == 1), figures) for node, figures in shown]
        else:
            nodes.append((line.label, _mean_of_nodes(figures for _, figures in _nodes(run))))
    note = _SHARES_NOTE + _SOME * some + _MEAN * (not shows_nodes) + _TYPICAL * lines.repeated
    note = f"{note} {lines.contention_note}".strip()
    panels = (
        Bars(
            "Where each run's clock went",
            "seconds",
            tuple(line.label for line, _ in ended),
            tuple(
                Segment(_component_name(name, clocks), np.array([clock.get(key, 0.0) for clock in clocks], np.float64), colour)
                for name, (key, colour) in _CLOCK_COMPONENTS.items()
                if any(_has_component(clock, key) for clock in clocks)
            ),
            "s",
            ("",) * len(ended),
        ),
        Bars(
            "Where a training step went",
            "% of the step",
            tuple(row for row, _ in nodes),
            tuple(
                Segment(name, np.array([_percent(figures, key) for _, figures in nodes], np.float64), colour)
                for name, (key, colour) in _STEP_COMPONENTS.items()
            ),
            "%",
            tuple(NOT_CALIBRATED if figures is None else _NO_UPDATES for _, figures in nodes),
        ),
    )
    words = ". ".join(_words(line, run, clock) for (line, run), clock in zip(ended, clocks, strict=True))
    return Picture("time-shares", "Where the time went", note, words, tuple(panel for panel in panels if panel.rows))


def _mean_of_nodes(nodes: Iterable[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    known = [figures for figures in nodes if figures is not None and figures["step_seconds"]]
    if not known:
        return None
    keys = ["step_seconds", *(key for key, _ in _STEP_COMPONENTS.values())]
    values = {key: [figures[key] for figures in known if figures[key] is not None] for key in keys}
    return {key: sum(known_values) / len(known_values) if known_values else None for key, known_values in values.items()}


def _clock(summary: Mapping[str, Any]) -> dict[str, float]:
    segment, measured = calibrated_segment(summary), ("train_seconds", *PAUSE_COMPONENTS.values())
    shares = summary.get("time_shares")
    if shares is not None and not shares.get("part_began_seconds"):
        clock = {key: float(shares["run"][key]) for key in (*measured, "other_seconds")}
    else:
        clock = {key: float(summary[key]) for key in measured}
        clock["other_seconds"] = max(0.0, float(summary["run_seconds"]) - sum(clock.values()))
    idle = idle_fraction(summary) * (clock if segment is summary else segment)["train_seconds"]
    return {**clock, "train_seconds": clock["train_seconds"] - idle, "idle_seconds": idle}


def _nodes(run: Run) -> list[tuple[int, Mapping[str, Any] | None]]:
    shares = run.summary.get("time_shares")
    if shares is None:
        return [(node, None) for node in range(len(run.summary["per_node"]))]
    return [(figures["node"], figures) for figures in shares["nodes"]]


def _end_nodes(run: Run) -> tuple[list[tuple[int, Mapping[str, Any] | None]], bool]:
    return ends_of(_nodes(run), lambda node: None if node[1] is None else node[1]["peers_seconds"])


def _percent(figures: Mapping[str, Any] | None, key: str) -> float:
    if figures is None or figures[key] is None or not figures["step_seconds"]:
        return float("nan")
    return 100.0 * float(figures[key]) / float(figures["step_seconds"])


def _row(line: Line, node: int, figures: Mapping[str, Any] | None, *, single: bool) -> str:
    name = f"node {node}" if single else f"{line.label}, node {node}"
    return name if figures is None or figures["step_seconds"] is None else f"{name} ({_short(figures['step_seconds'])})"


def _short(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else duration_text(seconds)


def _has_component(clock: Mapping[str, float], key: str) -> bool:
    return bool(clock.get(key)) if key in _SELDOM else key in clock


def _component_name(name: str, clocks: Sequence[Mapping[str, float]]) -> str:
    return f"{name}, workers busy" if name == "training" and any(_has_component(clock, "idle_seconds") for clock in clocks) else name


def _words(line: Line, run: Run, clock: Mapping[str, float]) -> str:
    known = [(_component_name(name, [clock]), key) for name, (key, _) in _CLOCK_COMPONENTS.items() if _has_component(clock, key)]
    spent = ", ".join(f"{name} {duration_text(clock[key])}" for name, key in known)
    shares = {
        node: [f"{name} {value:.0f} %" for name, (key, _) in _STEP_COMPONENTS.items() if np.isfinite(value := _percent(figures, key))]
        for node, figures in _end_nodes(run)[0]
    }
    steps = [f"a step on node {node}: {', '.join(parts)}" for node, parts in shares.items() if parts]
    return f"{line.label}: {'; '.join([spent, *steps]) if steps else f'{spent}, steps {NOT_CALIBRATED}'}"
