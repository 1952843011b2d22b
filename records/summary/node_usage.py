"""What did each node use while the run clock ran? Figures from the resource samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ..schema import COUNTERS, GAUGES, GPU_GAUGES, Clock, GpuSample, SystemRecord
from .lost_cpu import LEAST_SECONDS, CpuUse, LostCpu, lost_cpu, mean_over_segments
from .segments import with_segments

__all__ = ["Counter", "Lines", "network_source", "per_node", "rate_between"]


def rate_between(before: SystemRecord | None, record: SystemRecord, name: str) -> float | None:
    """Return how fast the cumulative figure `name` rose between two samples of a node.

    None where there is no sample before, or it is of another segment of the run, either lacks the figure, or it fell because its source
    began anew.
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
    """A cumulative figure over the run clock. A fall means that its source began anew, and is left out.

    `increase` is None until there are two values to compare; it was measured over `seconds`.
    """

    def __init__(self) -> None:
        self.increase: float | None = None
        self.seconds = 0.0
        self._last: tuple[float, float] | None = None

    def add(self, value: float | None, time_seconds: float) -> None:
        """Take in a value and when it was observed, in seconds of the run clock; None is what was not."""
        if value is None:
            return
        if self._last is not None:
            self.increase = (self.increase or 0) + max(0, value - self._last[0])
            self.seconds += time_seconds - self._last[1]
        self._last = (value, time_seconds)

    def reset(self) -> None:
        """What is added next is not comparable with what was added before."""
        self._last = None

    @property
    def per_second(self) -> float | None:
        """The mean slope, or None where nothing can be compared."""
        return self.increase / self.seconds if self.increase is not None and self.seconds > 0 else None


class _Gauge:
    """A momentary figure: its mean and maximum over the samples that have it."""

    def __init__(self) -> None:
        self.total = 0.0
        self.samples = 0
        self.max: float | None = None

    def add(self, value: float | None, samples: int = 1, largest: float | None = None) -> None:
        """Take in the mean over so many samples, of which this was the largest value: by default a single one."""
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
    """The figures of one GPU, and the tasks that were given it in some attempt of the run."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._gauges = {name: _Gauge() for name in GPU_GAUGES}
        self._tasks: dict[str, None] = {}

    def add(self, index: int, sample: GpuSample, record: SystemRecord) -> None:
        """Take in what a record, that may stand for several samples, has of the GPU."""
        for name, gauge in self._gauges.items():
            gauge.add(sample.get(name), *record.merged_as(f"gpu{index}.{name}"))
        self._tasks.update(dict.fromkeys(sample.get("tasks", ())))

    def to_json(self) -> dict[str, Any]:
        figures: dict[str, Any] = {name: gauge.to_json() for name, gauge in self._gauges.items()}
        return {"name": self._name, **figures, "tasks": list(self._tasks)}


class Lines:
    """How many lines of samples there are, and how many samples they stand for."""

    def __init__(self) -> None:
        self._lines = self._samples = 0
        self._most = 1

    def counted(self, samples: Iterable[SystemRecord]) -> Iterator[SystemRecord]:
        """Yield what is given, and count it."""
        for record in samples:
            self._lines += 1
            self._samples += record.samples
            self._most = max(self._most, record.samples)
            yield record

    @property
    def thinned(self) -> dict[str, int] | None:
        """What a summary says of it; None where each line is a sample."""
        return None if self._most == 1 else {"samples": self._samples, "lines": self._lines, "most_samples_of_a_line": self._most}


class _Node:
    """The figures of one node.

    Counters run from the last sample at or before the clock's start to the first at or after its end (where there are such), so that
    nothing of a short run falls between two samples; momentary figures are those of the samples after the start, up to the same end.
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
        if record.part_began_seconds != self._segment:
            self._go_on(record.part_began_seconds)
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

    def _go_on(self, segment: float | None) -> None:
        """A segment of the run begins whose monitors count anew, with samples from before its own clock's start."""
        self._segment, self._begun, self._baseline = segment, False, None
        for counter in self._counters.values():
            counter.reset()
        self._by_segment.setdefault(segment, {name: Counter() for name in COUNTERS})

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
        """Mean CPU use is that of the counter, exact over the run clock; the maximum is the busiest sample's."""
        largest = self._gauges[name].max
        return None if mean is None and largest is None else {"mean": mean, "max": largest}

    @property
    def segments(self) -> Iterable[float | None]:
        """The segments of the run in which it took part."""
        return self._by_segment.keys()

    def cpu_use(self, segment: float | None) -> CpuUse:
        """Return what is known of its cores during a segment of the run; nothing where the samples cover too little time."""
        counters = self._by_segment[segment]
        if counters["cpu_seconds"].seconds < LEAST_SECONDS:
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
            "gpus": self._gpu_figures(),
            "monitor_cpu_seconds": counters["monitor_cpu_seconds"].increase,
            "monitor_cpu_cores_used": counters["monitor_cpu_seconds"].per_second,
            "cpu_wait_seconds": counters["cpu_wait_seconds"].increase,
            "cpu_pressure_fraction": counters["cpu_pressure_seconds"].per_second,
        }

    def _gpu_figures(self) -> list[dict[str, Any]] | None:
        if not self._gpus:
            return None
        return [self._gpus[index].to_json() for index in sorted(self._gpus)]


