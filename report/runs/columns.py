"""Columns of rows, tables, lists, CSV and LaTeX, each declared once in `COLUMNS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from ...core.errors import UsageError
from ...core.setting import AT_THE_END, LOSS, METRICS, RESOURCES, SPEED, STEPS, TARGET, TIME, TRANSLATIONS, WORK
from ...core.suggestions import nearest
from ...metrics import LOSS as LOSS_INFO
from ...metrics import MetricInfo
from ...metrics.base import ACCURACY, RESERVED_NAMES
from ...records.store.summary_schema import NodeSummary, Summary, summary_type
from ...records.text import UNKNOWN, bytes_text, count_text, duration_text, figure_text, number_text, rate_text, seconds_text
from .run import Run
from .translation_scores import Searched, scored_at_the_end

Show = Callable[[Any], str]


def plain(value: Any) -> str:
    """Return any value as text, by its type."""
    if isinstance(value, list):
        return " + ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return count_text(value) if isinstance(value, int) else number_text(value)
    return UNKNOWN if value is None else str(value)


decimal = partial(number_text, digits=2)


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f}%"


SPEEDS = ("examples/s", "steps/s")
_SHOWN: Mapping[str, Show] = {
    **dict.fromkeys(SPEEDS, partial(rate_text, unit="")),
    "s": duration_text,
    "bytes": bytes_text,
    "bytes/s": partial(bytes_text, per_second=True),
    "%": _percent,
}  # how figures of a unit are shown


def _batch(value: float | str | None) -> str:
    return value if isinstance(value, str) else count_text(value)  # a text if batches have a number of tokens


def _error(figures: Mapping[str, Any]) -> Any:
    accuracy = figures["eval_accuracy"]
    return 1 - accuracy if isinstance(accuracy, int | float) else accuracy  # null, or the name of a non-finite value


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a run: its key in a flat row, and how tables show it.

    Keys that begin with ``node_`` have a value per node.
    """

    key: str
    label: str = ""  # by default the key in words
    show: Show = plain
    group: str | None = None  # kind of figures (`core.setting.GROUPS`), which says when it is comparable
    header: str = ""  # shorter label
    better: int = 0  # 1 if more of it is better, −1 if less is: tables then also have it relative to the first row's
    path: tuple[str, ...] = ()  # in a summary, or in its node; by default the key, or that of an object and the key in it
    names: tuple[str, ...] = ()  # further names for `--metric`; the first is the title in the list of runs, also for its options
    setting: int = 0  # place among the settings in tables with a line per figure; 0: not there
    line: int = 0  # place among the figures there
    speed: int = 0  # place in the table of speeds with a row per run
    learning: bool = False  # whether in the table of learning with a row per run, as all figures of `LEARNING` are
    listed: tuple[int, int] = (0, 0)  # place in the list of runs, and in the order of those dropped on a narrow terminal (0: never)
    only_with: str = ""  # shown only if a run's summary has this figure
    compute: Callable[[Mapping[str, Any]], Any] | None = None  # from a row's other figures; `path` then has its type alone
    derived: bool = False  # follows from others, so the table of one run omits it
    averaged: bool = True  # whether the mean of repeats has a meaning
    unit: str = ""  # of the values; that of a speed is its label, and texts by `_SHOWN` have it

    def __post_init__(self) -> None:
        """Set what follows from key and unit."""
        label = self.label or (self.unit if self.unit in SPEEDS else self.key.replace("_", " "))
        key, fields = self.key.removeprefix("node_"), (NodeSummary if self.of_node else Summary).model_fields
        path = self.path or ((key,) if key in fields else tuple(key.rsplit("_", 1)))
        show = _SHOWN.get(self.unit, plain) if self.show is plain else self.show
        for name, value in (("label", label), ("header", self.header or label), ("path", path), ("show", show)):
            object.__setattr__(self, name, value)

    @property
    def relative_key(self) -> str:
        """The key of the figure relative to the first row's, for `better`."""
        return f"relative_{self.key.removesuffix('_seconds')}"

    @property
    def of_node(self) -> bool:
        """Whether each node has a value."""
        return self.key.startswith("node_")


