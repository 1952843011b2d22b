"""Resource use of each node while the run clock ran, from samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from .store.schema import COUNTERS, GAUGES, GPU_GAUGES, Clock, GpuSample, SystemRecord
from .time_shares import with_segments

_Figure = TypeVar("_Figure")
MIN_SECONDS = 2.0  # shorter samples are dominated by the end of initialisation, which they miss in part


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU use of a node in a segment, in cores; None where not observed.

    Cores are CPU seconds per second: `used` by its tasks, `waited` for a core by their threads, `trainer` used by agent and driver,
    `machine` by all programs on its `available` cores. With a quota: `granted` in periods in which it ran, and `throttled` by it.
    """

    used: float | None
    waited: float | None
    trainer: float | None
    machine: float | None
    available: float | None
    granted: float | None = None
    throttled: float | None = None
    seconds: float = MIN_SECONDS


@dataclass(frozen=True, slots=True)
class LostCpu:
    """CPU contention of a node, in cores.

    Other programs used `foreign`; its tasks `lost` part of that.
    """

    foreign: float
    lost: float | None
    used: float
    seconds: float

    @property
    def fraction(self) -> float | None:
        """The fraction (0 to 1) of requested CPU time used by other programs."""
        if self.lost is None:
            return None
        return self.lost / (self.used + self.lost) if self.lost else 0.0


def lost_cpu(nodes: Sequence[CpuUse], machines: Sequence[str | None]) -> list[LostCpu | None]:
    """Return each node's contention in a segment; None where other programs' use is unknown.

    Nodes on equal `machines` share one, and a node on None may share any. The loss is bounded by waits for other programs, their use and
    the node's potential use: waits for tasks or a quota are no loss. Foreign use is lost once, however many nodes waited for it.
    """
    foreign = [_foreign(node, _same_machine(nodes, machines, index)) for index, node in enumerate(nodes)]
    lost = [_lost(node, foreign_cores) for node, foreign_cores in zip(nodes, foreign, strict=True)]
    losses: list[LostCpu | None] = []
    for index, (node, foreign_cores, lost_cores) in enumerate(zip(nodes, foreign, lost, strict=True)):
        if foreign_cores is None or node.used is None:
            losses.append(None)
            continue
        all_lost = sum(cores or 0.0 for cores in _same_machine(lost, machines, index))
        share = None if lost_cores is None else lost_cores * min(1.0, foreign_cores / all_lost) if all_lost else 0.0
        losses.append(LostCpu(foreign_cores, share, node.used, node.seconds))
    return losses


def mean_over_segments(segments: Iterable[LostCpu | None]) -> LostCpu | None:
    """Return the mean contention over segments with known values; None without any."""
    known = [segment for segment in segments if segment is not None]
    seconds = sum(segment.seconds for segment in known)
    if not seconds:
        return None
    observed = [segment for segment in known if segment.lost is not None] or known
    spans = sum(segment.seconds for segment in observed)
    foreign, used = (sum(getattr(segment, name) * segment.seconds for segment in observed) / spans for name in ("foreign", "used"))
    lost = sum(segment.lost * segment.seconds for segment in observed if segment.lost is not None) / spans
    return LostCpu(foreign, None if observed[0].lost is None else lost, used, spans)


def _same_machine(figures: Sequence[_Figure], machines: Sequence[str | None], index: int) -> list[_Figure]:
    machine = machines[index]
    return [figure for figure, where in zip(figures, machines, strict=True) if machine is None or where is None or where == machine]


def _foreign(node: CpuUse, here: Sequence[CpuUse]) -> float | None:
    """Return the cores used by other programs; `here`: all nodes of the machine."""
    run_cores = [figure for neighbour in here for figure in (neighbour.used, neighbour.trainer)]
    if node.machine is None or None in run_cores:
        return None
    return max(0.0, node.machine - sum(figure or 0.0 for figure in run_cores))


def _lost(node: CpuUse, foreign: float | None) -> float | None:
    """Return the cores lost to `foreign` ones, bounded by any granted quota.

    The kernel counts throttling as waiting.
    """
    if foreign is None or node.used is None or node.waited is None or node.available is None or node.machine is None:
        return None
    other_cores = node.machine - node.used
    waited = max(0.0, node.waited - (node.throttled or 0.0)) * (min(1.0, foreign / other_cores) if other_cores > 0 else 0.0)
    most = node.available if node.granted is None else min(node.available, node.granted)
    return max(0.0, min(waited, foreign, most - node.used))


def rate_between(before: SystemRecord | None, record: SystemRecord, name: str) -> float | None:
    """Return a counter's slope between samples.

    None across segments, without figures, or where it fell (its source restarted).
    """
    if before is None or before.part_began_seconds != record.part_began_seconds:
        return None
    first, last = getattr(before, name), getattr(record, name)
    seconds = record.time_seconds - before.time_seconds
    if first is None or last is None or seconds <= 0 or last < first:
        return None
    rise: float = (last - first) / seconds
    return rise


