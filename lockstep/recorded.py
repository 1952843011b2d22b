"""Read recordings, and compare two tensors of them in the best order of axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.bounded_json import NotJsonError, UnreadableError, parse_json, read_lines
from ..core.errors import UsageError
from ..recorder.recording import BUCKETS, FORMAT, LINES, VALUES, layouts, sketch

Array = NDArray[Any]
EXACT = 1e-6  # relative differences of data and initial weights
PREFIX = 256  # values by which most tensors that differ are told apart
BLOCK = 1 << 20  # values that are float64 at a time
MAX_AXES, MAX_SIZE, MAX_ENTRIES = 8, 1 << 40, 1_000_000
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
Place = tuple[str, Count, Count]  # format, first byte, number of values
FORMATS = ("<f4", "<f8", "<i8", "|b1", "|i1", "|u1", "<i2", "<i4", "<u2", "<u4", "<u8")


class StartLine(msgspec.Struct, tag_field="kind", tag="start"):
    """The first line of a recording."""

    format: int
    full: bool


class LayerLine(msgspec.Struct, tag_field="kind", tag="layer"):
    """A layer's kind and settings; the optimiser and the loss are among them."""

    name: str
    type: str
    settings: dict[str, Any]
    framework: str


class TensorLine(msgspec.Struct, tag_field="kind", tag="tensor"):
    """A tensor of an update, and where its values are."""

    update: Count
    part: str
    name: str
    layer: str
    dtype: str
    shape: Annotated[list[Count], msgspec.Meta(max_length=MAX_AXES)]
    norm: float
    mean: float
    least: float
    most: float
    zeros: Count
    invalid: Count
    sketches: list[Place]
    array: Place | None
    rows: Place | None


@dataclass(frozen=True)
class Recorded:
    """A tensor with its values: whole, or a sketch for each order of its axes."""

    line: TensorLine
    array: Array | None
    sketches: tuple[Array, ...]
    rows: Array | None

    def sketched(self) -> Iterator[tuple[tuple[int, ...], Array]]:
        """Yield shape and sketch for each order of the axes."""
        for number, axes in enumerate(layouts(len(self.line.shape))):
            shape = tuple(self.line.shape[axis] for axis in axes)
            yield shape, self.sketches[number] if self.array is None else sketch(self.array.transpose(axes))


class EndLine(msgspec.Struct, tag_field="kind", tag="end"):
    """An update was recorded to its end."""

    update: Count


Line = StartLine | LayerLine | TensorLine | EndLine


