"""Write a recording: a line for each tensor, and sketches or arrays beside them."""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LINES, VALUES = "recording.jsonl", "values.bin"
FORMAT = 1
EVALUATION = "(evaluation)"  # the entry of a module that was not told to train
BUCKETS = 1024
MAX_STEPS = 1_000_000
MAX_ROWS = 4096
CHUNK = 1 << 18
BIAS_SUM = "bias_sum"  # of recurrent layers with a single bias, where others have two that are added
KERAS_ROLES = {
    "kernel": "weight", "gamma": "weight", "beta": "bias", "embeddings": "weight", "moving_mean": "running_mean",
    "moving_variance": "running_var",
}  # fmt: skip
# Orders of axes to channels first, by the number of axes: as it is, then as other frameworks lay them out.
LAYOUTS = {
    2: ((0, 1), (1, 0)), 3: ((0, 1, 2), (0, 2, 1)), 4: ((0, 1, 2, 3), (0, 3, 1, 2), (3, 2, 0, 1)), 5: ((0, 1, 2, 3, 4), (0, 4, 1, 2, 3)),
}  # fmt: skip


def layouts(axes: int) -> tuple[tuple[int, ...], ...]:
    """Return the orders of axes in which a tensor is compared."""
    return LAYOUTS.get(axes, (tuple(range(axes)),))


def sketch(array: Array) -> Array:
    """Return 1,024 float64 sums of signed values, whose differences are those of the arrays.

    Charikar, Chen and Farach-Colton (2002), "Finding frequent items in data streams": the squared norm of a sketch is on average the
    array's. It is linear.
    """
    flat, sums = array.reshape(-1), np.zeros(BUCKETS)
    for begin in range(0, flat.size, CHUNK):
        part = flat[begin : begin + CHUNK].astype(np.float64)
        draw = np.random.default_rng(begin)
        buckets, signs = draw.integers(0, BUCKETS, CHUNK)[: part.size], draw.choice((-1.0, 1.0), CHUNK)[: part.size]
        sums += np.bincount(buckets, weights=part * signs, minlength=BUCKETS)
    return sums


def wanted_steps(text: str) -> frozenset[int]:
    """Return updates from text such as ``0-2,4,8``. Raises ValueError."""
    steps: set[int] = set()
    for part in text.split(","):
        if not (match := re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)):
            raise ValueError(f"steps: got {text!r}; write updates and ranges, such as 0-2,4,8,16.")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last <= MAX_STEPS:
            raise ValueError(f"steps: {part.strip()!r} is no range up to {MAX_STEPS:,}.")
        steps.update(range(first, last + 1))
    return frozenset(steps)


class Recording:
    """A recording that is being written."""

    def __init__(self, folder: str, steps: str, *, full: bool) -> None:
        self._steps, self._full = wanted_steps(steps), full
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if (path / LINES).exists():
            raise FileExistsError(f"{folder!r} has a recording already; name another folder.")
        self._lines, self._values = open(path / LINES, "x"), open(path / VALUES, "xb")  # noqa: SIM115 - for as long as the training
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._seen: set[tuple[str, str]] = set()
        self.update = 0
        self._write({"kind": "start", "format": FORMAT, "full": full})

    @property
    def is_wanted(self) -> bool:
        """Whether the present update is recorded."""
        return self.update in self._steps and os.getpid() == self._process

    def _write(self, line: dict[str, Any]) -> None:
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()

    def layer(self, name: str, kind: str, settings: dict[str, Any], framework: str) -> None:
        """Record a layer's kind and settings, or an optimiser's."""
        with self._lock:
            if ("layer", name) not in self._seen:
                self._seen.add(("layer", name))
                self._write({"kind": "layer", "name": name, "type": kind, "settings": settings, "framework": framework})

    def add(self, part: str, name: str, array: Any, layer: str = "") -> None:
        """Record a tensor of the present update; of one name and part, the first."""
        array = np.asarray(array)
        if array.dtype.kind not in "fiub":
            array = np.asarray(array, np.float64)
        with self._lock:
            if (part, name) in self._seen or not self.is_wanted:
                return
            self._seen.add((part, name))
            numbers = array.astype(np.float64)
            finite = numbers[np.isfinite(numbers)]
            line: dict[str, Any] = {
                "kind": "tensor", "update": self.update, "part": part, "name": name, "layer": layer, "dtype": str(array.dtype),
                "shape": list(array.shape), "norm": float(np.linalg.norm(finite)), "mean": float(finite.mean()) if finite.size else 0.0,
                "least": float(finite.min(initial=np.inf)) if finite.size else 0.0, "most": float(finite.max()) if finite.size else 0.0,
                "zeros": int((numbers == 0).sum()), "invalid": int(numbers.size - finite.size), "sketches": [], "array": None, "rows": None,
            }  # fmt: skip
            is_small = array.dtype.kind == "f" and array.dtype.itemsize <= 4
            if self._full or array.size <= BUCKETS:
                line["array"] = self._append(array.astype(np.float32) if is_small else numbers)
            else:
                line["sketches"] = [self._append(sketch(numbers.transpose(axes))) for axes in layouts(array.ndim)]
            if part == "batch" and array.ndim and array.shape[0] <= MAX_ROWS:
                line["rows"] = self._append(numbers.reshape(array.shape[0], -1).sum(1))
            self._values.flush()
            self._write(line)

    def _append(self, values: Array) -> list[Any]:
        """Return format, place and number of values that were written."""
        place = self._values.tell()
        values = np.ascontiguousarray(values)
        self._values.write(values.tobytes())
        return [values.dtype.str, place, int(values.size)]

    def advance(self) -> None:
        """Go on to the next update."""
        with self._lock:
            self._end()
            self.update += 1
            self._seen = {entry for entry in self._seen if entry[0] == "layer"}

    def _end(self) -> None:
        """Note that the present update is whole; a recording that was cut lacks this line."""
        if self.is_wanted:
            self._write({"kind": "end", "update": self.update})

    def close(self) -> None:
        """Close the files; an update that has begun counts as ended."""
        if any(part not in ("layer", "before") for part, _ in self._seen):
            self._end()
        self._lines.close()
        self._values.close()