class Counter:
    """Increase of a counter over `seconds` of the run clock.

    Falls (its source restarted) are ignored.
    """

    def __init__(self) -> None:
        self.increase: float | None = None
        self.seconds = 0.0
        self._last: tuple[float, float] | None = None

    def add(self, value: float | None, time_seconds: float) -> None:
        """Add a value, None if not observed, at this run time in seconds."""
        if value is None:
            return
        if self._last is not None:
            self.increase = (self.increase or 0) + max(0, value - self._last[0])
            self.seconds += time_seconds - self._last[1]
        self._last = (value, time_seconds)

    def reset(self) -> None:
        """Restart: the next value is not comparable with earlier ones."""
        self._last = None

    @property
    def per_second(self) -> float | None:
        """Mean slope, None without two values."""
        return self.increase / self.seconds if self.increase is not None and self.seconds > 0 else None


class _Gauge:
    def __init__(self) -> None:
        self.total = 0.0
        self.samples = 0
        self.max: float | None = None

    def add(self, value: float | None, samples: int = 1, largest: float | None = None) -> None:
        """Add the mean over so many samples and their maximum."""
        if value is None or not samples:
            return
        self.total += value * samples
        self.samples += samples
        largest = value if largest is None else largest
        self.max = largest if self.max is None else max(self.max, largest)

    @property
    def mean(self) -> float | None:
        return self.total / self.samples if self.samples else None

    def to_json(self) -> dict[str, float | None] | None:
        return {"mean": self.mean, "max": self.max} if self.samples else None


class _Gpu:
    def __init__(self, name: str | None) -> None:
        self._name = name
        self._gauges = {name: _Gauge() for name in GPU_GAUGES}
        self._tasks: dict[str, None] = {}

    def add(self, index: int, sample: GpuSample, record: SystemRecord) -> None:
        """Add a GPU's sample from a record, which may merge several samples."""
        for name, gauge in self._gauges.items():
            gauge.add(sample.get(name), *record.merged_as(f"gpu{index}.{name}"))
        self._tasks.update(dict.fromkeys(sample.get("tasks", ())))

    def to_json(self) -> dict[str, Any]:
        figures: dict[str, Any] = {name: gauge.to_json() for name, gauge in self._gauges.items()}
        return {"name": self._name, **figures, "tasks": list(self._tasks)}


class Lines:
    """Counts of sample lines and of the samples merged in them."""

    def __init__(self) -> None:
        self._lines = self._samples = 0
        self._most = 1

    def counted(self, samples: Iterable[SystemRecord]) -> Iterator[SystemRecord]:
        """Yield and count samples."""
        for record in samples:
            self._lines += 1
            self._samples += record.samples
            self._most = max(self._most, record.samples)
            yield record

    @property
    def thinned(self) -> dict[str, int] | None:
        """The counts for a summary; None where each line is one sample."""
        return None if self._most == 1 else {"samples": self._samples, "lines": self._lines, "most_samples_of_a_line": self._most}


