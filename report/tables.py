"""Summaries as tables for people: one run, or several side by side, a column each."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from ..metrics.display import UNKNOWN, bytes_text, count_text, duration_text, number_text, rate_text
from .compare import row

__all__ = ["ACROSS_MODES", "SYNTHETIC", "one_run", "side_by_side", "to_text"]

ACROSS_MODES = (
    "A step is one update of the parameters: of the global batch in sync mode, of one worker's batch in async mode.\n"
    "So steps/s of sync and async runs are different things; compare examples/s and time to target."
)
"""Stands under every table that has runs of both modes."""

SYNTHETIC = "Synthetic data: images and labels are random. Speed and resources mean something, loss and accuracy do not."
"""Stands under every table that has a run on synthetic data."""

Show = Callable[[Any], str]
Line = tuple[str, str, Show]


def _text(value: Any) -> str:
    return UNKNOWN if value is None else str(value)


def _source(value: Any) -> str:
    return "+".join(value) if isinstance(value, list) else _text(value)


def _bytes_rate(value: float | None) -> str:
    return bytes_text(value, per_second=True)


def _decimal(value: float | None) -> str:
    return number_text(value, 2)


def _rate(value: float | None) -> str:
    """Show a rate whose label already says per what."""
    return rate_text(value).removesuffix("/s")


_ASKED: tuple[Line, ...] = (
    ("state", "state", _text),
    ("backend", "backend", _text),
    ("mode", "mode", _text),
    ("model", "model", _text),
    ("data", "data", _text),
    ("precision", "precision_used", _text),
    ("nodes", "nodes", count_text),
    ("workers", "workers", count_text),
    ("parameter servers", "parameter_servers", count_text),
    ("global batch", "global_batch_size", count_text),
)

_DONE: tuple[Line, ...] = (
    ("steps", "steps", count_text),
    ("examples", "examples", count_text),
    ("examples/s", "examples_per_second", _rate),
    ("steps/s", "steps_per_second", _rate),
    ("run time", "run_seconds", duration_text),
    ("init time", "init_seconds", duration_text),
    ("train time", "train_seconds", duration_text),
    ("final train loss", "final_train_loss", number_text),
    ("test loss", "eval_loss", number_text),
    ("test accuracy", "eval_accuracy", number_text),
    ("time to target", "time_to_target_seconds", duration_text),
    ("staleness mean", "staleness_mean", _decimal),
)

_NODE: tuple[Line, ...] = (
    ("CPU cores used", "node_cpu_cores_used_mean", _decimal),
    ("peak memory", "node_memory_rss_bytes_max", bytes_text),
    ("sent", "node_network_sent_bytes_per_second", _bytes_rate),
    ("received", "node_network_received_bytes_per_second", _bytes_rate),
)


def _table(**options: Any) -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, **options)


def one_run(summary: Mapping[str, Any]) -> RenderableType:
    """Return the end-of-run table: the figures, then what each node used."""
    figures = _figures(summary)
    main = _table(show_header=False)
    main.add_column(no_wrap=True)
    main.add_column(no_wrap=True)
    for label, key, show in _ASKED + _DONE:
        if figures[key] is not None:
            main.add_row(label, show(figures[key]))
    if figures["target"] is not None:
        main.add_row("target", f"{figures['target']} {'reached' if figures['target_reached'] else 'NOT reached within the budget'}")
    if figures["updates_by_worker"] is not None:
        main.add_row("updates by worker", ", ".join(count_text(count) for count in figures["updates_by_worker"]))
    if (figures["nodes_sharing_cores"] or 1) > 1:
        main.add_row("cores", f"shared by {figures['nodes_sharing_cores']} nodes, which fight for them (--cores-per-node)")
    if figures["network_source"] is not None:
        main.add_row("network counted at", _source(figures["network_source"]))
    return Group(main, "", _nodes(figures), *_notes([figures]))


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a summary as tables show it: what the run computed in where it is known, and data that is synthetic named so."""
    figures = row(summary)
    if figures["synthetic"]:
        figures["data"] = f"{figures['data']} (synthetic)"
    figures["precision_used"] = figures["precision_used"] or figures["precision"]
    return figures


def _notes(all_figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what has to be said under a table of these runs, an empty line before each."""
    notes = []
    if len({figures["mode"] for figures in all_figures}) > 1:
        notes += ["", ACROSS_MODES]
    if any(figures["synthetic"] for figures in all_figures):
        notes += ["", SYNTHETIC]
    return notes


def _nodes(figures: Mapping[str, Any]) -> Table:
    table = _table()
    table.add_column("node", no_wrap=True)
    for label, _, _ in _NODE:
        table.add_column(label, justify="right", no_wrap=True)
    for node in range(figures["nodes"]):
        table.add_row(str(node), *(show(figures[key][node]) for _, key, show in _NODE))
    return table


def side_by_side(summaries: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with a line a figure and a column a run; a dash stands for what was not observed or does not apply.

    The relative speeds are examples/s over those of the first run.
    """
    all_figures = [_figures(summary) for summary in summaries]
    table = _table()
    table.add_column("", no_wrap=True)
    for figures in all_figures:
        table.add_column(str(figures["run"]), justify="right", overflow="fold")
    for label, key, show in _ASKED + _DONE:
        table.add_row(label, *(_shown(figures, key, show) for figures in all_figures))
        if key == "examples_per_second":
            table.add_row("  relative to the first", *_relative([figures[key] for figures in all_figures]))
    if any((figures["nodes_sharing_cores"] or 1) > 1 for figures in all_figures):
        table.add_row("nodes sharing cores", *(count_text(figures["nodes_sharing_cores"]) for figures in all_figures))
    table.add_section()
    for node in range(max(figures["nodes"] for figures in all_figures)):
        for label, key, show in _NODE:
            table.add_row(f"node {node} {label}", *(_at_node(figures, key, node, show) for figures in all_figures))
    return Group(table, *_notes(all_figures))


def _relative(values: Sequence[float | None]) -> list[str]:
    first = values[0]
    return [UNKNOWN if value is None or not first else f"{value / first:.2f}x" for value in values]


def _shown(figures: Mapping[str, Any], key: str, show: Show) -> str:
    if key == "time_to_target_seconds" and figures["target_reached"] is False:
        return "not reached"
    return show(figures[key])


def _at_node(figures: Mapping[str, Any], key: str, node: int, show: Show) -> str:
    return show(figures[key][node]) if node < figures["nodes"] else ""


def to_text(renderable: RenderableType, width: int = 10_000) -> str:
    """Return plain text without colours; lines are as long as they need to be unless `width` (in characters) is given."""
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
