"""Thinning of resource samples: a line may merge several (`SystemRecord.merged`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

from .schema import COUNTERS, GAUGES, GPU_GAUGES, MAX_PROBLEMS, GpuSample, SystemRecord

BURST_BYTES = 8e6  # bytes at any rate: small or short runs keep every sample
BYTES_PER_SECOND = 7_000.0  # beyond the burst: the first hour of 1,000 nodes stays below 50 MB
STRETCH_SECONDS = 10.0  # interval of rate measurements
LINE_BYTES = 1_000.0  # assumed until lines are written
MAX_WAITING = 8  # samples of a node before they are merged
MORE_PROBLEMS = "and more, not shown because one line covers several samples"
_OF_TIME = frozenset({"cpu_cores_used", "cpu_fraction"})  # slopes, whose means are weighted by time


def merge_samples(samples: Iterable[SystemRecord]) -> SystemRecord:
    """Merge a node's consecutive samples, without rounding means of bytes.

    No counter may fall. Raises IndexError without samples.
    """
    known = [*samples]
    last = known[-1]
    if len(known) == 1:
        return last
    merged: dict[str, tuple[int, float]] = {}
    figures: dict[str, Any] = {}
    for name in GAUGES:
        figures[name] = _merge(merged, name, known, [getattr(sample, name) for sample in known])
    for name in COUNTERS:
        figures[name] = next((value for sample in reversed(known) if (value := getattr(sample, name)) is not None), None)
    distinct = tuple(dict.fromkeys(problem for sample in known for problem in sample.problems))
    return replace(
        last,
        **figures,
        gpus=None if last.gpus is None else tuple(_merged_gpu(merged, index, known, gpu) for index, gpu in enumerate(last.gpus)),
        interval_seconds=sum(sample.interval_seconds for sample in known),
        problems=distinct if len(distinct) <= MAX_PROBLEMS else (*distinct[: MAX_PROBLEMS - 1], MORE_PROBLEMS),
        samples=sum(sample.samples for sample in known),
        merged=merged,
    )


def _merged_gpu(merged: dict[str, tuple[int, float]], index: int, samples: list[SystemRecord], last: GpuSample) -> GpuSample:
    nothing: GpuSample = {}
    seen = [sample.gpus[index] if sample.gpus is not None and index < len(sample.gpus) else nothing for sample in samples]
    means = {name: _merge(merged, f"gpu{index}.{name}", samples, [gpu.get(name) for gpu in seen]) for name in GPU_GAUGES}
    return cast(GpuSample, {**last, **means})


def _as_line(sample: SystemRecord) -> SystemRecord:
    if sample.merged is None:
        return sample
    figures: dict[str, Any] = {name: _rounded(getattr(sample, name)) for name in GAUGES if name not in _OF_TIME}
    if sample.gpus is not None:
        figures["gpus"] = tuple({**gpu, "memory_bytes": _rounded(gpu.get("memory_bytes"))} for gpu in sample.gpus)
    return replace(sample, **figures)


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _merge(merged: dict[str, tuple[int, float]], name: str, samples: list[SystemRecord], values: list[float | None]) -> float | None:
    """Return a figure's mean; enter its number of samples and its maximum into `merged`."""
    count, largest, total, weights, total_of_all = 0, -math.inf, 0.0, 0.0, 0.0
    for sample, value in zip(samples, values, strict=True):
        if value is None:
            continue
        count_here, highest = sample.merged_as(name)
        count, largest = count + count_here, max(largest, value if highest is None else highest)
        weight = sample.interval_seconds if name in _OF_TIME else count_here
        total, weights, total_of_all = total + value * weight, weights + weight, total_of_all + value * count_here
    if not count:
        return None
    merged[name] = (count, largest)
    return total / weights if weights else total_of_all / count


class SampleThinner:
    """Thinning of a run's samples; times are seconds of any monotonic clock.

    `samples_per_line` is 1 until samples exceed `bytes_per_second` and nearly use up `burst_bytes`, then the sufficient power of two.
    """

    def __init__(self, burst_bytes: float = BURST_BYTES, bytes_per_second: float = BYTES_PER_SECOND) -> None:
        self.samples_per_line = 1
        self._burst_bytes, self._bytes_per_second = burst_bytes, bytes_per_second
        self._began: float | None = None
        self._stretch_began = 0.0
        self._came = self._lines = 0
        self._bytes_of_lines, self._known_lines = LINE_BYTES, 1
        self._waiting: dict[int, list[SystemRecord]] = {}
        self._last: dict[int, SystemRecord] = {}
        self._counts: dict[int, int] = {}
        self._wanted: set[int] = set()

    @property
    def nodes(self) -> int:
        """Number of nodes that have sent samples."""
        return len(self._counts)

    def wrote(self, line_bytes: int) -> None:
        """Note a written line of so many bytes."""
        self._bytes_of_lines += line_bytes
        self._known_lines += 1

    def want_each(self) -> None:
        """End a line with each node's next sample, as the run clock starts or stops."""
        self._wanted = set(self._counts)

    def add(self, sample: SystemRecord) -> list[SystemRecord]:
        """Add a sample with the thinner's `time_seconds`; return the lines to write."""
        node, now = sample.node, sample.time_seconds
        self._adapt(now)
        lines = []
        waiting = self._waiting.setdefault(node, [])
        before = self._last.get(node)
        fell = before is not None and _falls(before, sample)
        self._last[node] = sample
        if waiting and fell:
            lines.append(_as_line(merge_samples(waiting)))
            waiting.clear()
        waiting.append(sample)
        if len(waiting) == MAX_WAITING:
            waiting[:] = [merge_samples(waiting)]
        number = self._counts[node] = self._counts.get(node, 0) + 1
        if (number + node) % self.samples_per_line == 0 or fell or node in self._wanted:  # nodes take turns
            self._wanted.discard(node)
            lines.append(_as_line(merge_samples(waiting)))
            waiting.clear()
        self._lines += len(lines)
        return lines

    def flush(self) -> list[SystemRecord]:
        """Return lines for all pending samples."""
        lines = [_as_line(merge_samples(waiting)) for waiting in self._waiting.values() if waiting]
        self._waiting.clear()
        self._lines += len(lines)
        return lines

    def _adapt(self, now: float) -> None:
        if self._began is None:
            self._began = self._stretch_began = now
        self._came += 1
        seconds = now - self._stretch_began
        if seconds < STRETCH_SECONDS:
            return
        line_bytes = self._bytes_of_lines / self._known_lines
        needed = self._came * line_bytes / seconds
        left = self._burst_bytes + self._bytes_per_second * (now - self._began) - self._lines * line_bytes
        self._stretch_began, self._came = now, 0
        excess = needed / self._bytes_per_second
        if excess > self.samples_per_line and (self.samples_per_line > 1 or left < needed * STRETCH_SECONDS):
            self.samples_per_line = 2 ** math.ceil(math.log2(excess))
        elif excess <= self.samples_per_line / 4:
            self.samples_per_line = 2 ** max(0, math.ceil(math.log2(excess)))


def _falls(before: SystemRecord, after: SystemRecord) -> bool:
    """Return whether a counter or segment restarted, which no line may hide."""
    if before.part_began_seconds != after.part_began_seconds:
        return True
    pairs = ((getattr(before, name), getattr(after, name)) for name in COUNTERS)
    return any(first is not None and last is not None and last < first for first, last in pairs)