class _Node:
    """Figures of one node.

    Counters span the clock's start and end, so that short runs miss nothing.
    """

    def __init__(self, run_seconds: float) -> None:
        self._run_seconds = run_seconds
        self._segment: float | None = None
        self._baseline: SystemRecord | None = None
        self._begun = self._ended = False
        self._counters = {name: Counter() for name in COUNTERS}
        self._by_segment: dict[float | None, dict[str, Counter]] = {}
        self._gauges = {name: _Gauge() for name in GAUGES}
        self._gpus: dict[int, _Gpu] = {}
        self._cores_available: float | None = None
        self.sources: set[str] = set()
        self._samples = 0

    def add(self, record: SystemRecord) -> None:
        if record.part_began_seconds != self._segment:  # its monitors restarted before its clock
            self._segment, self._begun, self._baseline = record.part_began_seconds, False, None
            for counter in self._counters.values():
                counter.reset()
            self._by_segment.setdefault(self._segment, {name: Counter() for name in COUNTERS})
        if self._ended:
            return
        if record.initialising:
            self._baseline = record
            return
        if not self._begun:
            self._begun = True
            if self._baseline is not None:
                self._count(self._baseline)
        self._count(record)
        self._measure(record)
        self._ended = record.time_seconds >= self._run_seconds

    def _count(self, record: SystemRecord) -> None:
        for counters in (self._counters, self._by_segment[self._segment]):
            for name, counter in counters.items():
                counter.add(getattr(record, name), record.time_seconds)

    def _measure(self, record: SystemRecord) -> None:
        self._samples += record.samples
        for name, gauge in self._gauges.items():
            gauge.add(getattr(record, name), *record.merged_as(name))
        for index, gpu in enumerate(record.gpus or ()):
            self._gpus.setdefault(index, _Gpu(gpu.get("name"))).add(index, gpu, record)
        if record.cores_available is not None:
            self._cores_available = record.cores_available
        if record.network_source is not None:
            self.sources.add(record.network_source)

    def _cpu(self, name: str, mean: float | None) -> dict[str, float | None] | None:
        largest = self._gauges[name].max
        return None if mean is None and largest is None else {"mean": mean, "max": largest}

    @property
    def segments(self) -> Iterable[float | None]:
        """Segments in which the node took part."""
        return self._by_segment.keys()

    def cpu_use(self, segment: float | None) -> CpuUse:
        """Return the CPU use in a segment, empty if samples cover too little time."""
        counters = self._by_segment[segment]
        if counters["cpu_seconds"].seconds < MIN_SECONDS:
            return CpuUse(None, None, None, None, None)
        return CpuUse(
            used=counters["cpu_seconds"].per_second,
            waited=counters["cpu_wait_seconds"].per_second,
            trainer=counters["trainer_cpu_seconds"].per_second,
            machine=counters["machine_cpu_seconds"].per_second,
            available=self._cores_available,
            granted=counters["cpu_granted_seconds"].per_second,
            throttled=counters["cpu_throttled_seconds"].per_second,
            seconds=counters["cpu_seconds"].seconds,
        )

    def to_json(self) -> dict[str, Any]:
        counters = self._counters
        cores_mean = counters["cpu_seconds"].per_second
        cores = self._cores_available
        sent, received = counters["network_sent_bytes"], counters["network_received_bytes"]
        return {
            "samples": self._samples,
            "cores_available": cores,
            "cpu_seconds": counters["cpu_seconds"].increase,
            "cpu_cores_used": self._cpu("cpu_cores_used", cores_mean),
            "cpu_fraction": self._cpu("cpu_fraction", cores_mean / cores if cores_mean is not None and cores else None),
            "memory_rss_bytes": self._gauges["memory_rss_bytes"].to_json(),
            "memory_pss_bytes": self._gauges["memory_pss_bytes"].to_json(),
            "network_source": _one(self.sources),
            "network_sent_bytes": sent.increase,
            "network_received_bytes": received.increase,
            "network_sent_bytes_per_second": sent.per_second,
            "network_received_bytes_per_second": received.per_second,
            "disk_read_bytes": counters["disk_read_bytes"].increase,
            "disk_written_bytes": counters["disk_written_bytes"].increase,
            "gpus": [self._gpus[index].to_json() for index in sorted(self._gpus)] or None,
            "monitor_cpu_seconds": counters["monitor_cpu_seconds"].increase,
            "monitor_cpu_cores_used": counters["monitor_cpu_seconds"].per_second,
            "cpu_wait_seconds": counters["cpu_wait_seconds"].increase,
            "cpu_pressure_fraction": counters["cpu_pressure_seconds"].per_second,
        }


def _one(values: Iterable[str]) -> str | list[str] | None:
    names = sorted(set(values))
    return names[0] if len(names) == 1 else names or None


def network_source(nodes: Iterable[Mapping[str, Any]]) -> str | list[str] | None:
    """Return the network source of all nodes: a name, or a list where they differ."""
    names: list[str] = []
    for node in nodes:
        source = node["network_source"]
        names += source if isinstance(source, list) else [] if source is None else [source]
    return _one(names)


def per_node(
    samples: Iterable[SystemRecord],
    nodes: int,
    clock: Clock,
    resumed_seconds: Sequence[float] = (),
    machines: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return the figures of `nodes` nodes, in node order; null where not observed.

    `machines` are equal where nodes share one; contention is unknown without them. `resumed_seconds` are run times of resumptions, perhaps
    from more nodes than now, whose use is not that of other programs.
    """
    usage = {node: _Node(clock.run_seconds) for node in range(nodes)}
    for sample in with_segments(samples, resumed_seconds):
        usage.setdefault(sample.node, _Node(clock.run_seconds)).add(sample)
    train = list(clock.train_seconds_by_node) + [None] * nodes
    lost = [None] * nodes if machines is None else _lost_cpu(usage, dict(enumerate(machines)))
    return [
        {
            "node": index,
            "train_seconds": train[index],
            **node.to_json(),
            "foreign_cpu_cores_used": None if loss is None else loss.foreign,
            "cpu_cores_lost": None if loss is None else loss.lost,
            "starved_fraction": None if loss is None else loss.fraction,
        }
        for (index, node), loss in zip(islice(usage.items(), nodes), lost, strict=True)
    ]


def _lost_cpu(nodes: Mapping[int, _Node], machines: Mapping[int, str]) -> list[LostCpu | None]:
    """Return each node's contention.

    `nodes` may include former ones, whose use counts as the run's on every machine.
    """
    by_node: dict[int, list[LostCpu | None]] = {index: [] for index in nodes}
    for segment in {segment: None for node in nodes.values() for segment in node.segments}:
        usage = {index: node.cpu_use(segment) for index, node in nodes.items() if segment in node.segments}
        for index, lost in zip(usage, lost_cpu([*usage.values()], [machines.get(index) for index in usage]), strict=True):
            by_node[index].append(lost)
    return [mean_over_segments(by_node[index]) for index in machines]
