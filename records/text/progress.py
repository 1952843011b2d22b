"""The progress of a run in words: the same on a terminal and in plain lines, for the run itself and for `trainer watch`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...core.job import Job
from ...metrics import MetricInfo
from ..schema import EvalRecord, SystemRecord
from ..summary.node_usage import rate_between
from .many_nodes import lines_of, statistic
from .numbers import UNKNOWN, bytes_text, duration_text, figure_text, number_text, rate_text

__all__ = ["NodeSamples", "TrainingState", "evaluation_text", "node_text"]

LEAST_TRAINED = 0.05
"""Over less than this part of the time between two samples a rate of training is not told: pauses are known about that well."""


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

    def end(self) -> None:
        """Training has ended, also before all of its updates."""
        self.time_left_seconds = None

    def line(self) -> str:
        """Return the state in one line."""
        total = f"/{self.total_steps:,}" if self.total_steps is not None else ""
        left = f"  {duration_text(self.time_left_seconds)} left" if self.time_left_seconds else ""
        speed = f"  {_steps(self.steps_per_second)}" if self.steps_per_second is not None else ""
        return f"step {self.step:,}{total}  epoch {int(self.epoch) + 1}  last loss {number_text(self.loss)}{speed}{left}"


def _steps(per_second: float | None) -> str:
    return UNKNOWN if per_second is None else rate_text(per_second).replace("/s", " steps/s")


def evaluation_text(record: EvalRecord, metrics: Iterable[MetricInfo]) -> str:
    """Return an evaluation in one line; `metrics` are the run's, by whose labels its figures are called, as everywhere."""
    labels = {info.name: info.label for info in metrics}
    shown = "".join(f"  {labels.get(name, name)} {figure_text(name, value)}" for name, value in record.metrics.items())
    return f"evaluated after step {record.step:,}  epoch {record.epoch:.4g}  {record.split} loss {number_text(record.loss)}{shown}"


class NodeSamples:
    """The last sample of each node, and its traffic since the one before.

    With `until_shown` it is that since `shown` was last called, over the time in which training was not `paused`.
    """

    def __init__(self, *, until_shown: bool = False) -> None:
        self._until_shown = until_shown
        self._pauses: list[tuple[float, float]] = []
        self._paused_since = math.inf
        self._of = " of training" if until_shown else ""
        self._samples: dict[int, tuple[SystemRecord | None, SystemRecord]] = {}

    def add(self, record: SystemRecord) -> None:
        """Take note of a sample."""
        since, last = self._samples.get(record.node, (None, None))
        if not self._until_shown or since is None or rate_between(last, record, "network_sent_bytes") is None:
            since = last
        self._samples[record.node] = (since, record)

    def shown(self) -> None:
        """Count traffic from the last samples on."""
        self._samples = {node: (None, last) for node, (_, last) in self._samples.items()}
        first = min((last.time_seconds for _, last in self._samples.values()), default=0.0)
        self._pauses = [pause for pause in self._pauses if pause[1] > first]

    def paused(self, start: float, end: float) -> None:
        """Training has paused from `start` to `end` on the run clock."""
        self._pauses.append((start, end))

    def pausing(self, since: float = math.inf) -> None:
        """Training pauses since that time on the run clock; by default it does not."""
        self._paused_since = since

    def rows(self, nodes: int | None = None) -> list[Mapping[str, str]]:
        """Return what to show of each node, in node order, or of many nodes together; a dash stands for what was not observed.

        `nodes` is how many the run has now, where it may have had more before.
        """
        samples = self._samples.copy()  # whoever draws may do so in a thread of its own
        found = [
            _figures(*samples[node], [*self._pauses, (self._paused_since, math.inf)])
            for node in sorted(samples)
            if nodes is None or node < nodes
        ]
        lines = lines_of(len(found))
        if lines == [*range(len(found))]:
            return [_row(str(figures["node"]), figures, self._of) for figures in found]
        return [
            _row(f"{name} of {len(found):,}", {key: statistic(str(name), [one[key] for one in found]) for key in found[0]}, self._of)
            for name in lines
        ]


def node_text(row: Mapping[str, str]) -> str:
    """Return a row of `NodeSamples` in one line."""
    named = f"node {row['node']}" if row["node"].isdigit() else f"{row['node']} nodes"
    return "  ".join([named, *(f"{name} {text}" for name, text in row.items() if name != "node")])


def _figures(before: SystemRecord | None, record: SystemRecord, pauses: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    rates = [rate_between(before, record, f"network_{way}_bytes") for way in ("sent", "received")]
    seconds = trained = 0.0
    if before is not None:
        first, last = before.time_seconds, record.time_seconds
        seconds = last - first
        trained, until = seconds, first
        for start, end in sorted(pauses):  # they may overlap
            trained -= max(0.0, min(end, last) - max(start, until))
            until = max(until, end)
    sent, received = (None if rate is None or trained < LEAST_TRAINED * seconds else rate * seconds / trained for rate in rates)
    return {
        "node": record.node,
        "cores": record.cpu_cores_used,
        "available": record.cores_available,
        "memory": record.memory_rss_bytes,
        "sent": sent,
        "received": received,
        "over": None if sent is received is None else trained,
    }


def _row(label: str, figures: Mapping[str, float | None], of: str) -> Mapping[str, str]:
    cores, available = figures["cores"], figures["available"]
    return {
        "node": label,
        "CPU": UNKNOWN if cores is None else f"{cores:.2f}" + (f" of {available:g} cores" if available else " cores"),
        "memory": bytes_text(figures["memory"]),
        "sent": bytes_text(figures["sent"], per_second=True),
        "received": bytes_text(figures["received"], per_second=True),
        "over": UNKNOWN if figures["over"] is None else f"{duration_text(figures['over'])}{of}",
    }
