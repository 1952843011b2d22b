"""The schema of the run directory's JSON lines. Units stand in names; what could not be observed is null, never 0.

``time_seconds`` counts from the start of the run clock (negative during initialisation) and is read from the driver's clock alone,
so that records of different nodes lie on one time axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

import msgspec

from ..metrics import LOSS

__all__ = [
    "COUNTERS",
    "GAUGES",
    "GPU_GAUGES",
    "MOST_PROBLEMS",
    "MOST_PROBLEM_CHARACTERS",
    "SCHEMA",
    "Clock",
    "EvalRecord",
    "EventRecord",
    "GpuSample",
    "StepRecord",
    "SystemRecord",
    "TaskSample",
]

SCHEMA = 1

Index = Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
"""The number of a node or worker. Readers refuse what is out of these bounds; writers do not look at them."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""As far as a float64 counts exactly."""

Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""Thirty thousand years; never NaN, as it is an axis of figures."""

MOST_PROBLEMS = 64
MOST_PROBLEM_CHARACTERS = 1000
"""Of what a monitor could not observe: so many texts of that length stand in one sample at most, and in one line."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A line of ``steps.jsonl``: a group of consecutive updates, as the framework carried them out.

    `learning_rates` and `losses` have `count` entries, and so has `staleness` in async mode. `step` is the first update's number,
    from 0. `epoch` counts from 0. Waits are seconds within `seconds`, null where not measured. A group of a single learning rate
    stores that one value. `profiled_seconds` is null unless a worker traced its updates (``--profile``) when the group was made: then it is
    how long the run had trained since the group before, which includes starting and writing the trace.
    """

    step: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    epoch: Count
    time_seconds: Seconds
    seconds: Seconds
    examples: Count
    losses: tuple[float, ...]
    learning_rates: tuple[float, ...]
    data_wait_seconds: Seconds | None = None
    network_wait_seconds: Seconds | None = None
    worker: Index | None = None
    staleness: tuple[Count, ...] | None = None
    profiled_seconds: Seconds | None = None


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """A line of ``evals.jsonl``.

    `step` is the number of updates before the evaluation, `epoch` the number of epochs completed (may be a fraction);
    `metrics` has the figures of the model's objective by name (``job.json`` says which way each is better); `updates_applied` is counted
    where updates are applied.
    """

    step: Count
    epoch: float
    time_seconds: Seconds
    seconds: Seconds
    split: str
    examples: Count
    loss: float
    metrics: Mapping[str, float]
    updates_applied: Count

    def figure(self, name: str) -> float:
        """Return the loss or a metric by name; NaN where there is none of that name."""
        return self.loss if name == LOSS.name else self.metrics.get(name, math.nan)


@dataclass(frozen=True, slots=True)
class EventRecord:
    """A line of ``events.jsonl``: `event` is a snake_case name (``run_started``, ``epoch_ended``, ``task_ended`` …), `detail` its data."""

    event: str
    time_seconds: Seconds
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskSample:
    """One task in a resource sample. `cpu_seconds` is cumulative (user + system, the task and its children)."""

    task: str
    pid: int
    cpu_seconds: float | None
    memory_rss_bytes: Count | None
    memory_pss_bytes: Count | None
    network_sent_bytes: Count | None
    network_received_bytes: Count | None


class GpuSample(TypedDict, total=False):
    """One GPU in a resource sample; what it does not tell is null. `utilization` runs from 0 to 1; `tasks` are those that were given it."""

    name: str | None
    utilization: float | None
    memory_bytes: Count | None
    memory_total_bytes: Count | None
    power_watts: float | None
    tasks: list[str]


@dataclass(frozen=True, slots=True)
class SystemRecord:
    """A line of ``system.jsonl``: one node at one moment. Counters are cumulative since the node's monitor started.

    `cpu_seconds` sums the node's task trees; `cpu_cores_used` is its slope since the sample before, `cpu_fraction` that over
    `cores_available`. `network_sent_bytes` and `network_received_bytes` are the node's figures by `network_source`:
    ``interface`` (a node's own interface without ``lo``: frames), ``sockets`` (sum of its tasks' TCP payload), or null.
    `interfaces` has sent and received bytes of each interface. `monitor_cpu_seconds` is the cost of watching itself.
    `gpus` has every GPU of the machine, in PCI order, whoever uses it.
    `interval_seconds` is the time since the sample before. `part_began_seconds` is when the clock of the sample's segment of the run
    started, on the run clock: 0, where the checkpoint was from which a resumed run went on, or when a run went on with other nodes by
    itself. It is null in older records (`summary.segments`).
    The last six are counters, and null in older records too: `cpu_wait_seconds` is how long threads of the node's tasks were ready to run
    and waited for a core, `machine_cpu_seconds` what all programs of the machine used of the cores that the node may use,
    `trainer_cpu_seconds` what the node's agent used (on node 0 with the driver), `cpu_pressure_seconds` how long some task on the machine
    waited for a core, `cpu_granted_seconds` what the node's limit allowed over those of its periods in which the node ran at all, and
    `cpu_throttled_seconds` how long the limit held it up, summed over cores; the last two are null without a limit. They may have begun
    before the node's monitor did: only their rise means something.

    A line may stand for several consecutive `samples` of its node, where there are very many: counters, `tasks` and all that is no figure
    are then those of the last one, momentary figures (`GAUGES`, and `GPU_GAUGES` of each GPU) are means, `interval_seconds` is the time of
    all, and `merged` has for each momentary figure (``gpu0.utilization`` for one of a GPU) how many of them had it, and the largest.
    """

    node: Index
    time_seconds: Seconds
    interval_seconds: Seconds
    cpu_seconds: float | None
    cpu_cores_used: float | None
    cpu_fraction: float | None
    cores_available: float | None
    memory_rss_bytes: Count | None
    memory_pss_bytes: Count | None
    network_source: str | None
    network_sent_bytes: Count | None
    network_received_bytes: Count | None
    interfaces: Mapping[str, tuple[Count, Count]] | None
    disk_read_bytes: Count | None
    disk_written_bytes: Count | None
    gpus: tuple[GpuSample, ...] | None
    monitor_cpu_seconds: float | None
    tasks: tuple[TaskSample, ...] = ()
    problems: tuple[str, ...] = ()
    part_began_seconds: Seconds | None = None
    cpu_wait_seconds: float | None = None
    machine_cpu_seconds: float | None = None
    trainer_cpu_seconds: float | None = None
    cpu_pressure_seconds: float | None = None
    cpu_granted_seconds: float | None = None
    cpu_throttled_seconds: float | None = None
    samples: Annotated[int, msgspec.Meta(ge=1, le=2**53)] = 1
    merged: Mapping[str, tuple[Count, float]] | None = None

    @property
    def initialising(self) -> bool:
        """Whether it shows the initialisation of its segment of the run: it was taken before, or just when, that one's clock started."""
        return self.time_seconds <= (self.part_began_seconds or 0.0)

    def merged_as(self, name: str) -> tuple[int, float | None]:
        """Return how many samples with a momentary figure of this name the line stands for, and its largest value where it is of several.

        One where it is of a single sample, whose own value is the largest.
        """
        return (1, None) if self.merged is None else self.merged.get(name, (0, None))


