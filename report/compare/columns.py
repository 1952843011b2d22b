"""The columns of a comparison's tables: label, unit, digits and mark."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.cells import cell_len as text_width

from ...core.errors import UsageError
from ...core.setting import AT_THE_END, LOSS, METRICS, RESOURCES, SPEED, STEPS, TARGET, TIME, TRANSLATIONS
from ...core.suggestions import nearest
from ...metrics import LOSS as LOSS_INFO
from ...metrics import MetricInfo
from ...metrics.base import ACCURACY as ACCURACY_METRIC
from ...records.text import (
    UNKNOWN,
    bytes_text,
    count_text,
    duration_text,
    figure_text,
    lines_of,
    number_text,
    rate_text,
    seconds_text,
    statistic,
)
from ..runs.run import Run
from ..runs.summary_rows import FIGURES, Searched, scored_at_the_end
from .rows import Row

MARK = "†"  # a figure that is not comparable with the first row's
Show = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure in a table: key in a flat row, label, format, and kind (`core.setting.GROUPS`)."""

    key: str
    label: str
    show: Show
    group: str | None = None
    short: str = ""

    @property
    def header(self) -> str:
        """The short label."""
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
)  # figures of runs, in the order of the tables
IN_TRAINING = " in training"  # of traffic over the training time alone
NODE: tuple[Column, ...] = (
    Column("node_cpu_cores_used_mean", "CPU cores used", _decimal, RESOURCES, "CPU cores"),
    Column("node_cpu_fraction_mean", "CPU share", _percent, RESOURCES, "CPU"),
    Column("node_memory_rss_bytes_max", "peak RSS", bytes_text, RESOURCES),
    Column("node_memory_pss_bytes_max", "sampled PSS", bytes_text, RESOURCES),
    Column("node_network_sent_bytes_per_train_second", f"sent{IN_TRAINING}", _bytes_rate, RESOURCES),
    Column("node_network_received_bytes_per_train_second", f"received{IN_TRAINING}", _bytes_rate, RESOURCES),
)  # figures of each node

RESTARTS: tuple[Column, ...] = (
    Column("restarts", "restarts", count_text),
    Column("restart_seconds_lost", "lost by restarts", duration_text, None, "lost"),
    Column("worker_absent_seconds", "workers absent", duration_text, None, "absent"),
)  # figures of restarted runs

PROFILING: tuple[Column, ...] = (
    Column("profiled_updates", "profiled updates", count_text, None, "profiled"),
    Column("profile_seconds", "profiling time", duration_text, None, "profiling"),
)  # figures of profiled runs; their speeds exclude these updates and this time

_OTHERS = (
    Column("best_eval_accuracy", "best accuracy", number_text, METRICS),
    Column("step_seconds_p50", "median step", seconds_text, STEPS),
    Column("step_seconds_p95", "step, 95th percentile", seconds_text, STEPS),
    Column("total_seconds", "total time", duration_text, TIME),
    Column("epochs", "epochs", _decimal),
    Column("learning_rate", "learning rate", number_text),
    Column("staleness_p95", "staleness p95", _decimal),
    Column("node_network_sent_bytes_per_second", "sent over the whole run", _bytes_rate, RESOURCES),
    Column("node_network_received_bytes_per_second", "received over the whole run", _bytes_rate, RESOURCES),
    Column("staleness_max", "staleness max", _decimal),
)
_KNOWN = {one.key: one for one in (*RUN_COLUMNS, *RESTARTS, *PROFILING, *NODE, *_OTHERS)}
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
    """Return a column per metric of some runs; those of final translations are last."""
    # Labels of translation metrics have the search and the number of sentences, if all runs have the same.
    known = list(runs)
    infos = {info.name: info for run in reversed(known) for info in reversed(run.metrics) if info != LOSS_INFO}
    translated = frozenset().union(*(run.translation_metrics for run in known))
    training, end = Searched.while_training(known), Searched.of(map(scored_at_the_end, known))
    return [
        *(_evaluated(info, training if info.name in translated else None) for info in reversed(infos.values())),
        *(_final(info, end) for info in dict.fromkeys(info for run in known for info in run.metrics_at_the_end)),
    ]


def _evaluated(info: MetricInfo, searched: Searched | None) -> Column:
    if searched is None:
        return Column(f"eval_{info.name}", f"test {info.label}", partial(figure_text, info.name), METRICS, info.label)
    label, short = f"test {info.label}{searched.in_brackets()}", f"{info.label}{searched.method_in_brackets}"
    return Column(f"eval_{info.name}", label, partial(figure_text, info.name), TRANSLATIONS, short)


def _final(info: MetricInfo, searched: Searched) -> Column:
    label = f"{info.label} at the end"
    return Column(f"end_{info.name}", f"{label}{searched.in_brackets('sentences')}", partial(figure_text, info.name), AT_THE_END, label)


