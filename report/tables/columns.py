"""The columns of a comparison's tables: label, unit, digits, and the mark of a figure that cannot be compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...core.errors import UsageError
from ...core.suggestions import nearest
from ...metrics import LOSS as LOSS_INFO
from ...metrics import MetricInfo
from ...metrics.classification import ACCURACY as ACCURACY_METRIC
from ...records.text.many_nodes import lines_of, statistic
from ...records.text.numbers import UNKNOWN, bytes_text, count_text, duration_text, figure_text, number_text, rate_text, seconds_text
from ..catalog.run import Run
from ..catalog.summary_rows import FIGURES
from ..catalog.translations import Searched, scored_at_the_end
from ..comparison.factors import AT_THE_END, LOSS, METRICS, RESOURCES, SPEED, STEPS, TARGET, TIME, TRANSLATIONS
from ..comparison.rows import Row

__all__ = [
    "IN_TRAINING",
    "MARK",
    "NODE",
    "RUN_COLUMNS",
    "Column",
    "cell",
    "column",
    "metric_columns",
    "named_node",
    "node_cell",
    "node_lines",
    "relative",
    "run_columns",
]

MARK = "†"
"""Stands behind a figure that cannot be compared with the first row's."""

Show = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure in a table: its key in a flat row, what it is called, how it is written, and the kind (`factors.GROUPS`) it belongs to."""

    key: str
    label: str
    show: Show
    group: str | None = None
    short: str = ""

    @property
    def header(self) -> str:
        """What it is called at the head of a column, where there is little room."""
        return self.short or self.label


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " + ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return UNKNOWN if value is None else str(value)


def _decimal(value: float | None) -> str:
    return number_text(value, 2)


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f}%"


def _rate(value: float | None) -> str:
    """Write a rate whose label already says per what."""
    return rate_text(value).removesuffix("/s")


def _bytes_rate(value: float | None) -> str:
    return bytes_text(value, per_second=True)


RUN_COLUMNS: tuple[Column, ...] = (
    Column("steps", "steps", count_text),
    Column("examples", "examples", count_text),
    Column("examples_per_second", "examples/s", _rate, SPEED),
    Column("steps_per_second", "steps/s", _rate, STEPS),
    Column("run_seconds", "run time (after start-up)", duration_text, TIME, "run time"),
    Column("init_seconds", "start-up time", duration_text, SPEED),
    Column("train_seconds", "training time", duration_text, TIME),
    Column("final_train_loss", "final train loss", number_text, LOSS, "train loss"),
    Column("eval_loss", "test loss", number_text, LOSS),
    Column("eval_accuracy", "test accuracy", number_text, METRICS, "accuracy"),
    Column("eval_error", "test error", number_text, METRICS, "error"),
    Column("time_to_target_seconds", "time to target", duration_text, TARGET),
    Column("staleness_mean", "mean staleness (updates)", _decimal, None, "staleness"),
)
"""What runs did, in the order in which it is told."""

IN_TRAINING = " in training"
"""Behind the label of what was sent and received over the training time alone, and not over the whole run."""

NODE: tuple[Column, ...] = (
    Column("node_cpu_cores_used_mean", "CPU cores used", _decimal, RESOURCES, "CPU cores"),
    Column("node_cpu_fraction_mean", "CPU share", _percent, RESOURCES, "CPU"),
    Column("node_memory_rss_bytes_max", "peak RSS", bytes_text, RESOURCES),
    Column("node_memory_pss_bytes_max", "sampled PSS", bytes_text, RESOURCES),
    Column("node_network_sent_bytes_per_train_second", f"sent{IN_TRAINING}", _bytes_rate, RESOURCES),
    Column("node_network_received_bytes_per_train_second", f"received{IN_TRAINING}", _bytes_rate, RESOURCES),
)
"""What each of their nodes used."""

RESTARTS: tuple[Column, ...] = (
    Column("restarts", "restarts", count_text),
    Column("restart_seconds_lost", "lost by restarts", duration_text, None, "lost"),
    Column("worker_absent_seconds", "workers absent", duration_text, None, "absent"),
)
"""Of runs that went on by themselves after failures."""

PROFILING: tuple[Column, ...] = (
    Column("profiled_updates", "profiled updates", count_text, None, "profiled"),
    Column("profile_seconds", "profiling time", duration_text, None, "profiling"),
)
"""Of runs that traced steps; no speed has these updates and this time in it."""

_KNOWN = {one.key: one for one in (*RUN_COLUMNS, *RESTARTS, *PROFILING, *NODE)}

_OTHERS: dict[str, Column] = {
    "best_eval_accuracy": Column("best_eval_accuracy", "best accuracy", number_text, METRICS),
    "step_seconds_p50": Column("step_seconds_p50", "median step", seconds_text, STEPS),
    "step_seconds_p95": Column("step_seconds_p95", "step, 95th percentile", seconds_text, STEPS),
    "total_seconds": Column("total_seconds", "total time", duration_text, TIME),
    "epochs": Column("epochs", "epochs", _decimal),
    "learning_rate": Column("learning_rate", "learning rate", number_text),
    "staleness_p95": Column("staleness_p95", "staleness p95", _decimal),
    "node_network_sent_bytes_per_second": Column("node_network_sent_bytes_per_second", "sent over the whole run", _bytes_rate, RESOURCES),
    "node_network_received_bytes_per_second": Column(
        "node_network_received_bytes_per_second", "received over the whole run", _bytes_rate, RESOURCES
    ),
    "staleness_max": Column("staleness_max", "staleness max", _decimal),
}

_SHORT = {
    "accuracy": "eval_accuracy",
    "loss": "eval_loss",
    "error": "eval_error",
    "train_loss": "final_train_loss",
    "time": "run_seconds",
    "time_to_target": "time_to_target_seconds",
    "staleness": "staleness_mean",
    "batch": "global_batch_size",
    "cpu": "node_cpu_cores_used_mean",
    "memory": "node_memory_rss_bytes_max",
    "pss": "node_memory_pss_bytes_max",
    "sent": "node_network_sent_bytes_per_second",
    "received": "node_network_received_bytes_per_second",
    "sent_in_training": "node_network_sent_bytes_per_train_second",
    "received_in_training": "node_network_received_bytes_per_train_second",
}


def metric_columns(runs: Iterable[Run]) -> list[Column]:
    """Return a column for each metric of some runs, under its label, each once; those of translations at their end come last.

    The label of one that comes from translations says by which search, and of how many sentences, where all of the runs are alike in it.
    """
    known = list(runs)
    infos = {info.name: info for run in reversed(known) for info in reversed(run.metrics) if info != LOSS_INFO}
    translated = frozenset().union(*(run.translation_metrics for run in known))
    training, end = Searched.while_training(known), Searched.of(map(scored_at_the_end, known))
    return [
        *(_evaluated(info, training if info.name in translated else None) for info in reversed(infos.values())),
        *(_final(info, end) for info in dict.fromkeys(info for run in known for info in run.metrics_at_the_end)),
    ]


def _evaluated(info: MetricInfo, searched: Searched | None) -> Column:
    """Return the column of a metric of the evaluations while a run trains."""
    if searched is None:
        return Column(f"eval_{info.name}", f"test {info.label}", partial(figure_text, info.name), METRICS, info.label)
    label, short = f"test {info.label}{searched.in_brackets()}", f"{info.label}{searched.method_in_brackets}"
    return Column(f"eval_{info.name}", label, partial(figure_text, info.name), TRANSLATIONS, short)


def _final(info: MetricInfo, searched: Searched) -> Column:
    """Return the column of a metric of the translations at a run's end."""
    label = f"{info.label} at the end"
    return Column(f"end_{info.name}", f"{label}{searched.in_brackets('sentences')}", partial(figure_text, info.name), AT_THE_END, label)