class Recording:
    """A recording that was read. Raises UsageError for one that is damaged.

    Of an update within which it ends, nothing is kept.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.layers = name, dict[str, LayerLine]()
        self.updates: dict[int, dict[str, list[Recorded]]] = {}
        self.not_read: list[str] = []
        self._ended: set[int] = set()
        try:
            values = np.memmap(path / VALUES, np.uint8, "r") if (path / VALUES).stat().st_size else np.zeros(0, np.uint8)
            for number, text in enumerate(read_lines(path / LINES)):
                if number == MAX_ENTRIES:
                    self.not_read.append(f"lines of {name} after the first {MAX_ENTRIES:,}")
                    break
                try:
                    line = msgspec.convert(parse_json(text), cast(type[Line], Line))
                except NotJsonError:
                    if text.endswith(b"\n"):
                        raise
                    self.not_read.append(f"the last line of {name}, which is cut off")
                    break
                self._take(line, values)
        except (OSError, UnreadableError, msgspec.MsgspecError, ValueError) as error:
            raise UsageError(f"recording: {str(path)!r} cannot be read: {error}") from error
        self._leave_unfinished(path)

    def _leave_unfinished(self, path: Path) -> None:
        """Leave the last update out if it was not recorded to its end."""
        last = max(self.updates, default=None)
        if last is not None and last not in self._ended:
            has_begun = any(part != "before" for part in self.updates.pop(last))
            if has_begun:
                self.not_read.append(f"update {last + 1} of {self.name}, within which its recording ends")
            if has_begun and not self.updates:
                raise UsageError(
                    f"recording: {str(path)!r} cannot be read: it ends within update {last + 1}, and no update is whole;"
                    " let the script go on, or call recorder.step after each update."
                )
        if not self.updates and self.not_read:
            raise UsageError(f"recording: {str(path)!r} cannot be read: it ends before the end of an update.")
        if not self.updates:
            raise UsageError(f"recording: {str(path)!r} has no update; call recorder.watch, or recorder.step after each update.")

    def _take(self, line: Line, values: Array) -> None:
        if isinstance(line, StartLine):
            if line.format != FORMAT:
                raise ValueError(f"its format is {line.format}, and this release reads {FORMAT}")
        elif isinstance(line, LayerLine):
            self.layers.setdefault(line.name, line)
        elif isinstance(line, EndLine):
            self._ended.add(line.update)
        else:
            sketches = tuple(_values(values, place) for place in line.sketches)
            array = _values(values, line.array).reshape(line.shape) if line.array is not None else None
            if array is None and [mine.size for mine in sketches] != [BUCKETS] * len(layouts(len(line.shape))):
                raise ValueError(f"{line.name!r} has neither values nor sketches")
            rows = _values(values, line.rows) if line.rows is not None else None
            self.updates.setdefault(line.update, {}).setdefault(line.part, []).append(Recorded(line, array, sketches, rows))

    @property
    def framework(self) -> str:
        """The framework that the layers are of."""
        return next((layer.framework for layer in self.layers.values()), "own script")


def _values(values: Array, place: Place) -> Array:
    kind, first, count = place
    if kind not in FORMATS:
        raise ValueError(f"{kind!r} is no format of numbers")
    if values.size < first + count * np.dtype(kind).itemsize:
        raise ValueError(f"{VALUES} ends before byte {first + count * np.dtype(kind).itemsize:,}")
    return np.frombuffer(values, kind, count, first) if count else np.zeros(0, kind)  # of the mapped file, without a copy


def is_recording(path: Path) -> bool:
    """Return whether a folder has a recording."""
    return (path / LINES).is_file()


def matches(first: Recorded, second: Recorded) -> Iterator[tuple[tuple[int, ...], Array, Array]]:
    """Yield shape and values of both for each order of axes in which the shapes agree.

    Arrays are views of the files; if a side has none, sketches are compared.
    """
    if first.array is not None and second.array is not None:
        for axes in _orders(first.array.ndim):
            turned = first.array.transpose(axes)
            if turned.shape == second.array.shape:
                yield turned.shape, turned, second.array
        return
    for (shape, mine), (their_shape, theirs) in itertools.product(first.sketched(), list(second.sketched())):
        if shape == their_shape:
            yield shape, mine, theirs


def _orders(axes: int) -> tuple[tuple[int, ...], ...]:
    """Return the orders that turn one side's axes to the other's, the usual one first."""
    ways = layouts(axes)
    return tuple(dict.fromkeys(tuple(way[axis] for axis in np.argsort(back)) for way in ways for back in ways))


def fits(first: Recorded, second: Recorded) -> bool:
    """Return whether two tensors have the same shape in some order of axes."""
    shape = tuple(first.line.shape)
    return len(shape) == len(second.line.shape) and any(
        tuple(shape[axis] for axis in axes) == tuple(second.line.shape) for axes in _orders(len(shape))
    )


def is_near(first: Recorded, second: Recorded, limit: float) -> bool:
    """Return whether `difference` is possibly below a limit, from norms and first values."""
    mine, theirs = first.line, second.line
    if bool(mine.invalid) != bool(theirs.invalid) or not fits(first, second):
        return False
    if first.array is None or second.array is None:
        return abs(mine.norm - theirs.norm) <= 2 * limit * mine.norm  # norms of sketches are estimates
    if abs(mine.norm - theirs.norm) > 1.01 * limit * max(mine.norm, theirs.norm):
        return False
    parts = ((a.flat[:PREFIX], b.flat[:PREFIX]) for _, a, b in matches(first, second))
    return any(np.linalg.norm(a.astype(np.float64) - b) <= 1.01 * limit * mine.norm for a, b in parts) or bool(mine.invalid)


def difference(first: Recorded, second: Recorded) -> float:
    """Return ‖a − b‖ / ‖a‖ in the best order of axes, infinite for other shapes or NaN.

    Equal values in an order that is not known count by their norm, mean, least and largest value.
    """
    if first.line.invalid or second.line.invalid:
        return 0.0 if first.line.invalid == second.line.invalid and first.line.norm == second.line.norm else math.inf
    best = math.inf
    for _, mine, theirs in matches(first, second):
        apart, norm = distance(mine, theirs)
        best = min(best, apart / max(norm, 1e-300) if apart else 0.0)
        if best <= EXACT:
            break
    return best


def blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield parts of arrays of one shape, flat and in float64."""
    if not arrays[0].ndim or arrays[0].size <= BLOCK:
        yield tuple(array.astype(np.float64).ravel() for array in arrays)
        return
    axis = int(np.argmax(arrays[0].shape))
    moved = [np.moveaxis(array, axis, 0) for array in arrays]
    rows = max(BLOCK * len(moved[0]) // moved[0].size, 1)
    for begin in range(0, len(moved[0]), rows):
        yield tuple(array[begin : begin + rows].astype(np.float64).ravel() for array in moved)


def distance(first: Array, second: Array) -> tuple[float, float]:
    """Return ‖a − b‖ and ‖a‖ of arrays of one shape, in float64."""
    apart = norm = 0.0
    for a, b in blocks(first, second):
        norm += float(np.square(a).sum())
        apart += float(np.square(a - b).sum())
    return math.sqrt(apart), math.sqrt(norm)


def in_another_order(first: Recorded, second: Recorded) -> bool:
    """Return whether two tensors seem to have the same values in different orders."""
    mine, theirs = first.line, second.line
    scale = max(abs(mine.least), abs(mine.most), 1e-30)
    return (
        math.prod(mine.shape) == math.prod(theirs.shape) > 1
        and abs(mine.norm - theirs.norm) <= EXACT * mine.norm
        and all(abs(a - b) <= EXACT * scale for a, b in ((mine.mean, theirs.mean), (mine.least, theirs.least), (mine.most, theirs.most)))
    )
