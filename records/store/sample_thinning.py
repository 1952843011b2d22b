"""Fewer lines of resource samples where many nodes send many: a line then stands for several consecutive samples of its node.

Counters of such a line are those of its last sample, so that no rise is lost; momentary figures are means, with how many samples had them
and the largest (`SystemRecord.merged`). What depends on time alone is a function of the records that came in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

from ..schema import COUNTERS, GAUGES, GPU_GAUGES, MOST_PROBLEMS, GpuSample, SystemRecord

__all__ = ["BURST_BYTES", "BYTES_PER_SECOND", "SampleThinner", "merge_samples"]

BURST_BYTES = 8e6
"""So many bytes of samples are written whatever their rate: runs of a few nodes, or of a few minutes, keep every sample."""

BYTES_PER_SECOND = 7_000.0
"""Beyond that no more than this: 25 MB in an hour. TensorBoard's files are a quarter of it, so that with updates and documents of 1,000
nodes a run's first hour stays below 50 MB."""

STRETCH_SECONDS = 10.0
"""How often is looked how many samples come in."""

LINE_BYTES = 1_000.0
"""What a line takes, until lines have been written."""

MOST_WAITING = 8
"""Samples of a node that are kept one by one before they are merged."""

MORE_PROBLEMS = "and more, not shown because one line covers several samples"

_OF_TIME = frozenset({"cpu_cores_used", "cpu_fraction"})
"""Slopes over the time since the sample before: their mean is weighted by it, which makes it the slope over all of it."""


def merge_samples(samples: Iterable[SystemRecord]) -> SystemRecord:
    """Return what stands for consecutive samples of one node, the last of which gives the time and whatever is no figure.

    Some of them may stand for several already. None of their counters may fall: there `SampleThinner` has a line end before, and one after.
    Means of bytes are no whole numbers yet, as what is merged may be merged again. Raises IndexError where there are none.
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
    return replace(
        last,
        **figures,
        gpus=None if last.gpus is None else tuple(_merged_gpu(merged, index, known, gpu) for index, gpu in enumerate(last.gpus)),
        interval_seconds=sum(sample.interval_seconds for sample in known),
        problems=_of_all(known),
        samples=sum(sample.samples for sample in known),
        merged=merged,
    )


def _of_all(samples: list[SystemRecord]) -> tuple[str, ...]:
    """Return their problems, each once; where these are too many for a line, that is the last of them."""
    distinct = tuple(dict.fromkeys(problem for sample in samples for problem in sample.problems))
    return distinct if len(distinct) <= MOST_PROBLEMS else (*distinct[: MOST_PROBLEMS - 1], MORE_PROBLEMS)


def _merged_gpu(merged: dict[str, tuple[int, float]], index: int, samples: list[SystemRecord], last: GpuSample) -> GpuSample:
    nothing: GpuSample = {}
    seen = [sample.gpus[index] if sample.gpus is not None and index < len(sample.gpus) else nothing for sample in samples]
    means = {name: _merge(merged, f"gpu{index}.{name}", samples, [gpu.get(name) for gpu in seen]) for name in GPU_GAUGES}
    return cast(GpuSample, {**last, **means})


def _as_line(sample: SystemRecord) -> SystemRecord:
    """Return it with bytes in whole numbers, as a file has them."""
    if sample.merged is None:
        return sample
    figures: dict[str, Any] = {name: _rounded(getattr(sample, name)) for name in GAUGES if name not in _OF_TIME}
    return replace(
        sample,
        **figures,
        gpus=None if sample.gpus is None else tuple(_rounded_gpu(gpu) for gpu in sample.gpus),
    )


def _rounded_gpu(gpu: GpuSample) -> GpuSample:
    return {**gpu, "memory_bytes": _rounded(gpu.get("memory_bytes"))}


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _merge(merged: dict[str, tuple[int, float]], name: str, samples: list[SystemRecord], values: list[float | None]) -> float | None:
    """Return the mean of a figure over the samples that have it; note how many these are, and its largest value, under `name`."""
    count, largest, total, weights, total_of_all = 0, -math.inf, 0.0, 0.0, 0.0
    for sample, value in zip(samples, values, strict=True):
        if value is None:
            continue
        own, highest = sample.merged_as(name)
        count, largest = count + own, max(largest, value if highest is None else highest)
        weight = sample.interval_seconds if name in _OF_TIME else own
        total, weights, total_of_all = total + value * weight, weights + weight, total_of_all + value * own
    if not count:
        return None
    merged[name] = (count, largest)
    return total / weights if weights else total_of_all / count


class SampleThinner:
    """Takes every sample of a run, and returns the lines that are to be written. Times are seconds of any clock that never falls.

    `samples_per_line` is 1 until samples come in faster than `bytes_per_second` allow and what `burst_bytes` leave is about to be used up.
    Then it is the power of two with which they do not.
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
        """How many nodes have sent samples."""
        return len(self._counts)

    def wrote(self, line_bytes: int) -> None:
        """A line has been written, of so many bytes."""
        self._bytes_of_lines += line_bytes
        self._known_lines += 1

    def want_each(self) -> None:
        """Have the next sample of each node end a line, however few it stands for: the run clock begins or ends there."""
        self._wanted = set(self._counts)

    def add(self, sample: SystemRecord) -> list[SystemRecord]:
        """Take a sample, whose `time_seconds` are of the thinner's clock; return the lines to write, none while it has to wait."""
        node, now = sample.node, sample.time_seconds
        self._look_at(now)
        lines = []
        waiting = self._waiting.setdefault(node, [])
        before = self._last.get(node)
        fell = before is not None and _falls(before, sample)
        self._last[node] = sample
        if waiting and fell:
            lines.append(_as_line(merge_samples(waiting)))
            waiting.clear()
        waiting.append(sample)
        if len(waiting) == MOST_WAITING:
            waiting[:] = [merge_samples(waiting)]
        number = self._counts[node] = self._counts.get(node, 0) + 1
        if (number + node) % self.samples_per_line == 0 or fell or node in self._wanted:  # nodes take turns
            self._wanted.discard(node)
            lines.append(_as_line(merge_samples(waiting)))
            waiting.clear()
        self._lines += len(lines)
        return lines

    def flush(self) -> list[SystemRecord]:
        """Return lines for all samples that wait."""
        lines = [_as_line(merge_samples(waiting)) for waiting in self._waiting.values() if waiting]
        self._waiting.clear()
        self._lines += len(lines)
        return lines

    def _look_at(self, now: float) -> None:
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
    """Whether a counter began anew between two samples, or they are of different parts of the run: no line may hide that."""
    if before.part_began_seconds != after.part_began_seconds:
        return True
    pairs = ((getattr(before, name), getattr(after, name)) for name in COUNTERS)
    return any(first is not None and last is not None and last < first for first, last in pairs)