def run_columns(runs: Iterable[Run]) -> list[Column]:
    """Return `RUN_COLUMNS` with the columns of the runs' metrics in the place of the accuracy's.

    `RESTARTS` and `PROFILING` follow where there were any. The error, which is 1 − accuracy, has a column where a run has the accuracy of
    a classifier, and none a metric of that name.
    """
    known = list(runs)
    own = {one.key: one for one in metric_columns(known)} or {"eval_accuracy": _KNOWN["eval_accuracy"]}
    accuracy = own.pop("eval_accuracy", None)
    metrics = [] if accuracy is None else [accuracy]
    if "eval_error" not in own and (any(ACCURACY_METRIC.info in run.metrics for run in known) or not known):
        metrics.append(_KNOWN["eval_error"])
    metrics += own.values()
    place = next(index for index, one in enumerate(RUN_COLUMNS) if one.group == METRICS)
    restarts = RESTARTS if any(run.summary.get("restarts") for run in known) else ()
    profiling = PROFILING if any(run.summary.get("profiled_updates") for run in known) else ()
    return [*RUN_COLUMNS[:place], *metrics, *(one for one in RUN_COLUMNS[place:] if one.group != METRICS), *restarts, *profiling]


def column(text: str, further: Sequence[Column] = ()) -> Column:
    """Return the column for the name of a figure, its key in a flat row or a short name; `further` ones are those of metrics.

    Raises UsageError, naming those that are near.
    """
    name = text.strip().lower().replace("-", "_")
    best = [Column(f"best_{one.key}", f"best {one.short}", one.show, one.group) for one in further if one.key.startswith("eval_")]
    for one in (*further, *best):
        if name in (one.key, one.key.replace("eval_", "", 1)):
            return one
    key = _SHORT.get(name, name)
    if key not in FIGURES:
        known = [*FIGURES, *(one.key for one in (*further, *best))]
        parts = [figure for figure in known if name and name in figure]
        close = nearest(name, [*known, *_SHORT, *(one.key.replace("eval_", "", 1) for one in (*further, *best))])
        near = list(dict.fromkeys([*([close] if close else []), *parts]))[:4]
        hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Some are: {', '.join(_SHORT)}."
        raise UsageError(f"--metric: got {text!r}; allowed: figures of the rows that --json prints. {hint}")
    return _KNOWN.get(key) or _OTHERS.get(key) or Column(key, key.replace("_", " "), _plain)


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text(value)
    return count_text(value) if isinstance(value, int) else number_text(value)


