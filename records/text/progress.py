"""The progress of a run in words: the same on a terminal and in plain lines, for the run itself and for `trainer watch`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...core.job import Job
from ...metrics import MetricInfo
from ..schema import EvalRecord, SystemRecord
from ..summary.node_usage import rate_between
from .many_nodes import lines_of, statistic
from .numbers import UNKNOWN, bytes_text, duration_text, figure_text, number_text, rate_text

__all__ = ["NodeSamples", "TrainingState", "evaluation_text", "named"]


@dataclass(slots=True)
class TrainingState:
    """The last that is known of the training."""

    title: str = ""
    total_steps: int | None = None
    step: int = 0
    loss: float | None = None
    steps_per_second: float | None = None
    time_left_seconds: float | None = None
    epoch: float = 0

    def begin(self, job: Job, total_steps: int | None) -> None:
        """A run begins."""
        nodes = f"{job.nodes} node{'s' if job.nodes > 1 else ''}"
        self.title = f"{job.model} on {job.data}, {job.backend} {job.mode}, {nodes}, {job.workers} worker{'s' if job.workers > 1 else ''}"
        self.total_steps = total_steps

    def update(self, step: int, loss: float, steps_per_second: float | None, time_left_seconds: float | None, epoch: float) -> None:
        """Take note of an update, as `Progress.update` describes it."""
        self.step, self.loss, self.epoch = step, loss, epoch
        self.steps_per_second, self.time_left_seconds = steps_per_second, time_left_seconds

    def line(self) -> str:
        """Return the state in one line."""
        total = f"/{self.total_steps:,}" if self.total_steps is not None else ""
        left = f"  {duration_text(self.time_left_seconds)} left" if self.time_left_seconds is not None else ""
        speed = f"  {_steps(self.steps_per_second)}" if self.steps_per_second is not None else ""
        return f"step {self.step:,}{total}  epoch {int(self.epoch) + 1}  loss {number_text(self.loss)}{speed}{left}"


def _steps(per_second: float | None) -> str:
    return UNKNOWN if per_second is None else rate_text(per_second).replace("/s", " steps/s")


def evaluation_text(record: EvalRecord, metrics: Iterable[MetricInfo]) -> str:
    """Return an evaluation in one line; `metrics` are the run's, by whose labels its figures are called, as everywhere."""
    labels = {info.name: info.label for info in metrics}
    shown = "".join(f"  {labels.get(name, name)} {figure_text(name, value)}" for name, value in record.metrics.items())
    return f"evaluated after step {record.step:,}  epoch {record.epoch:.4g}  {record.split} loss {number_text(record.loss)}{shown}"


class NodeSamples:
    """The last sample of each node, and its traffic since the one before."""

    def __init__(self) -> None:
        self._samples: dict[int, tuple[SystemRecord | None, SystemRecord]] = {}

    def add(self, record: SystemRecord) -> None:
        """Take note of a sample."""
        before = self._samples.get(record.node)
        self._samples[record.node] = (before[1] if before else None, record)

    def rows(self, nodes: int | None = None) -> list[Mapping[str, str]]:
        """Return what to show of each node, in node order, or of many nodes together; a dash stands for what was not observed.

        `nodes` is how many the run has now, where it may have had more before.
        """
        samples = self._samples.copy()  # whoever draws may do so in a thread of its own
        found = [_figures(*samples[node]) for node in sorted(samples) if nodes is None or node < nodes]
        lines = lines_of(len(found))
        if lines == [*range(len(found))]:
            return [_row(str(figures["node"]), figures) for figures in found]
        return [
            _row(f"{name} of {len(found):,}", {key: statistic(str(name), [one[key] for one in found]) for key in found[0]})
            for name in lines
        ]


def named(row: Mapping[str, str]) -> str:
    """Return what a row of `NodeSamples` is about, for a line of its own."""
    return f"node {row['node']}" if row["node"].isdigit() else f"{row['node']} nodes"


def _figures(before: SystemRecord | None, record: SystemRecord) -> dict[str, float | None]:
    return {
        "node": record.node,
        "cores": record.cpu_cores_used,
        "available": record.cores_available,
        "memory": record.memory_rss_bytes,
        "sent": rate_between(before, record, "network_sent_bytes"),
        "received": rate_between(before, record, "network_received_bytes"),
    }


def _row(label: str, figures: Mapping[str, float | None]) -> Mapping[str, str]:
    cores, available = figures["cores"], figures["available"]
    return {
        "node": label,
        "CPU": UNKNOWN if cores is None else f"{cores:.2f}" + (f" of {available:g} cores" if available else " cores"),
        "memory": bytes_text(figures["memory"]),
        "sent": bytes_text(figures["sent"], per_second=True),
        "received": bytes_text(figures["received"], per_second=True),
    }
