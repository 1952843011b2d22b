"""Read recordings, and compare two tensors of them in the best order of axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.bounded_json import UnreadableError, read_lines
from ..core.errors import UsageError
from ..recorder.recording import BUCKETS, FORMAT, LINES, VALUES, layouts, sketch

Array = NDArray[Any]
EXACT = 1e-6  # relative differences of data and initial weights
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

    def variants(self, *, whole: bool) -> Iterator[tuple[tuple[int, ...], Array]]:
        """Yield shape and values for each order of the axes; with `whole` arrays, else sketches."""
        for number, axes in enumerate(layouts(len(self.line.shape))):
            shape = tuple(self.line.shape[axis] for axis in axes)
            if self.array is None:
                yield shape, self.sketches[number]
            else:
                values = self.array.transpose(axes)
                yield shape, values.astype(np.float64).ravel() if whole else sketch(values.astype(np.float64))


class Recording:
    """A recording that was read. Raises UsageError for one that is damaged."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.layers = name, dict[str, LayerLine]()
        self.updates: dict[int, dict[str, list[Recorded]]] = {}
        decoder = msgspec.json.Decoder(StartLine | LayerLine | TensorLine)
        try:
            values = np.memmap(path / VALUES, np.uint8, "r") if (path / VALUES).stat().st_size else np.zeros(0, np.uint8)
            for text in itertools.islice(read_lines(path / LINES), MAX_ENTRIES):
                self._take(decoder.decode(text), values)
        except (OSError, UnreadableError, msgspec.MsgspecError, ValueError) as error:
            raise UsageError(f"recording: {str(path)!r} cannot be read: {error}") from error
        if not self.updates:
            raise UsageError(f"recording: {str(path)!r} has no update; call recorder.watch, or recorder.step after each update.")

    def _take(self, line: StartLine | LayerLine | TensorLine, values: Array) -> None:
        if isinstance(line, StartLine):
            if line.format != FORMAT:
                raise ValueError(f"its format is {line.format}, and this release reads {FORMAT}")
        elif isinstance(line, LayerLine):
            self.layers.setdefault(line.name, line)
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
    kept = values[first : first + count * np.dtype(kind).itemsize]
    if kept.size != count * np.dtype(kind).itemsize:
        raise ValueError(f"{VALUES} ends before byte {first + count * np.dtype(kind).itemsize:,}")
    return np.frombuffer(kept.tobytes(), kind)


def is_recording(path: Path) -> bool:
    """Return whether a folder has a recording."""
    return (path / LINES).is_file()


def difference(first: Recorded, second: Recorded) -> float:
    """Return ‖a − b‖ / ‖a‖ in the best order of axes, infinite for other shapes or NaN.

    Equal values in an order that is not known count by their norm, mean, least and largest value.
    """
    if first.line.invalid or second.line.invalid:
        return 0.0 if first.line.invalid == second.line.invalid and first.line.norm == second.line.norm else math.inf
    whole = first.array is not None and second.array is not None
    best = math.inf
    for (shape, values), (other_shape, theirs) in itertools.product(first.variants(whole=whole), second.variants(whole=whole)):
        if shape == other_shape:
            apart = float(np.linalg.norm(values - theirs))
            best = min(best, apart / max(float(np.linalg.norm(values)), 1e-300) if apart else 0.0)
    return best


def in_another_order(first: Recorded, second: Recorded) -> bool:
    """Return whether two tensors seem to have the same values in different orders."""
    mine, theirs = first.line, second.line
    scale = max(abs(mine.least), abs(mine.most), 1e-30)
    return (
        math.prod(mine.shape) == math.prod(theirs.shape) > 1
        and abs(mine.norm - theirs.norm) <= EXACT * mine.norm
        and all(abs(a - b) <= EXACT * scale for a, b in ((mine.mean, theirs.mean), (mine.least, theirs.least), (mine.most, theirs.most)))
    )
