"""The summaries of finished runs as flat rows of comparable figures. Reads files only; no framework is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...metrics.base import RESERVED_NAMES
from ...records.store.jsonl import NON_FINITE
from ...records.store.summary_schema import summary_type
from .run import finished_run, labelled

__all__ = ["FIGURES", "load", "metric_figures", "metrics_at_the_end", "metrics_of", "number", "row", "rows"]

_PLAIN = (
    "run",
    "state",
    "backend",
    "mode",
    "model",
    "data",
    "synthetic",
    "nodes",
    "workers",
    "parameter_servers",
    "batch_size",
    "global_batch_size",
    "batch_tokens",
    "padding_share",
    "optimizer",
    "learning_rate",
    "seed",
    "resumed",
    "precision",
    "precision_used",
    "device_used",
    "compiled",
    "exchange",
    "network_source",
    "nodes_sharing_cores",
    "updates_by_worker",
    "steps",
    "updates_applied",
    "examples",
    "epochs",
    "examples_per_second",
    "steps_per_second",
    "init_seconds",
    "train_seconds",
    "profile_seconds",
    "profiled_updates",
    "run_seconds",
    "total_seconds",
    "final_train_loss",
    "target",
    "target_reached",
    "time_to_target_seconds",
    "restarts",
    "restart_seconds_lost",
    "worker_restarts",
    "worker_absent_seconds",
)

_NESTED = {
    "eval_loss": ("eval", "loss"),
    "eval_accuracy": ("eval", "accuracy"),
    "best_eval_accuracy": ("best_eval", "accuracy"),
    "step_seconds_p50": ("step_seconds", "p50"),
    "step_seconds_p95": ("step_seconds", "p95"),
    "group_size": ("step_seconds", "group_size"),
    "staleness_mean": ("staleness", "mean"),
    "staleness_p95": ("staleness", "p95"),
    "staleness_max": ("staleness", "max"),
}

_PER_NODE = {
    "node_cpu_cores_used_mean": ("cpu_cores_used", "mean"),
    "node_cpu_fraction_mean": ("cpu_fraction", "mean"),
    "node_memory_rss_bytes_max": ("memory_rss_bytes", "max"),
    "node_memory_pss_bytes_max": ("memory_pss_bytes", "max"),
    "node_network_sent_bytes_per_second": ("network_sent_bytes_per_second",),
    "node_network_received_bytes_per_second": ("network_received_bytes_per_second",),
    "node_network_sent_bytes_per_train_second": ("network_sent_bytes_per_train_second",),
    "node_network_received_bytes_per_train_second": ("network_received_bytes_per_train_second",),
}


FIGURES: tuple[str, ...] = (*_PLAIN, *_NESTED, "eval_error", *_PER_NODE)
"""What every row has, in its order. A row also has ``eval_<metric>`` and ``best_eval_<metric>`` of each further metric of its run, and
``end_<metric>`` of each that translations of all test sentences at its end have.
"""

_OF_METRICS = ("eval_", "best_eval_", "end_")

_BESIDE_SCORES = frozenset(("split", "step", "sentences", "signature", "seconds"))
"""What a summary says of the translations at the end besides their scores."""


def figure_type(name: str) -> Any:
    """Return the type of a figure of a row, as pydantic takes it; each may be None."""
    if name in _PER_NODE:
        return list[summary_type(("per_node", *_PER_NODE[name]))]  # type: ignore[misc]
    return summary_type(_NESTED.get(name, (name,)))


def metric_figures(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what rows have beside `FIGURES`: the figures of metrics that not every model has, each once, in the rows' order."""
    return list(dict.fromkeys(name for row in rows for name in row if name not in FIGURES and name.startswith(_OF_METRICS)))


def metrics_of(evaluation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metrics of an evaluation in a summary, by name; none where there was no evaluation."""
    return {name: value for name, value in (evaluation or {}).items() if name not in RESERVED_NAMES}


def metrics_at_the_end(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of the translations at a run's end, by name; none where nothing was translated."""
    scores = summary.get("translated") or {}
    return {name: value for name, value in scores.items() if name not in _BESIDE_SCORES and value is not None}


def load(paths: Sequence[Path | str]) -> list[dict[str, Any]]:
    """Return the summaries of the runs. Raises UsageError for one that does not exist or has no summary (yet)."""
    return [{**run.summary, "run": run.name} for run in labelled([finished_run(path) for path in paths])]


def row(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary as one flat row: a figure a key, units in the names, a list in node order for the ``node_`` figures.

    None stands for what was not observed. ``eval_error`` is 1 − ``eval_accuracy``.
    """
    flat: dict[str, Any] = {name: summary.get(name) for name in _PLAIN}
    flat.update({name: _reach(summary, path) for name, path in _NESTED.items()})
    accuracy = flat["eval_accuracy"]
    flat["eval_error"] = 1 - accuracy if isinstance(accuracy, int | float) else accuracy  # null, or the string for a figure that is none
    flat.update({name: [_reach(node, path) for node in summary["per_node"]] for name, path in _PER_NODE.items()})
    for kind in ("eval", "best_eval"):
        flat.update({f"{kind}_{name}": value for name, value in metrics_of(summary.get(kind)).items()})
    return flat | {f"end_{name}": value for name, value in metrics_at_the_end(summary).items()}


def _reach(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        if value is None:
            return None
        value = value.get(name)
    return value


def rows(paths: Sequence[Path | str]) -> list[dict[str, Any]]:
    """Return a flat row for each run, in the order given. Raises what `load` raises."""
    return [row(summary) for summary in load(paths)]


def number(value: Any) -> float | None:
    """Return a figure of a summary as a float, also where it is the name of one that is not finite; None for what is no number."""
    if isinstance(value, str):
        return NON_FINITE.get(value)
    return float(value) if isinstance(value, int | float) else None
