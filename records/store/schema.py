"""Schema of the JSON lines; null means not observed, ``time_seconds`` is on the run clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints

import msgspec

from ...metrics import LOSS

SCHEMA = 1


def line_fields(record: type, number: Any, **overrides: Any) -> dict[str, Any]:
    """Return the types of a record's fields by name, to derive stricter or shorter types.

    `number` replaces float, and `overrides` have the types of some fields.
    """
    hints = get_type_hints(record, include_extras=True)
    return {name: overrides.get(name, _with_number(hint, number)) for name, hint in hints.items()}


def _with_number(hint: Any, number: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_with_number(part, number) for part in get_args(hint))]  # noqa: UP007 — of a tuple of types
    return number if hint is float else hint


Index = Annotated[int, msgspec.Meta(ge=0, lt=2**20)]  # number of a node or worker; only readers check bounds
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # a float64 counts exactly up to here
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]  # thirty thousand years; never NaN, as it is an axis
Float32 = Annotated[float, msgspec.Meta(description="float32")]  # in lines with the nine digits that identify it
MAX_PROBLEMS = 64
MAX_PROBLEM_CHARACTERS = 1000  # of a monitor, per sample or line


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Line of ``steps.jsonl``: consecutive updates from number `step`.

    Steps and epochs count from 0. `losses`, and `staleness` in async mode, have `count` entries; `learning_rates` too, or one if constant.
    `seconds` includes waits. `profiled_seconds`: training time since the last group with starting and writing the trace; null without
    (``--profile``).
    """

    step: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    epoch: Count
    time_seconds: Seconds
    seconds: Seconds
    examples: Count
    losses: tuple[Float32, ...]
    learning_rates: tuple[float, ...]
    data_wait_seconds: Seconds | None = None
    network_wait_seconds: Seconds | None = None
    worker: Index | None = None
    staleness: tuple[Count, ...] | None = None
    profiled_seconds: Seconds | None = None


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """Line of ``evals.jsonl``, after `step` updates and `epoch` (fractional) epochs.

    `metrics` are the objective's, by name.
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
        """Return the loss or a metric by name; NaN if missing."""
        return self.loss if name == LOSS.name else self.metrics.get(name, math.nan)


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Line of ``events.jsonl``.

    `event` is a snake_case name (``run_started`` …), `detail` its data.
    """

    event: str
    time_seconds: Seconds
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskSample:
    """Task in a resource sample.

    `cpu_seconds` is cumulative (user + system, the task and its children).
    """

    task: str
    pid: int
    cpu_seconds: float | None
    memory_rss_bytes: Count | None
    memory_pss_bytes: Count | None
    network_sent_bytes: Count | None
    network_received_bytes: Count | None


class GpuSample(TypedDict, total=False):
    """GPU in a resource sample.

    `utilization` is 0 to 1, `tasks` are those assigned to it, null is unknown.
    """

    name: str | None
    utilization: float | None
    memory_bytes: Count | None
    memory_total_bytes: Count | None
    power_watts: float | None
    tasks: list[str]


@dataclass(frozen=True, slots=True)
class SystemRecord:
    """Line of ``system.jsonl``: a node at one moment.

    Counters are cumulative since its monitor started. `cpu_seconds` sums the node's task trees; `cpu_cores_used` is its slope,
    `cpu_fraction` that over `cores_available`. Traffic by `network_source`: ``interface`` (frames, without ``lo``), ``sockets`` (its tasks'
    TCP payload), or null; `interfaces` has sent and received bytes of each. `monitor_cpu_seconds` is the monitor's cost. `gpus` has every
    GPU of the machine, in PCI order. `interval_seconds`: time since the last sample. `part_began_seconds`: start of the segment's clock on
    the run clock; null in older records (`time_shares.SegmentTracker`).

    Counters of which only increases count, missing in older records: `cpu_wait_seconds` of task threads for a core, `machine_cpu_seconds`
    of all programs on the node's cores, `trainer_cpu_seconds` of the agent (on node 0 with the driver), `cpu_pressure_seconds` in which a
    task of the machine waited for a core; of a quota `cpu_granted_seconds` in periods in which the node ran, and `cpu_throttled_seconds`
    summed over cores.

    A line of several `samples` has the last one's counters, `tasks` and other values, means of momentary figures (`GAUGES`, `GPU_GAUGES`),
    the total `interval_seconds`, and in `merged` each momentary figure's (``gpu0.utilization``) number of samples and maximum.
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
        """Whether it was taken before its segment's clock started."""
        return self.time_seconds <= (self.part_began_seconds or 0.0)

    def merged_as(self, name: str) -> tuple[int, float | None]:
        """Return the merged samples with this figure and its maximum; (1, None) for a single sample."""
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
GAUGES = ("cpu_cores_used", "cpu_fraction", "memory_rss_bytes", "memory_pss_bytes")  # momentary figures
GPU_GAUGES: tuple[Literal["utilization", "memory_bytes", "power_watts"], ...] = ("utilization", "memory_bytes", "power_watts")


@dataclass(frozen=True, slots=True)
class Clock:
    """Times of a run by MLPerf training's rules.

    Initialisation apart, the run clock never pauses. `init_seconds`: command to run clock; `run_seconds`: its end; `total_seconds`: command
    to end. `train_seconds`, `eval_seconds`, `checkpoint_seconds` and `translate_seconds` are parts; `earlier` has earlier segments' share.
    `train_seconds_by_node` is of the node's busiest leading task (sync) or worker (async).
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
