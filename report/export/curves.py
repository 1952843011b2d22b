"""Curves of several runs on one grid: loss, a metric or speed over updates, examples or seconds, as they are and smoothed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...records.store.jsonl import finite_json
from ..catalog.run import Run, labelled
from ..series.arrays import Floats, Integers, StepSeries
from ..series.downsample import smoothed
from ..series.throughput import training_clock
from ..tables.formats import write_csv

__all__ = ["AXES", "POINTS", "Curves", "curves", "quantities"]

Quantity = str
"""``loss``, ``steps_per_second``, ``examples_per_second``, or the name of a metric."""
Axis = Literal["steps", "examples", "seconds"]
Flags = NDArray[np.bool_]

OF_EVERY_RUN: tuple[Quantity, ...] = ("loss", "steps_per_second", "examples_per_second")
AXES: tuple[Axis, ...] = ("steps", "examples", "seconds")

POINTS = 200
"""Points of the grid where nothing else is said: what a picture of usual size can show."""

MOST_VALUES = 1_000_000
"""Points of all runs together: some hundred bytes each until they are printed, and far more than any picture shows."""

LEAST_SECONDS = 1e-9
"""What is less of a clock is rounding: no time has passed."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves on one grid, `grid` [points]; by the runs' names, `raw` and `smooth` [points], NaN where a run has nothing to say.

    `inside` [points] is false beyond a run's own range. `smooth` is empty where nothing was to be smoothed, `weight` is None then.
    """

    quantity: Quantity
    over: Axis
    weight: float | None
    grid: Floats
    raw: Mapping[str, Floats]
    smooth: Mapping[str, Floats]
    inside: Mapping[str, Flags]

    def to_json(self) -> dict[str, Any]:
        """Return them as a JSON object; null beyond a run's range, ``"NaN"`` where the figure itself is none."""
        runs = []
        for name, values in self.raw.items():
            smooth = self.smooth.get(name)
            runs.append(
                {"run": name, "raw": self._listed(name, values), "smoothed": None if smooth is None else self._listed(name, smooth)}
            )
        document = {"quantity": self.quantity, "over": self.over, "smooth": self.weight, "grid": self.grid.tolist(), "runs": runs}
        found: dict[str, Any] = finite_json(document)
        return found

    def to_csv(self) -> str:
        """Return a line a grid point: the point, and for each run its value, and smoothed in a column of its own."""
        columns: dict[str, list[Any]] = {self.over: self.grid.tolist()}
        for name, values in self.raw.items():
            columns[name] = self._listed(name, values)
            if name in self.smooth:
                columns[f"{name} smoothed"] = self._listed(name, self.smooth[name])
        return write_csv([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])

    def _listed(self, name: str, values: Floats) -> list[float | None]:
        return [float(value) if inside else None for value, inside in zip(values, self.inside[name], strict=True)]


def quantities(runs: Sequence[Run]) -> list[Quantity]:
    """Return what there can be curves of: the loss, the metrics that any of the runs has, and speeds."""
    metrics = [info.name for run in runs for info in run.metrics]
    loss, *rates = OF_EVERY_RUN
    return list(dict.fromkeys([loss, *metrics, *rates]))