def run_columns(runs: Iterable[Run]) -> list[Column]:
    """Return `RUN_COLUMNS` with the runs' own metrics, `RESTARTS` and `PROFILING` if any."""
    # The error, 1 − accuracy, has a column if a run has the accuracy of a classifier, and none a metric of that name.
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
    """Return the column of a key or short name, also in `further`. Raises UsageError."""
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
    return _KNOWN.get(key) or Column(key, key.replace("_", " "), _plain)


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text(value)
    return count_text(value) if isinstance(value, int) else number_text(value)


def cell(entry: Row, one: Column, marks: Collection[str] = ()) -> str:
    """Return a figure as text: a mean with ± half its 95 % interval, marked if in `marks`."""
    value, half = entry.figures.get(one.key), entry.half_widths.get(one.key)
    if one.key == "time_to_target_seconds" and entry.converged == 0:
        return "not reached"
    text = _spread(one.show, value, half) + _of_fewer(entry, one)
    if one.key == "time_to_target_seconds" and entry.converged is not None and not entry.all_converged:
        count = entry.counts.get(one.key, entry.converged)
        text += f" ({entry.converged} of {len(entry.runs)}{'' if count == entry.converged else f', n={count}'})"
    return text + (MARK if value is not None and one.group in marks else "")


def node_lines(entries: Iterable[Row]) -> list[tuple[int | str, str]]:
    """Return the nodes of these rows with their labels; of many nodes the names of statistics."""
    counts = {entry.node_count for entry in entries}
    of = f" of {max(counts):,}" if len(counts) == 1 else ""
    return [(line, str(line) if isinstance(line, int) else f"{line}{of}") for line in lines_of(max(counts))]


def named_node(node: int | str, label: str, figure: str) -> str:
    """Return the label of a figure of a line of `node_lines`."""
    return f"node {label} {figure}" if isinstance(node, int) else f"{label} nodes: {figure}"


def node_cell(entry: Row, one: Column, node: int | str, marks: Collection[str] = ()) -> str:
    """Return one node's figure, or a statistic over all, as text; empty for a missing node."""
    values, halves = entry.figures[one.key], entry.half_widths.get(one.key)
    if isinstance(node, str):
        found = None if values is None else statistic(node, values)
        return one.show(found) + (MARK if found is not None and one.group in marks else "")
    if values is None or node >= len(values):
        return "" if node >= (entry.figures["nodes"] or 0) else UNKNOWN
    text = _spread(one.show, values[node], None if halves is None else halves[node]) + _of_fewer(entry, one)
    return text + (MARK if values[node] is not None and one.group in marks else "")


def _of_fewer(entry: Row, one: Column) -> str:
    count = entry.counts.get(one.key)
    return "" if count is None or (one.key == "time_to_target_seconds" and not entry.all_converged) else f" (n={count})"


def _spread(show: Show, value: Any, half: float | None) -> str:
    if not half or show in (count_text, _plain, _text):
        return show(value)
    if show in (bytes_text, _bytes_rate):
        return f"{show(value)} ± {bytes_text(half, per_second=show is _bytes_rate, like=value)}"
    return f"{show(value)} ± {f'{half:.2f}' if show is _decimal else show(half)}"


def relative_text(value: float | None, *, marked: bool = False) -> str:
    """Return a ratio as text."""
    return UNKNOWN if value is None else f"{value:.2f}x{MARK if marked else ''}"


def relative(values: Sequence[float | None], group: str, marks: Sequence[Collection[str]]) -> list[str]:
    """Return ratios of a kind of figures as texts, marked if the kind is in a row's `marks`."""
    return [relative_text(value, marked=group in own) for value, own in zip(values, marks, strict=True)]


GAP = "  "  # between the columns of a plain table
_SAYS_NOTHING = frozenset({"", "-", "–", "not reached", "none", "NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"})
# A number with an optional unit, spread or kind; names that start with a digit have longer words.
_FIGURE = re.compile(r"[-−+]?\.?\d(?!.*([^\W\d_]{5}|_))", re.DOTALL)


def holds_figures(texts: Iterable[str], otherwise: bool = True) -> bool:
    """Return whether the cells of a column are figures; `otherwise` if all of them are empty."""
    telling = [text for text in (cell.removesuffix("†").strip() for cell in texts) if text not in _SAYS_NOTHING]
    return all(_FIGURE.match(text) for text in telling) if telling else otherwise


def plain_lines(columns: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Return a table's lines, padded by terminal width; `right`: right-aligned columns."""
    padded = []
    for column, figures in zip(columns, right, strict=True):
        widths = [text_width(text) for text in column]
        widest = max(widths, default=0)
        blanks = [" " * (widest - width) for width in widths]
        padded.append([f"{blank}{text}" if figures else f"{text}{blank}" for text, blank in zip(column, blanks, strict=True)])
    return [GAP.join(line).rstrip() for line in zip(*padded, strict=True)]
