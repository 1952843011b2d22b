"""A run's records as arrays; a million updates take seconds."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import compress
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.bounded_json import MAX_LINE_BYTES, UnreadableError, open_regular
from ...records.store.jsonl import DamagedRunError, no_record, torn_line
from ...records.store.run_directory import RunReader
from ...records.store.schema import GpuSample, StepRecord, SystemRecord, line_fields
from ...records.time_shares import SegmentTracker, resumed_seconds

_PIECE_BYTES = 4 << 20
L = TypeVar("L", bound=msgspec.Struct)


def read_pieces(path: Path, kind: type[L], check: Callable[[L], None] = lambda _: None) -> Iterator[list[L]]:
    """Yield the lines of a file as `kind`, in pieces; none if missing. Raises DamagedRunError."""
    # A torn last line is skipped. Messages have the name of `kind`; `check` raises ValueError for contradicting fields.
    decoder = msgspec.json.Decoder(kind)
    number, torn = 1, None
    for piece in _pieces(path):
        if torn is not None:
            raise torn_line(path, torn)
        count = piece.count(b"\n") + (not piece.endswith(b"\n"))
        try:
            lines = decoder.decode_lines(piece)
            for line in lines:
                check(line)
        except (msgspec.DecodeError, ValueError, RecursionError):
            lines = []
        if len(lines) != count:
            lines, torn = _one_by_one(path, piece, number, decoder, check)
        yield lines
        number += count


def _pieces(path: Path) -> Iterator[bytes]:
    rest = b""
    try:
        with open_regular(path) as file:
            while read := file.read(_PIECE_BYTES):
                whole, newline, tail = read.rpartition(b"\n")
                if newline:
                    yield rest + whole + newline
                    rest = tail
                else:
                    rest += tail
                if len(rest) > MAX_LINE_BYTES:
                    raise UnreadableError(f"a line is longer than {MAX_LINE_BYTES >> 20} MiB, the most that is read of one")
    except FileNotFoundError:
        return
    except UnreadableError as error:
        raise DamagedRunError(f"{path}: {error}.") from error
    if rest:
        yield rest


def _one_by_one(
    path: Path, piece: bytes, number: int, decoder: msgspec.json.Decoder[L], check: Callable[[L], None]
) -> tuple[list[L], int | None]:
    """Return the lines of a piece, the number of the first, and that of a torn last one."""
    lines: list[L] = []
    torn: int | None = None
    kind: Any = decoder.type  # of one class; msgspec also allows unions
    for current, text in enumerate(piece.removesuffix(b"\n").split(b"\n"), number):
        if torn is not None:
            raise torn_line(path, torn)
        try:
            line = decoder.decode(text)
            check(line)
            lines.append(line)
        except (msgspec.DecodeError, ValueError) as error:
            if type(error) is not msgspec.DecodeError:  # its subclass is for JSON of another type
                raise DamagedRunError(f"{path}, line {current}: {no_record(kind, error)}.") from error
            torn = current
        except RecursionError:
            deep = UnreadableError("it is nested too deep")
            raise DamagedRunError(f"{path}, line {current}: {no_record(kind, deep)}.") from None
    return lines, torn


Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
_HELD_UP = 0.5  # fraction of the time between the measurements of two samples
_NonFinite = Literal["NaN", "Infinity", "-Infinity"]
_Number = float | _NonFinite


def _line(record: type, names: str, optional: str = "", **types_by_field: Any) -> Any:
    """Return the type of a record's lines with these fields alone.

    `optional` ones may be missing.
    """
    types = {"schema": Literal[1], **line_fields(record, _Number, **types_by_field)}
    required: list[Any] = [(name, types[name]) for name in ("schema", *names.split())]
    defaults = {field.name: field.default for field in fields(record)}
    missing = [(name, types[name], None if defaults[name] is MISSING else defaults[name]) for name in optional.split()]
    return msgspec.defstruct(record.__name__, required + missing, gc=False)


_GROUP = "step count epoch time_seconds seconds examples losses"
_PRESENT_IN_SOME = "worker profiled_seconds"
_StepLine = _line(StepRecord, _GROUP, _PRESENT_IN_SOME, losses=list[_Number])
_RatedStepLine = _line(StepRecord, f"{_GROUP} learning_rates", _PRESENT_IN_SOME, losses=list[_Number], learning_rates=list[_Number])
_SystemLine = _line(
    SystemRecord,
    "node time_seconds interval_seconds",
    "cpu_cores_used cores_available memory_rss_bytes network_source network_sent_bytes network_received_bytes gpus part_began_seconds"
    " samples merged",
)


@dataclass(frozen=True, slots=True)
class StepSeries:
    """The updates of a run in order, by update [n] and by group of updates [groups]."""

    step: Integers  # [n], from 0
    time_seconds: Floats  # [n], run clock at its end, evenly spaced within a group
    examples: Integers  # [n], consumed up to and with this update
    loss: NDArray[np.float32]  # [n], mean over its batch before the update; may be NaN or infinite
    first: Integers  # [groups], first update of the group; groups are in the order of their ends
    count: Integers
    group_time_seconds: Floats  # [groups], run clock at its end
    seconds: Floats  # [groups], duration
    group_examples: Integers
    worker: Integers  # [groups], −1 in sync mode
    epoch: Integers
    profiled_seconds: Floats  # [groups], NaN if not profiled; profiled updates count for no speed
    profiled: NDArray[np.bool_]
    learning_rate: Floats | None = None

    def __len__(self) -> int:
        return len(self.step)

    def profile_pauses(self) -> list[tuple[float, float]]:
        """Return when (from, to, on the run clock) updates were profiled."""
        ends = self.group_time_seconds
        return [(float(ends[group] - self.profiled_seconds[group]), float(ends[group])) for group in np.flatnonzero(self.profiled_groups)]

    @property
    def profiled_groups(self) -> NDArray[np.bool_]:
        """Which groups [groups] were profiled."""
        return ~np.isnan(self.profiled_seconds)

    def in_time(self) -> Integers:
        """Return the order [n] of the updates by time, not that of their numbers in async mode."""
        return np.argsort(self.time_seconds, kind="stable")


@dataclass(frozen=True, slots=True)
class NodeSeries:
    """The resource samples of one node [samples], in order, without resumed initialisation."""

    node: int
    time_seconds: Floats  # NaN if not observed, as in all figures
    cpu_cores_used: Floats
    memory_rss_bytes: Floats
    sent_bytes_per_second: Floats  # rate since the sample before (`_rises`)
    received_bytes_per_second: Floats
    gpu_utilization: Floats  # 0 to 1, mean over its tasks' GPUs, or all if unknown
    cores_available: float | None  # of the last sample
    network_source: str | None
    samples: Integers | None = None  # samples in each entry; None: one
    memory_peak_bytes: float | None = None  # maximum over all samples


_TYPECODES = {
    **dict.fromkeys(("step", "count", "epoch", "examples", "worker"), "q"),
    **dict.fromkeys(("time_seconds", "seconds", "profiled_seconds", "learning_rates"), "d"),
    "losses": "f",
}  # columns of ``steps.jsonl``


def _add(columns: dict[str, array[Any]], lines: Sequence[Any]) -> None:
    for name in ("step", "count", "epoch", "examples", "time_seconds", "seconds"):
        columns[name].extend(map(attrgetter(name), lines))
    columns["worker"].extend([-1 if line.worker is None else line.worker for line in lines])
    columns["profiled_seconds"].extend([np.nan if line.profiled_seconds is None else line.profiled_seconds for line in lines])
    for line in lines:
        columns["losses"].extend(_losses(line.losses))
        if isinstance(line, _RatedStepLine):
            rates = [float(rate) for rate in line.learning_rates]
            columns["learning_rates"].extend(rates if len(rates) == line.count else rates * line.count)


def _losses(losses: list[_Number]) -> array[float]:
    try:
        return array("f", cast("list[float]", losses))
    except TypeError:  # one of them is a string
        return array("f", map(float, losses))


def read_steps(run: Path, learning_rates: bool = False) -> StepSeries:
    """Return the updates; `learning_rates` double time and memory. Raises DamagedRunError."""
    columns: dict[str, array[Any]] = {name: array(code) for name, code in _TYPECODES.items()}
    kind = _RatedStepLine if learning_rates else _StepLine
    for lines in read_pieces(run / "steps.jsonl", kind, _sizes_agree):
        _add(columns, lines)
    return _series(columns, learning_rates)


def _sizes_agree(line: Any) -> None:
    if line.count < 1 or len(line.losses) != line.count:
        raise ValueError(f"{line.count} updates with {len(line.losses)} losses")
    if hasattr(line, "learning_rates") and len(line.learning_rates) not in (1, line.count):
        raise ValueError(f"{line.count} updates with {len(line.learning_rates)} learning rates")


def _series(columns: dict[str, array[Any]], learning_rates: bool) -> StepSeries:
    first, count, worker, epoch, group_examples = (
        np.array(columns[name], np.int64) for name in ("step", "count", "worker", "epoch", "examples")
    )
    ends, seconds, profiled = (np.array(columns[name], np.float64) for name in ("time_seconds", "seconds", "profiled_seconds"))
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
        np.array(columns["losses"], np.float32)[by_number],
        first[by_end],
        count[by_end],
        ends[by_end],
        seconds[by_end],
        group_examples[by_end],
        worker[by_end],
        epoch[by_end],
        profiled[by_end],
        ~np.isnan(profiled[group][by_number]),
        np.array(columns["learning_rates"], np.float64)[by_number] if learning_rates else None,
    )


def read_system(run: Path) -> list[NodeSeries]:
    """Return the samples of each node of a run. Raises DamagedRunError."""
    return read_samples(run / "system.jsonl", resumed_seconds(RunReader(run).job()))


def read_samples(path: Path, resumed: Sequence[float]) -> list[NodeSeries]:
    """Return the samples of a ``system.jsonl``; `resumed` is from `resumed_seconds`."""
    by_node: dict[int, list[Any]] = {}
    segments = SegmentTracker(resumed)
    for lines in read_pieces(path, _SystemLine):
        for line in lines:
            line.part_began_seconds = segments.began_seconds(line.time_seconds, line.part_began_seconds)
            by_node.setdefault(line.node, []).append(line)
    nodes = [_node(node, by_node[node]) for node in sorted(by_node)]
    return [node for node in nodes if len(node.time_seconds)]


def _node(node: int, lines: Sequence[Any]) -> NodeSeries:
    time_seconds = _column([line.time_seconds for line in lines])
    intervals = _column([line.interval_seconds for line in lines])
    began = _column([line.part_began_seconds for line in lines])
    is_new_segment = np.diff(began, prepend=0.0) != 0
    sent, received = _column([line.network_sent_bytes for line in lines]), _column([line.network_received_bytes for line in lines])
    is_counted = (time_seconds > began) | (began == 0)
    return NodeSeries(
        node,
        time_seconds[is_counted],
        _column([line.cpu_cores_used for line in lines])[is_counted],
        _column([line.memory_rss_bytes for line in lines])[is_counted],
        _rises(sent, time_seconds, intervals, is_new_segment)[is_counted],
        _rises(received, time_seconds, intervals, is_new_segment)[is_counted],
        _column([_gpu_utilization(line.gpus or ()) for line in lines])[is_counted],
        next((float(line.cores_available) for line in reversed(lines) if line.cores_available is not None), None),
        next((line.network_source for line in reversed(lines) if line.network_source is not None), None),
        np.array([line.samples for line in lines], np.int64)[is_counted],
        max((peak for line in compress(lines, is_counted) if (peak := _highest_memory(line)) is not None), default=None),
    )


def _gpu_utilization(gpus: Sequence[GpuSample]) -> float | None:
    return _mean([gpu.get("utilization") for gpu in ([gpu for gpu in gpus if gpu.get("tasks")] or gpus)])


def _highest_memory(line: Any) -> float | None:
    peak: float | None = line.memory_rss_bytes if line.merged is None else line.merged.get("memory_rss_bytes", (0, None))[1]
    return peak


def _column(values: Sequence[float | str | None]) -> Floats:
    return np.array([np.nan if value is None else float(value) for value in values], np.float64)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rises(counter: Floats, time_seconds: Floats, intervals: Floats, is_new_segment: NDArray[np.bool_]) -> Floats:
    """Return the rise per second since the sample before; `is_new_segment` marks a new segment."""
    # A delayed sample arrives just before the next, whose rise is then over the time of both, to avoid a false peak.
    rise = np.where(is_new_segment, np.nan, np.diff(counter, prepend=np.nan))
    seconds = np.diff(time_seconds, prepend=np.nan)
    follows_closely = (seconds[1:] < _HELD_UP * intervals[1:]) & (seconds[1:] >= 0)
    known = (seconds > 0) & (rise >= 0)
    rates = np.where(known, rise / np.where(known, seconds, 1.0), np.nan)
    for late in np.flatnonzero(follows_closely) + 1:
        if late >= 2 and known[late - 1] and rise[late] >= 0:
            rates[late] = (rise[late] + rise[late - 1]) / (seconds[late] + seconds[late - 1])
    return rates