IN_TRAINING = " in training"  # of traffic over the training time alone
# In the order of rows and CSV; metrics add ``eval_``, ``best_eval_`` and ``end_`` keys. Profiled updates and their time are not in speeds.
COLUMNS: tuple[Column, ...] = (
    Column("run", names=("name",), listed=(1, 0)),
    Column("state", setting=1, listed=(2, 0)),
    Column("backend", setting=2, listed=(3, 6)),
    Column("mode", setting=3, listed=(4, 5)),
    Column("model", setting=4, listed=(5, 2)),
    Column("data", setting=5, listed=(6, 1)),
    Column("synthetic"),
    Column("nodes", show=count_text, setting=7, listed=(7, 4), averaged=False),
    Column("workers", show=count_text, setting=8, averaged=False),
    Column("parameter_servers", show=count_text, setting=9, averaged=False),
    Column("batch_size", averaged=False),
    Column(
        "global_batch_size", "global batch", _batch, header="global batch size", names=("batch",), setting=11, listed=(8, 8), averaged=False
    ),
    Column("batch_tokens"),
    Column("padding_share"),
    Column("optimizer"),
    Column("learning_rate", show=number_text, averaged=False),
    Column("seed", averaged=False),
    Column("resumed", averaged=False),
    Column("precision"),
    Column("precision_used", "precision", header="precision used", setting=6),
    Column("device_used"),
    Column("compiled"),
    Column("model_method", "model execution", setting=12),
    Column("adapter_cost", averaged=False),
    Column("exchange", setting=10),
    Column("network_source"),
    Column("nodes_sharing_cores", averaged=False),
    Column("updates_by_worker"),
    Column("steps", show=count_text, line=1),
    Column("updates_applied"),
    Column("examples", show=count_text, line=2),
    Column("epochs", show=decimal),
    Column("examples_per_second", unit="examples/s", group=SPEED, better=1, line=3, speed=1, listed=(9, 100)),
    Column("steps_per_second", unit="steps/s", group=STEPS, line=4, speed=2),
    Column("init_seconds", "start-up time", unit="s", group=SPEED, line=6, speed=5),
    Column("train_seconds", "training time", unit="s", group=TIME, line=7, speed=4),
    Column("profile_seconds", "profiling time", unit="s", header="profiling", line=18, only_with="profiled_updates"),
    Column("profiled_updates", "profiled updates", count_text, None, "profiled", line=17, only_with="profiled_updates"),
    Column("run_seconds", "run time (after start-up)", unit="s", group=TIME, header="run time", names=("time",), line=5, speed=3),
    Column("total_seconds", "total time", unit="s", group=TIME),
    Column("final_train_loss", "final train loss", number_text, LOSS, "train loss", names=("train_loss",), line=8),
    Column("target"),
    Column("target_reached"),
    Column(
        "time_to_target_seconds", "time to target", unit="s", group=TARGET, better=-1, names=("time_to_target",), line=12, listed=(30, 9)
    ),
    Column("restarts", show=count_text, line=14, only_with="restarts", averaged=False),
    Column("restart_seconds_lost", "lost by restarts", unit="s", header="lost", line=15, only_with="restarts"),
    Column("worker_restarts", averaged=False),
    Column("worker_absent_seconds", "workers absent", unit="s", header="absent", line=16, only_with="restarts"),
    Column("eval_loss", "test loss", number_text, LOSS, names=("loss",), line=9, listed=(10, 7)),
    Column("eval_accuracy", "test accuracy", number_text, METRICS, header="accuracy", names=("accuracy",), line=10),
    Column("best_eval_accuracy", "best accuracy", number_text, METRICS),
    Column("step_seconds_p50", "median step", seconds_text, STEPS, unit="s"),
    Column("step_seconds_p95", "step, 95th percentile", seconds_text, STEPS, unit="s"),
    Column("group_size", path=("step_seconds", "group_size")),
    Column(
        "staleness_mean",
        "mean staleness (updates)",
        decimal,
        header="staleness",
        unit="updates",
        names=("staleness",),
        line=13,
        learning=True,
    ),
    Column("staleness_p95", "staleness p95", decimal, unit="updates"),
    Column("staleness_max", "staleness max", decimal, unit="updates"),
    Column(
        "eval_error",
        "test error",
        number_text,
        METRICS,
        header="error",
        path=("eval", "accuracy"),
        compute=_error,
        names=("error",),
        line=11,
        derived=True,
    ),
    Column("node_cpu_cores_used_mean", "CPU cores used", decimal, RESOURCES, header="CPU cores", names=("cpu",), line=1),
    Column("node_cpu_fraction_mean", "CPU share", unit="%", group=RESOURCES, header="CPU", line=2, derived=True),
    Column("node_memory_rss_bytes_max", "peak RSS", unit="bytes", group=RESOURCES, names=("memory",), line=3),
    Column("node_memory_pss_bytes_max", "sampled PSS", unit="bytes", group=RESOURCES, names=("pss",), line=4),
    Column("node_network_sent_bytes_per_second", "sent over the whole run", unit="bytes/s", group=RESOURCES, names=("sent",)),
    Column("node_network_received_bytes_per_second", "received over the whole run", unit="bytes/s", group=RESOURCES, names=("received",)),
    Column(
        "node_network_sent_bytes_per_train_second",
        f"sent{IN_TRAINING}",
        unit="bytes/s",
        group=RESOURCES,
        names=("sent_in_training",),
        line=5,
    ),
    Column(
        "node_network_received_bytes_per_train_second",
        f"received{IN_TRAINING}",
        unit="bytes/s",
        group=RESOURCES,
        names=("received_in_training",),
        line=6,
    ),
)
FIGURES: tuple[str, ...] = tuple(column.key for column in COLUMNS)  # keys of every row, in order
# Figures that depend on CPU contention: all of work, but not memory.
TIMED_FIGURES = frozenset(column.key for column in COLUMNS if column.group in WORK and column.unit != "bytes")
_PATHS = tuple((column.key, column.path, column.of_node) for column in COLUMNS)
_COMPUTED = {column.key: column.compute for column in COLUMNS if column.compute is not None}
_OF_METRICS = ("eval_", "best_eval_", "end_")
_NO_SCORES = frozenset(("split", "step", "sentences", "signature", "seconds"))  # other keys of a summary's final translation