COUNTERS = (
    "cpu_seconds",
    "network_sent_bytes",
    "network_received_bytes",
    "disk_read_bytes",
    "disk_written_bytes",
    "monitor_cpu_seconds",
    "cpu_wait_seconds",
    "machine_cpu_seconds",
    "trainer_cpu_seconds",
    "cpu_pressure_seconds",
    "cpu_granted_seconds",
    "cpu_throttled_seconds",
)
"""The cumulative figures of a `SystemRecord`."""

GAUGES = ("cpu_cores_used", "cpu_fraction", "memory_rss_bytes", "memory_pss_bytes")
"""Its momentary figures."""

GPU_GAUGES: tuple[Literal["utilization", "memory_bytes", "power_watts"], ...] = ("utilization", "memory_bytes", "power_watts")
"""Those of each of its GPUs."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The run's times, by MLPerf training's rules: initialisation apart, the run clock never pauses.

    `init_seconds` from command to run clock; `run_seconds` the run clock at the end; `train_seconds` the part inside train commands,
    `eval_seconds` and `checkpoint_seconds` those inside evaluation and saving; `total_seconds` from command to the end of the run.
    `translate_seconds` is the part in which all test sentences were translated at the end, whether that was finished or not.
    `earlier` has what the segments before the last spent of each of those five, of a run that was resumed.
    `train_seconds_by_node` is the time that the node's busiest leading task (sync) or worker (async, where measured) spent training.
    """

    init_seconds: float
    run_seconds: float
    train_seconds: float
    eval_seconds: float
    checkpoint_seconds: float
    total_seconds: float
    train_seconds_by_node: tuple[float | None, ...] = ()
    translate_seconds: float = 0.0
    earlier: Mapping[str, float] = field(default_factory=dict)
