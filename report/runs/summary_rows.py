"""Summaries of finished runs as flat rows of figures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from ...core.job import Job
from ...core.settings.job_fields import environment_name, flag_name, idle_settings, is_boolean
from ...metrics import MetricInfo
from ...metrics.base import RESERVED_NAMES
from ...records.store.summary_schema import summary_type
from .run import Run, finished_run, labelled

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
# Keys of every row, in order; further metrics add ``eval_``, ``best_eval_`` and ``end_`` keys.
FIGURES: tuple[str, ...] = (*_PLAIN, *_NESTED, "eval_error", *_PER_NODE)
_OF_METRICS = ("eval_", "best_eval_", "end_")
_BESIDE_SCORES = frozenset(("split", "step", "sentences", "signature", "seconds"))  # other keys of a summary's final translation


def figure_type(name: str) -> Any:
    """Return the pydantic type of a figure; each may be None."""
    if name in _PER_NODE:
        return list[summary_type(("per_node", *_PER_NODE[name]))]  # type: ignore[misc]
    return summary_type(_NESTED.get(name, (name,)))


def metric_figures(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of rows that are not in `FIGURES`: further metrics, each once, in order."""
    return list(dict.fromkeys(name for row in rows for name in row if name not in FIGURES and name.startswith(_OF_METRICS)))


def metrics_of(evaluation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metrics of an evaluation in a summary, by name."""
    return {name: value for name, value in (evaluation or {}).items() if name not in RESERVED_NAMES}


def metrics_at_the_end(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of the final translation, by name."""
    scores = summary.get("translated") or {}
    return {name: value for name, value in scores.items() if name not in _BESIDE_SCORES and value is not None}


def load(paths: Sequence[Path | str]) -> list[dict[str, Any]]:
    """Return the summaries of the runs. Raises UsageError for a run without one."""
    return [{**run.summary, "run": run.name} for run in labelled([finished_run(path) for path in paths])]


def row(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary as a flat row; ``node_`` figures are lists in node order."""
    flat: dict[str, Any] = {name: summary.get(name) for name in _PLAIN}
    flat.update({name: reach(summary, path) for name, path in _NESTED.items()})
    accuracy = flat["eval_accuracy"]
    flat["eval_error"] = 1 - accuracy if isinstance(accuracy, int | float) else accuracy  # null, or the name of a non-finite value
    flat.update({name: [reach(node, path) for node in summary["per_node"]] for name, path in _PER_NODE.items()})
    for kind in ("eval", "best_eval"):
        flat.update({f"{kind}_{name}": value for name, value in metrics_of(summary.get(kind)).items()})
    return flat | {f"end_{name}": value for name, value in metrics_at_the_end(summary).items()}


def reach(value: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys; None if null or missing."""
    for name in path:
        if value is None:
            return None
        value = value.get(name)
    return value


def rows(paths: Sequence[Path | str]) -> list[dict[str, Any]]:
    """Return a flat row for each run, in order. Raises UsageError for a run without summary."""
    return [row(summary) for summary in load(paths)]


_PLACE = ("out", "name")  # the output location has no effect on the run


def repeat_command(described: Mapping[str, Any], environ: Container[str] = ()) -> str:
    """Return a ``trainer run`` with all settings not at their defaults, or set in `environ`."""
    words = ["trainer", "run"]
    idle = idle_settings({**Job().model_dump(), **described})
    for field, info in Job.model_fields.items():
        value = described.get(field)
        if field in _PLACE or field in idle or value is None or (value == info.default and environment_name(field) not in environ):
            continue
        if is_boolean(field):
            words.append(flag_name(field) if value else f"--no-{flag_name(field)[2:]}")
        else:
            words += [flag_name(field), ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return shlex.join(words)


@dataclass(frozen=True, slots=True)
class Searched:
    """The common parts of translation signatures, such as the `method` ``beam 4``; else None."""

    method: str | None = None
    sentences: int | None = None
    split_sentences: int | None = None

    @classmethod
    def of(cls, signatures: Iterable[str | None]) -> Self:
        """Parse signatures, such as ``…|beam4,penalty0.6,+50|sentences:2000``, or None."""
        known = {signature for signature in signatures if signature is not None}
        methods, counts = {_method(signature) for signature in known}, {_sentences(signature) for signature in known}
        return cls(methods.pop() if len(methods) == 1 else None, counts.pop() if len(counts) == 1 else None)

    @classmethod
    def while_training(cls, runs: Iterable[Run]) -> Self:
        """Return what the runs' evaluations in training have in common."""
        known = [run for run in runs if signature_while_training(run) is not None]
        sizes = {(((run.job.get("dataset") or {}).get("sizes")) or {}).get("test") for run in known}
        return replace(cls.of(map(signature_while_training, known)), split_sentences=sizes.pop() if len(sizes) == 1 else None)

    def in_brackets(self, unit: str = "") -> str:
        """Return a label's suffix: `` (greedy, 500 of 2,000)``, or with `unit`; may be empty."""
        of = "" if self.split_sentences is None else f" of {self.split_sentences:,}"
        count = None if self.sentences is None else f"{self.sentences:,}{of} {unit}".rstrip()
        known = [text for text in (self.method, count) if text is not None]
        return f" ({', '.join(known)})" if known else ""

    @property
    def method_in_brackets(self) -> str:
        """The method as a label's suffix, such as `` (greedy)``; may be empty."""
        return f" ({self.method})" if self.method is not None else ""


def _method(signature: str) -> str | None:
    found = re.search(r"(?:^|\|)(?:(greedy)|beam([0-9]{1,4}))(?:,|\||$)", signature)
    return None if found is None else found[1] or f"beam {found[2]}"


def _sentences(signature: str) -> int | None:
    found = re.search(r"(?:^|\|)sentences:([0-9]{1,15})(?:\||$)", signature)
    return None if found is None else int(found[1])


def searched(info: MetricInfo, runs: Sequence[Run]) -> str:
    """Return the label's suffix of a translation metric in training; else empty."""
    return Searched.while_training(runs).in_brackets() if any(info.name in run.translation_metrics for run in runs) else ""


def measured_on(info: MetricInfo, runs: Sequence[Run]) -> str:
    """Return a sentence on the data behind a figure of evaluations in training."""
    if not any(info.name in run.translation_metrics for run in runs):
        return "Over the whole test split, every example once."
    found = Searched.while_training(runs)
    count = "the first --eval-sentences" if found.sentences is None else f"the first {found.sentences:,}"
    of = "" if found.split_sentences is None else f" of {found.split_sentences:,}"
    how = "as each run says" if found.method is None else {"greedy": "greedily"}.get(found.method, f"with {found.method}")
    return f"Over {count}{of} test sentences, decoded {how}."


def signature_while_training(run: Run) -> str | None:
    """Return the signature of a translating run's evaluations in training, if any."""
    return _planned(run, "training")


def signature_at_the_end(run: Run) -> str | None:
    """Return the signature of a run's final translation, or of the planned one."""
    done: str | None = (run.summary.get("translated") or {}).get("signature")
    return done or _planned(run, "end")


def scored_at_the_end(run: Run) -> str | None:
    """Return the signature of the scores at a run's end, if any."""
    return signature_at_the_end(run) if run.metrics_at_the_end else None


def _planned(run: Run, when: str) -> str | None:
    signatures = run.job.get("translation_signatures")
    return None if not signatures else signatures.get(when)