def figure_type(name: str) -> Any:
    """Return the pydantic type of column of `FIGURES`; each may be None. Raises KeyError."""
    column = {column.key: column for column in COLUMNS}[name]
    return list[summary_type(("per_node", *column.path))] if column.of_node else summary_type(column.path)  # type: ignore[misc]


def metric_figures(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of rows that are not in `FIGURES`: further metrics, each once, in order."""
    names = dict.fromkeys(chain.from_iterable(rows))
    return [name for name in names if name not in FIGURES and name.startswith(_OF_METRICS)]


def evaluation_metrics(evaluation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metrics of an evaluation in a summary, by name."""
    return {name: value for name, value in (evaluation or {}).items() if name not in RESERVED_NAMES}


def metrics_at_the_end(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of the final translation, by name."""
    scores = summary.get("translated") or {}
    return {name: value for name, value in scores.items() if name not in _NO_SCORES and value is not None}


def row(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary as a flat row; ``node_`` figures are lists in node order."""
    nodes = summary["per_node"]
    flat = {key: [reach(node, path) for node in nodes] if of_node else reach(summary, path) for key, path, of_node in _PATHS}
    flat |= {key: compute(flat) for key, compute in _COMPUTED.items()}
    for kind in ("eval", "best_eval"):
        flat.update({f"{kind}_{name}": value for name, value in evaluation_metrics(summary.get(kind)).items()})
    return flat | {f"end_{name}": value for name, value in metrics_at_the_end(summary).items()}


def reach(value: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys; None if null or missing."""
    for name in path:
        if value is None:
            break
        value = value.get(name)
    return value


def metric_columns(runs: Iterable[Run]) -> list[Column]:
    """Return a column per metric of some runs; those of final translations are last."""
    # Labels of translation metrics have the search and the number of sentences, if all runs have the same.
    known = list(runs)
    infos = {info.name: info for run in reversed(known) for info in reversed(run.metrics) if info != LOSS_INFO}
    translated = frozenset().union(*(run.translation_metrics for run in known))
    training, end = Searched.while_training(known), Searched.from_signatures(map(scored_at_the_end, known))
    return [
        *(_evaluated(info, training if info.name in translated else None) for info in reversed(infos.values())),
        *(_final(info, end) for info in dict.fromkeys(info for run in known for info in run.metrics_at_the_end)),
    ]


def _evaluated(info: MetricInfo, searched: Searched | None) -> Column:
    if searched is None:
        return Column(f"eval_{info.name}", f"test {info.label}", partial(figure_text, info.name), METRICS, info.label)
    label, header = f"test {info.label}{searched.in_brackets()}", f"{info.label}{searched.method_in_brackets}"
    return Column(f"eval_{info.name}", label, partial(figure_text, info.name), TRANSLATIONS, header)


def _final(info: MetricInfo, searched: Searched) -> Column:
    label = f"{info.label} at the end"
    return Column(f"end_{info.name}", f"{label}{searched.in_brackets('sentences')}", partial(figure_text, info.name), AT_THE_END, label)


def run_columns(runs: Iterable[Run]) -> list[Column]:
    """Return the lines of a table of figures of these runs, with their own metrics."""
    # The error, 1 − accuracy, has a line if a run has the accuracy of a classifier, and none a metric of that name.
    known = list(runs)
    lines = sorted((column for column in COLUMNS if column.line and not column.of_node), key=lambda column: column.line)
    lines = [column for column in lines if not column.only_with or any(run.summary.get(column.only_with) for run in known)]
    place = next(index for index, column in enumerate(lines) if column.group == METRICS)
    of_classifiers = {column.key: column for column in lines if column.group == METRICS}
    by_metric = {column.key: column for column in metric_columns(known)} or {"eval_accuracy": of_classifiers["eval_accuracy"]}
    metrics = [by_metric.pop("eval_accuracy")] if "eval_accuracy" in by_metric else []
    if "eval_error" not in by_metric and (any(ACCURACY.info in run.metrics for run in known) or not known):
        metrics.append(of_classifiers["eval_error"])
    return [*lines[:place], *metrics, *by_metric.values(), *(column for column in lines[place:] if column.group != METRICS)]


def node_columns() -> list[Column]:
    """Return the figures of each node in tables."""
    return [column for column in COLUMNS if column.line and column.of_node]


def figure_key(option: str, text: str, figures: Iterable[str], names: Mapping[str, str]) -> str:
    """Return the key among `figures` that `text` names, also by further `names`.

    Raises UsageError, with the option.
    """
    # A metric has precedence over further names, as it is the run's own.
    known = list(dict.fromkeys(figures))
    every = {**names} | {key.replace("eval_", "", 1): key for key in known} | {key: key for key in known}
    name = text.strip().lower().replace("-", "_")
    if name in every:
        return every[name]
    close = nearest(name, [*known, *every])
    parts = [key for key in known if name and name in key]
    near = list(dict.fromkeys([*([close] if close else []), *parts]))[:4]
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Some are: {', '.join(names)}."
    raise UsageError(f"{option}: got {text!r}; allowed: a figure of the rows that --json prints. {hint}")


def column(text: str, further: Sequence[Column] = ()) -> Column:
    """Return the column of a key or short name, also in `further`. Raises UsageError."""
    best = [
        Column(f"best_{column.key}", f"best {column.header}", column.show, column.group)
        for column in further
        if column.key.startswith("eval_")
    ]
    known = {column.key: column for column in (*COLUMNS, *best, *further)}
    return known[figure_key("--metric", text, known, {name: column.key for column in COLUMNS for name in column.names})]