def cell(entry: Row, one: Column, marks: Collection[str] = ()) -> str:
    """Return a figure of a row as text: with ± half its 95 % interval where it is a mean, and the mark where its kind is in `marks`."""
    value, half = entry.figures.get(one.key), entry.half_widths.get(one.key)
    if one.key == "time_to_target_seconds" and entry.converged == 0:
        return "not reached"
    text = _spread(one.show, value, half) + _of_fewer(entry, one)
    if one.key == "time_to_target_seconds" and entry.converged is not None and not entry.all_converged:
        count = entry.counts.get(one.key, entry.converged)
        text += f" ({entry.converged} of {len(entry.runs)}{'' if count == entry.converged else f', n={count}'})"
    return text + (MARK if value is not None and one.group in marks else "")


def node_lines(entries: Iterable[Row]) -> list[tuple[int | str, str]]:
    """Return what the nodes of these rows have a line each for, as `node_cell` takes it, and what it is called.

    Of many nodes that is the lowest, the median and the highest of each figure.
    """
    counts = {entry.node_count for entry in entries}
    of = f" of {max(counts):,}" if len(counts) == 1 else ""
    return [(line, str(line) if isinstance(line, int) else f"{line}{of}") for line in lines_of(max(counts))]


def named_node(node: int | str, label: str, figure: str) -> str:
    """Return what a figure of a line of `node_lines` is called beside figures of no node."""
    return f"node {label} {figure}" if isinstance(node, int) else f"{label} nodes: {figure}"


def node_cell(entry: Row, one: Column, node: int | str, marks: Collection[str] = ()) -> str:
    """Return a figure of one node as text, or what a statistic of this name says of all; empty where the row has no such node."""
    values, halves = entry.figures[one.key], entry.half_widths.get(one.key)
    if isinstance(node, str):
        found = None if values is None else statistic(node, values)
        return one.show(found) + (MARK if found is not None and one.group in marks else "")
    if values is None or node >= len(values):
        return "" if node >= (entry.figures["nodes"] or 0) else UNKNOWN
    text = _spread(one.show, values[node], None if halves is None else halves[node]) + _of_fewer(entry, one)
    return text + (MARK if values[node] is not None and one.group in marks else "")


def _of_fewer(entry: Row, one: Column) -> str:
    """Return over how many runs a mean is, where that is not all of the row's; times to a target say how many reached it."""
    count = entry.counts.get(one.key)
    return "" if count is None or (one.key == "time_to_target_seconds" and not entry.all_converged) else f" (n={count})"


def _spread(show: Show, value: Any, half: float | None) -> str:
    if not half or show in (count_text, _plain, _text):
        return show(value)
    if show in (bytes_text, _bytes_rate):
        return f"{show(value)} ± {bytes_text(half, per_second=show is _bytes_rate, like=value)}"
    return f"{show(value)} ± {f'{half:.2f}' if show is _decimal else show(half)}"


def relative(value: float | None, *, marked: bool = False) -> str:
    """Return a ratio as text."""
    return UNKNOWN if value is None else f"{value:.2f}x{MARK if marked else ''}"