def curves(runs: Sequence[Run], quantity: Quantity, over: Axis, *, smooth: float | None = None, points: int = POINTS) -> Curves:
    """Return the curves of some runs.

    The grid runs evenly from the least to the greatest point of all runs; between its own points a run is interpolated, beyond them it has
    no value. Loss is that of each update, a metric that of each evaluation on ``test``, a rate the mean since the grid point before.
    `smooth` (0 to below 1) is the share that an exponential moving average keeps of the past, a value of the run (of rates: of the
    grid) at a time. Raises UsageError where no run has the quantity, a run cannot be read, or so many
    points would be more than `MOST_VALUES`.
    """
    if points * len(runs) > MOST_VALUES:
        most = f"at most {MOST_VALUES // len(runs):,}" + (f" each for {len(runs):,} runs" if len(runs) > 1 else "")
        raise UsageError.of("--points", points, f"{most}; the records themselves are written by `trainer runs export`")
    own = {run.name: _points(run, quantity, over) for run in labelled(runs)}
    known = [x for x, _ in own.values() if len(x)]
    if not known:
        raise UsageError(f"--curves: got {quantity!r}, of which none of these runs has anything recorded.")
    grid = np.linspace(min(x[0] for x in known), max(x[-1] for x in known), points)
    grid = grid if over == "seconds" else np.unique(np.round(grid))
    inside = {name: (grid >= x[0]) & (grid <= x[-1]) if len(x) else np.zeros(len(grid), bool) for name, (x, _) in own.items()}
    rates = quantity.endswith("_per_second")
    if rates:
        inside = {name: _from_the_second(known) for name, known in inside.items()}
    shape: Callable[[Floats, Floats], Floats] = (lambda x, y: _rates(grid, x, y)) if rates else (lambda x, y: _between(grid, x, y))
    raw = {name: shape(x, y) if len(x) else np.full(len(grid), np.nan) for name, (x, y) in own.items()}
    if rates:
        inside = {name: known & ~np.isnan(raw[name]) for name, known in inside.items()}
    even: dict[str, Floats] = {}
    if smooth is not None:
        for name, (x, y) in own.items():
            even[name] = _smooth_rates(raw[name], inside[name], smooth) if rates else _between(grid, x, smoothed(y, smooth))
    return Curves(quantity, over, smooth, grid, raw, even, inside)


def _points(run: Run, quantity: Quantity, over: Axis) -> tuple[Floats, Floats]:
    """Return a run's own points in order: where each lies, and the value there.

    For a rate both are needed as they grow: where each update lies, and the other quantity that the rate is made of.
    """
    steps = run.step_series()
    if quantity not in OF_EVERY_RUN:
        records = run.tests
        done = np.array([record.step for record in records], np.int64)
        where = {"steps": done, "examples": _examples_before(steps, done), "seconds": np.array([record.time_seconds for record in records])}
        return where[over].astype(np.float64), np.array([record.figure(quantity) for record in records], np.float64)
    if quantity == "loss":
        order = steps.in_time() if over == "seconds" else slice(None)
        where = {"steps": steps.step, "examples": steps.examples, "seconds": steps.time_seconds}
        return where[over][order].astype(np.float64), steps.loss[order].astype(np.float64)
    return _progress(steps, quantity, over)


def _examples_before(steps: StepSeries, done: Integers) -> Integers:
    """Return the examples consumed by as many updates."""
    total: Integers = np.concatenate([[0], steps.examples])
    return total[np.searchsorted(steps.step, done, side="left")]


def _progress(steps: StepSeries, quantity: Quantity, over: Axis) -> tuple[Floats, Floats]:
    """Return in the order of time where the updates lie, and what the rate is made of: the time, and what had been done.

    The examples of an update are those of all that ended before it and its own. What was profiled counts in neither.
    """
    order = steps.in_time()
    seconds, counts = steps.time_seconds[order], ~steps.profiled[order]
    examples = np.diff(steps.examples, prepend=0)[order]
    where = {"steps": np.arange(1, len(order) + 1), "examples": np.cumsum(examples), "seconds": seconds}
    done = np.cumsum(counts if quantity == "steps_per_second" else examples * counts)
    return where[over].astype(np.float64), np.stack([training_clock(seconds, steps.profile_pauses()), done], axis=1)


def _between(grid: Floats, x: Floats, y: Floats) -> Floats:
    """Return the values on the grid, interpolated; what lies beyond the range means nothing."""
    if not len(x):
        return np.full(len(grid), np.nan)
    found: Floats = np.interp(grid, x, y)
    return found


def _rates(grid: Floats, x: Floats, y: Floats) -> Floats:
    """Return for each grid point the mean rate since the one before; NaN for the first, and where all was profiled."""
    passed, done = (np.diff(np.interp(grid, x, column), prepend=np.nan) for column in y.T)
    rates: Floats = np.divide(done, passed, out=np.full(len(grid), np.nan), where=passed > LEAST_SECONDS)
    return rates


def _from_the_second(inside: Flags) -> Flags:
    """Leave out the first point of a range: a rate needs one before it."""
    found: Flags = inside & np.concatenate([[False], inside[:-1]])
    return found


def _smooth_rates(values: Floats, inside: Flags, weight: float) -> Floats:
    even = np.full(len(values), np.nan)
    even[inside] = smoothed(values[inside], weight)
    return even