def role(name: str) -> str:
    """Return what a weight is to its layer, such as ``bias``."""
    return name.rpartition(".")[2]


def initial_weights(folder: str) -> list[tuple[str, Array]]:
    """Return names and arrays of the state before update 0. Raises ValueError."""
    from ..core.bounded_json import open_regular, parse_json, read_lines  # not with `import recorder`, which imports numpy alone

    weights = []
    with open_regular(Path(folder, VALUES)) as file:
        for text in read_lines(Path(folder, LINES)):
            line = parse_json(text)
            if line["kind"] == "tensor" and line["update"] == 0 and line["part"] == "before":
                if line["array"] is None:
                    raise ValueError(f"{folder!r} has sketches of its weights; record it with full=True.")
                kind, place, count = line["array"]
                file.seek(place)
                values = np.frombuffer(file.read(np.dtype(kind).itemsize * count), kind)
                weights.append((line["name"], values.reshape(line["shape"]).astype(np.float32)))
    if not weights:
        raise ValueError(f"{folder!r} has no weights before update 0; use recorder.watch or recorder.state there.")
    return weights


def with_biases_of(wanted: Iterable[str], weights: list[tuple[str, Array]]) -> list[tuple[str, Array]]:
    """Return weights whose recurrent layers have one or two biases, as the wanted names say."""
    wants_sum = any(role(name).startswith(BIAS_SUM) for name in wanted)
    arrays, fitting = dict(weights), []
    for name, value in weights:
        if wants_sum and "bias_ih" in role(name):
            fitting.append((name.replace("bias_ih", BIAS_SUM), value + arrays.get(name.replace("bias_ih", "bias_hh"), 0)))
        elif not wants_sum and role(name).startswith(BIAS_SUM):
            fitting += [(name.replace(BIAS_SUM, "bias_ih"), value), (name.replace(BIAS_SUM, "bias_hh"), np.zeros_like(value))]
        elif not (wants_sum and "bias_hh" in role(name)):
            fitting.append((name, value))
    return fitting


def matched(wanted: list[tuple[str, tuple[int, ...]]], weights: list[tuple[str, Array]]) -> list[tuple[str, Array]]:
    """Return for each name and shape the weight of this name, else the next one of this shape.

    If possible it has the same role. Warns where order alone decided. Raises ValueError.
    """
    left = with_biases_of([name for name, _ in wanted], weights)
    chosen: dict[str, tuple[str, Array]] = {}
    for is_exact in (True, False):
        for name, shape in wanted:
            places = [place for place, (_, value) in enumerate(left) if value.shape == shape]
            if is_exact:
                places = [place for place in places if left[place][0] == name]
            places = [place for place in places if role(left[place][0]) == role(name)] or places
            if name not in chosen and places:
                chosen[name] = left.pop(places[0])
    for name, shape in wanted:
        if name not in chosen:
            raise ValueError(f"recorder.adopt: the recording has no further weight of the shape {list(shape)} for {name!r}.")
    _warn_of_order(wanted, chosen)
    return [chosen[name] for name, _ in wanted]


def _warn_of_order(wanted: list[tuple[str, tuple[int, ...]]], chosen: dict[str, tuple[str, Array]]) -> None:
    """Warn of weights of one shape and role that got their values by order, not by name."""
    groups: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for name, shape in wanted:
        if chosen[name][0] != name:
            groups.setdefault((shape, role(name)), []).append(name)
    doubtful = [
        name for names in groups.values() if any((chosen[name][1] != chosen[names[0]][1]).any() for name in names) for name in names
    ]
    if doubtful:
        pairs = ", ".join(f"{name} = {chosen[name][0]}" for name in doubtful[:8]) + (" …" if len(doubtful) > 8 else "")
        warnings.warn(
            f"recorder.adopt: weights of equal shapes were taken in their order; check that these belong together: {pairs}.", stacklevel=4
        )
