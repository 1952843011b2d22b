"""The curves of a run as arrays: a million updates are read in seconds, and only figures are kept in memory.

`RunReader` gives every record as an object; here a file is read in pieces, only the fields that curves need are decoded, and what is
kept are columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...records.schema import Count, Index, Seconds
from ...records.store.run_directory import RunReader
from ...records.summary.segments import SegmentTracker, resumed_seconds
from .fast_jsonl import read_pieces

__all__ = ["Floats", "Integers", "NodeSeries", "StepSeries", "read_samples", "read_steps", "read_system"]

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_HELD_UP = 0.5  # of the time between two samples where they were taken
_NonFinite = Literal["NaN", "Infinity", "-Infinity"]
_Number = float | _NonFinite


class _StepLine(msgspec.Struct, gc=False):
    """What curves need of a line of ``steps.jsonl``."""

    schema: Literal[1]
    step: Count
    count: Count
    epoch: Count
    time_seconds: Seconds
    seconds: Seconds
    examples: Count
    losses: list[_Number]
    worker: Index | None = None
    profiled_seconds: Seconds | None = None


class _RatedStepLine(_StepLine, gc=False, kw_only=True):
    """The same with the learning rates: one an update, or a single one of all."""

    learning_rates: list[_Number]


class _Gpu(msgspec.Struct, gc=False):
    utilization: float | None = None
    tasks: list[str] = []


class _SystemLine(msgspec.Struct, gc=False):
    """What curves need of a line of ``system.jsonl``."""

    schema: Literal[1]
    node: Index
    time_seconds: Seconds
    interval_seconds: Seconds
    cpu_cores_used: _Number | None = None
    cores_available: _Number | None = None
    memory_rss_bytes: Count | None = None
    network_source: str | None = None
    network_sent_bytes: Count | None = None
    network_received_bytes: Count | None = None
    gpus: list[_Gpu] | None = None
    part_began_seconds: Seconds | None = None
    samples: int = 1
    merged: dict[str, tuple[int, float]] | None = None


@dataclass(frozen=True, slots=True)
class StepSeries:
    """The updates of a run. The first four arrays have an entry an update [n] and are in the order of the updates' numbers.

    - ``step``: number of the update, from 0
    - ``time_seconds``: run clock at its end; within a group, whose end alone was measured, spread evenly
    - ``examples``: consumed by the updates up to and with this one
    - ``loss``: mean over the examples of its batch, before the update; may be NaN or infinite

    ``learning_rate`` [n], in the order of the numbers too, is None where it was not asked for.

    The others have an entry a group [groups] and are in the order in which the groups ended: ``first`` (number of its first update),
    ``count``, ``group_time_seconds`` (its end), ``seconds`` (its duration), ``group_examples``, ``worker`` (−1 in sync mode), ``epoch``,
    ``profiled_seconds`` (NaN where it was not profiled), whose updates and time count for no speed. ``profiled`` [n] says of which updates
    that holds.
    """

    step: Integers
    time_seconds: Floats
    examples: Integers
    loss: NDArray[np.float32]
    first: Integers
    count: Integers
    group_time_seconds: Floats
    seconds: Floats
    group_examples: Integers
    worker: Integers
    epoch: Integers
    profiled_seconds: Floats
    profiled: NDArray[np.bool_]
    learning_rate: Floats | None = None

    def __len__(self) -> int:
        """Return the number of updates."""
        return len(self.step)

    def profile_pauses(self) -> list[tuple[float, float]]:
        """Return when (from, to, on the run clock) updates were profiled: no speed counts this time."""
        ends = self.group_time_seconds
        return [(float(ends[group] - self.profiled_seconds[group]), float(ends[group])) for group in np.flatnonzero(self.profiled_groups)]

    @property
    def profiled_groups(self) -> NDArray[np.bool_]:
        """Which groups [groups] were profiled."""
        return ~np.isnan(self.profiled_seconds)

    def in_time(self) -> Integers:
        """Return the order [n] of the updates by their time; in async mode it differs from that of their numbers."""
        return np.argsort(self.time_seconds, kind="stable")


@dataclass(frozen=True, slots=True)
class NodeSeries:
    """The resource samples of one node [samples], in their order. NaN stands for what was not observed.

    Rates are rises of a counter since the sample before, over the time between (`_rises`); NaN for a node's first sample, and where a
    counter fell because it began anew. ``gpu_utilization`` (0 to 1) is the mean over its GPUs, over those of its tasks where it is known
    which these are. ``cores_available`` is the last sample's.
    Of a run that was resumed, samples of the later segments' initialisation are left out: their times are those of the segments before.
    An entry may stand for several samples in a row, as ``samples`` says (None: each for one); ``memory_peak_bytes`` is the largest of all
    of them, None where none has it.
    """

    node: int
    time_seconds: Floats
    cpu_cores_used: Floats
    memory_rss_bytes: Floats
    sent_bytes_per_second: Floats
    received_bytes_per_second: Floats
    gpu_utilization: Floats
    cores_available: float | None
    network_source: str | None
    samples: Integers | None = None
    memory_peak_bytes: float | None = None


@dataclass(slots=True)
class _Columns:
    """The columns of ``steps.jsonl`` as they are read."""

    first: array[int] = field(default_factory=lambda: array("q"))
    count: array[int] = field(default_factory=lambda: array("q"))
    epoch: array[int] = field(default_factory=lambda: array("q"))
    time_seconds: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    examples: array[int] = field(default_factory=lambda: array("q"))
    worker: array[int] = field(default_factory=lambda: array("q"))
    profiled_seconds: array[float] = field(default_factory=lambda: array("d"))
    losses: array[float] = field(default_factory=lambda: array("f"))
    learning_rates: array[float] = field(default_factory=lambda: array("d"))

    def add(self, lines: Sequence[_StepLine]) -> None:
        self.first.extend([line.step for line in lines])
        self.count.extend([line.count for line in lines])
        self.epoch.extend([line.epoch for line in lines])
        self.time_seconds.extend([line.time_seconds for line in lines])
        self.seconds.extend([line.seconds for line in lines])
        self.examples.extend([line.examples for line in lines])
        self.worker.extend([-1 if line.worker is None else line.worker for line in lines])
        self.profiled_seconds.extend([np.nan if line.profiled_seconds is None else line.profiled_seconds for line in lines])
        for line in lines:
            self._losses(line.losses)
            if isinstance(line, _RatedStepLine):
                rates = [float(rate) for rate in line.learning_rates]
                self.learning_rates.extend(rates if len(rates) == line.count else rates * line.count)

    def _losses(self, losses: list[_Number]) -> None:
        try:
            values = array("f", cast("list[float]", losses))
        except TypeError:  # one of them is a string
            values = array("f", map(float, losses))
        self.losses.extend(values)


def read_steps(run: Path, learning_rates: bool = False) -> StepSeries:
    """Return the updates of the run directory `run`; none where it has no ``steps.jsonl``. A torn last line is skipped.

    Their `learning_rates` take as much time and memory again, and are read where they are asked for.

    Raises DamagedRunError, naming the file and the line, where anything else is not a step record.
    """
    columns = _Columns()
    kind = _RatedStepLine if learning_rates else _StepLine
    for lines in read_pieces(run / "steps.jsonl", kind, "StepRecord", _sizes_agree):
        columns.add(lines)
    return _series(columns, learning_rates)


def _sizes_agree(line: _StepLine) -> None:
    if line.count < 1 or len(line.losses) != line.count:
        raise ValueError(f"{line.count} updates with {len(line.losses)} losses")
    if isinstance(line, _RatedStepLine) and len(line.learning_rates) not in (1, line.count):
        raise ValueError(f"{line.count} updates with {len(line.learning_rates)} learning rates")


def _series(columns: _Columns, learning_rates: bool) -> StepSeries:
    """Spread the groups over their updates and put both in order."""
    first, count = np.array(columns.first, np.int64), np.array(columns.count, np.int64)
    ends, seconds = np.array(columns.time_seconds, np.float64), np.array(columns.seconds, np.float64)
    group_examples, profiled = np.array(columns.examples, np.int64), np.array(columns.profiled_seconds, np.float64)
    group = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count) + 1  # 1 for a group's first update
    step = first[group] + within - 1
    shares = within / count[group]
    time_seconds = ends[group] - seconds[group] * (1 - shares)
    until = group_examples[group] * within // count[group]
    examples = until - np.where(within > 1, group_examples[group] * (within - 1) // count[group], 0)
    by_number = np.argsort(step, kind="stable")
    by_end = np.argsort(ends, kind="stable")
    return StepSeries(
        step[by_number],
        time_seconds[by_number],
        np.cumsum(examples[by_number]),
        np.array(columns.losses, np.float32)[by_number],
        first[by_end],
        count[by_end],
        ends[by_end],
        seconds[by_end],
        group_examples[by_end],
        np.array(columns.worker, np.int64)[by_end],
        np.array(columns.epoch, np.int64)[by_end],
        profiled[by_end],
        ~np.isnan(profiled[group][by_number]),
        np.array(columns.learning_rates, np.float64)[by_number] if learning_rates else None,
    )


def read_system(run: Path) -> list[NodeSeries]:
    """Return the resource samples of each node of the run directory `run`, in node order; empty where there are none.

    Raises what `read_steps` raises.
    """
    return read_samples(run / "system.jsonl", resumed_seconds(RunReader(run).job()))


def read_samples(path: Path, resumed: Sequence[float]) -> list[NodeSeries]:
    """Return the same from a ``system.jsonl``; `resumed` are the times on the run clock from which the run went on (`resumed_seconds`)."""
    by_node: dict[int, list[_SystemLine]] = {}
    segments = SegmentTracker(resumed)
    for lines in read_pieces(path, _SystemLine, "SystemRecord"):
        for line in lines:
            line.part_began_seconds = segments.began_seconds(line.time_seconds, line.part_began_seconds)
            by_node.setdefault(line.node, []).append(line)
    found = [_node(node, by_node[node]) for node in sorted(by_node)]
    return [node for node in found if len(node.time_seconds)]


def _node(node: int, lines: Sequence[_SystemLine]) -> NodeSeries:
    time_seconds = _column([line.time_seconds for line in lines])
    intervals = _column([line.interval_seconds for line in lines])
    began = _column([line.part_began_seconds for line in lines])
    goes_on = np.diff(began, prepend=0.0) != 0
    sent, received = _column([line.network_sent_bytes for line in lines]), _column([line.network_received_bytes for line in lines])
    kept = (time_seconds > began) | (began == 0)
    return NodeSeries(
        node,
        time_seconds[kept],
        _column([line.cpu_cores_used for line in lines])[kept],
        _column([line.memory_rss_bytes for line in lines])[kept],
        _rises(sent, time_seconds, intervals, goes_on)[kept],
        _rises(received, time_seconds, intervals, goes_on)[kept],
        _column([_gpu_utilization(line.gpus or ()) for line in lines])[kept],
        next((float(line.cores_available) for line in reversed(lines) if line.cores_available is not None), None),
        next((line.network_source for line in reversed(lines) if line.network_source is not None), None),
        np.array([line.samples for line in lines], np.int64)[kept],
        max((peak for line in compress(lines, kept) if (peak := _highest_memory(line)) is not None), default=None),
    )


def _gpu_utilization(gpus: Sequence[_Gpu]) -> float | None:
    """Return the mean over the GPUs that the node's tasks were given; over all of them where none is known to be."""
    return _mean([gpu.utilization for gpu in ([gpu for gpu in gpus if gpu.tasks] or gpus)])