def _one(values: Iterable[str]) -> str | list[str] | None:
    """Return the value that all agree on, the sorted list where they differ, None where there is none."""
    found = sorted(set(values))
    return None if not found else found[0] if len(found) == 1 else found


def network_source(nodes: Iterable[Mapping[str, Any]]) -> str | list[str] | None:
    """Return the network source of a run from the figures of its nodes: a name, or the list of them where nodes differ."""
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
    """Return the figures of each of `nodes` nodes, in node order; null for what no sample shows.

    `machines` has a name for the machine of each node, equal where nodes share one; without it which programs are others' is not known.
    `resumed_seconds` are the times on the run clock from which the run went on from a checkpoint, perhaps on more nodes than now:
    what nodes used that it has no longer is theirs, and not other programs'.
    """
    found = {node: _Node(clock.run_seconds) for node in range(nodes)}
    for sample in with_segments(samples, resumed_seconds):
        found.setdefault(sample.node, _Node(clock.run_seconds)).add(sample)
    train = list(clock.train_seconds_by_node) + [None] * nodes
    lost = [None] * nodes if machines is None else _lost_cpu(found, dict(enumerate(machines)))
    return [
        {
            "node": index,
            "train_seconds": train[index],
            **node.to_json(),
            "foreign_cpu_cores_used": None if loss is None else loss.foreign,
            "cpu_cores_lost": None if loss is None else loss.lost,
            "starved_fraction": None if loss is None else loss.fraction,
        }
        for (index, node), loss in zip(islice(found.items(), nodes), lost, strict=True)
    ]


def _lost_cpu(nodes: Mapping[int, _Node], machines: Mapping[int, str]) -> list[LostCpu | None]:
    """Return what other programs did to each node that has a machine; `nodes` has those besides that an earlier segment of the run had.

    Each segment of the run is looked at by itself, for in each other nodes may have been there, and for another time. Which machine a node
    had that is no longer there is not known; what it used counts as the run's own on each.
    """
    by_node: dict[int, list[LostCpu | None]] = {index: [] for index in nodes}
    for segment in {segment: None for node in nodes.values() for segment in node.segments}:
        there = {index: node.cpu_use(segment) for index, node in nodes.items() if segment in node.segments}
        for index, lost in zip(there, lost_cpu([*there.values()], [machines.get(index) for index in there]), strict=True):
            by_node[index].append(lost)
    return [mean_over_segments(by_node[index]) for index in machines]