def _highest_memory(line: _SystemLine) -> float | None:
    return line.memory_rss_bytes if line.merged is None else line.merged.get("memory_rss_bytes", (0, None))[1]


def _column(values: Sequence[float | str | None]) -> Floats:
    return np.array([np.nan if value is None else float(value) for value in values], np.float64)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rises(counter: Floats, time_seconds: Floats, intervals: Floats, goes_on: NDArray[np.bool_]) -> Floats:
    """Return the rise per second since the sample before, by the rule of `rate_between`; `goes_on` marks where a later segment begins.

    Samples are stamped where they arrive. One that was held up on its way arrives with the next at its heels, and a rise over the moment
    between the two would be a peak that never was: the later one's is then over the time of both.
    """
    rise = np.where(goes_on, np.nan, np.diff(counter, prepend=np.nan))
    seconds = np.diff(time_seconds, prepend=np.nan)
    at_its_heels = (seconds[1:] < _HELD_UP * intervals[1:]) & (seconds[1:] >= 0)
    known = (seconds > 0) & (rise >= 0)
    rates = np.where(known, rise / np.where(known, seconds, 1.0), np.nan)
    for late in np.flatnonzero(at_its_heels) + 1:
        if late >= 2 and known[late - 1] and rise[late] >= 0:
            rates[late] = (rise[late] + rise[late - 1]) / (seconds[late] + seconds[late - 1])
    return rates
