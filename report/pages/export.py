"""Export of records as tables (CSV, Parquet), in batches of rows, and of curves on one grid."""

from __future__ import annotations

import csv
import importlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import IO, Any, Literal, TextIO, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ...core.console import ShownStream, cell_text, json_text
from ...core.drafts import replacing
from ...core.errors import MissingPackageError, TrainerError, UsageError
from ...metrics import LOSS
from ...records.node_usage import rate_between
from ...records.store.jsonl import finite_json
from ...records.store.schema import EvalRecord, SystemRecord
from ...records.store.summary_schema import type_parts
from ..compare.formats import write_csv as write_rows
from ..runs.columns import metric_figures
from ..runs.query import FIGURES, row_type, run_row
from ..runs.run import Run, labelled
from ..runs.series import smoothed, training_clock
from ..runs.series_arrays import Floats, Integers, StepSeries

Kind = Literal["text", "integer", "number", "truth", "moment"]  # a moment is ISO 8601 text
Cells = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column's name and the kind of its cells that are not None."""

    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Table:
    """A table's columns, and its rows, readable once; their first cell is the run."""

    columns: Sequence[Column]
    rows: Iterator[Cells]


TABLES = ("steps", "evals", "system", "summary")
_STEP_COLUMNS: Mapping[str, Kind] = {
    "run": "text",
    "step": "integer",
    "epoch": "integer",
    "worker": "integer",
    "time_seconds": "number",
    "loss": "number",
    "learning_rate": "number",
    "staleness": "integer",
    "group_first_step": "integer",
    "group_updates": "integer",
    "group_time_seconds": "number",
    "group_seconds": "number",
    "group_examples": "integer",
    "group_data_wait_seconds": "number",
    "group_network_wait_seconds": "number",
    "group_profiled_seconds": "number",
}
_GROUP = ("step", "count", "time_seconds", "seconds", "examples", "data_wait_seconds", "network_wait_seconds", "profiled_seconds")
_EVALS = [field.name for field in fields(EvalRecord)]
_RATES = ("network_sent_bytes", "network_received_bytes")


def table_of(what: str, runs: Sequence[Run]) -> Table:
    """Return one of `TABLES` over all `runs`; reading its rows may raise DamagedRunError."""
    runs = labelled(runs)
    if what == "summary":
        return _summary(runs)
    if what == "evals":
        return _evals(runs)
    columns, rows = _RECORDS[what]
    return Table(columns, ((run.name, *cells) for run in runs for cells in rows(run)))


def _steps(run: Run) -> Iterator[Cells]:
    for record in run.steps():
        count, rates = record.count, record.learning_rates
        value = record.seconds / count if count else 0.0
        group = [getattr(record, name) for name in _GROUP]
        for index, loss in enumerate(record.losses):
            yield (
                record.step + index,
                record.epoch,
                record.worker,
                record.time_seconds - value * (count - 1 - index),
                loss,
                None if not rates else rates[0] if len(rates) == 1 else rates[index],
                None if record.staleness is None else record.staleness[index],
                *group,
            )


def _evals(runs: Sequence[Run]) -> Table:
    metrics = list(dict.fromkeys([LOSS.name, *(info.name for run in runs for info in run.metrics)]))
    before, after = _EVALS[: _EVALS.index("loss")], _EVALS[_EVALS.index("metrics") + 1 :]
    kinds = {column.name: column for column in _record_columns(EvalRecord)}
    columns = [_RUN, *(kinds[name] for name in before), *(Column(name, "number") for name in metrics), *(kinds[name] for name in after)]

    def cells(record: EvalRecord) -> Cells:
        figures = (record.loss if name == LOSS.name else record.metrics.get(name) for name in metrics)
        return *(getattr(record, name) for name in before), *figures, *(getattr(record, name) for name in after)

    return Table(columns, ((run.name, *cells(record)) for run in runs for record in run.evals))


def _system(run: Run) -> Iterator[Cells]:
    before: dict[int, SystemRecord] = {}
    nested = {column.name for column in _record_columns(SystemRecord) if column.kind == "text"} - {"network_source"}
    for record in run.samples():
        cells = [_json(record, field.name) if field.name in nested else getattr(record, field.name) for field in fields(SystemRecord)]
        yield (*cells, *(rate_between(before.get(record.node), record, counter) for counter in _RATES))
        before[record.node] = record


def _json(record: SystemRecord, name: str) -> str | None:
    value = getattr(record, name)
    if name == "tasks":
        value = [{field.name: getattr(task, field.name) for field in fields(task)} for task in value]
    return None if value is None else json_text(finite_json(value))


def _record_columns(record: type[Any]) -> list[Column]:
    types = get_type_hints(record)
    return [Column(field.name, _kind_declared(types[field.name])) for field in fields(record)]


def _kind_declared(declared: Any) -> Kind:
    types = set(get_args(declared)) - {type(None)} if get_origin(declared) in (Union, UnionType) else {declared}
    return "integer" if types == {int} else "number" if types == {float} else "text"


_RUN = Column("run", "text")
_RECORDS: Mapping[str, tuple[Sequence[Column], Callable[[Run], Iterator[Cells]]]] = {
    "steps": ([Column(name, kind) for name, kind in _STEP_COLUMNS.items()], _steps),
    "system": ([_RUN, *_record_columns(SystemRecord), *(Column(f"{name}_per_second", "number") for name in _RATES)], _system),
}


def _summary(runs: Sequence[Run]) -> Table:
    rows = [{**run_row(run), "run": run.name} for run in runs]
    figures = [name for name in FIGURES if name not in ("run", "folder")]
    columns = [_RUN, *(Column(name, _kind(name)) for name in figures), *(Column(name, "number") for name in metric_figures(rows))]
    return Table(columns, (tuple(_cell(row.get(column.name), column.kind) for column in columns) for row in rows))


def _kind(name: str) -> Kind:
    if name == "created_at":
        return "moment"
    kinds: Mapping[type, Kind] = {list: "text", bool: "truth", int: "integer", float: "number"}
    parts = [get_origin(part) or part for part in type_parts(row_type(name))]
    return next((kind for of, kind in kinds.items() if of in parts), "text")


def _cell(value: Any, kind: Kind) -> Any:
    if value is None or kind in ("truth", "integer"):
        return value
    if kind == "number":
        return float(value) if isinstance(value, str) else value  # non-finite values are written by name
    return value if isinstance(value, str) else json_text(finite_json(value))


FORMATS = ("csv", "parquet")
_BATCH_ROWS = 50_000  # some 20 MB of rows


def check_format(name: str) -> None:
    """Raise MissingPackageError if the package of a format is not installed."""
    if name == "parquet":
        try:
            importlib.import_module("pyarrow")
        except ModuleNotFoundError as error:
            raise MissingPackageError("format parquet needs the package pyarrow. Install it: pip install 'crosstrain[parquet]'") from error


def check_new(path: Path, *, overwrite: bool) -> None:
    """Raise UsageError if `path` cannot become a new file."""
    if path.is_dir():
        raise UsageError(f"--output: {str(path)!r} is a folder, and a file is to be written. Give another name.")
    if path.exists() and not path.is_file():  # would be replaced by a file
        raise UsageError(f"--output: {str(path)!r} is a device or a pipe, and a file is to be written. Give another name.")
    if path.exists() and not overwrite:
        raise UsageError(f"--output: {str(path)!r} exists. Give another name, or --overwrite.")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"--output: {str(path.absolute().parent)!r} is no folder that can be written. Give another.")


def write_file(table: Table, path: Path, file_format: str, *, overwrite: bool) -> int:
    """Write a table to `path`; return the number of rows. Raises UsageError (`check_new`) first."""
    check_new(path, overwrite=overwrite)
    with _whole(path) as partial:
        if file_format == "parquet":
            return _write_parquet(table, partial)
        with partial.open("w", encoding="utf-8", newline="") as file:
            return write_csv(table, file)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    try:
        with replacing(path) as draft:
            yield draft
    except OSError as error:
        raise TrainerError(f"{path}: cannot be written ({error.strerror}).") from error


def _batches(table: Table) -> Iterator[list[Cells]]:
    while batch := list(itertools.islice(table.rows, _BATCH_ROWS)):
        yield batch


def write_csv(table: Table, file: IO[str] | None = None) -> int:
    """Write a table to `file` (default: stdout); return the number of rows. Escapes formulas."""
    writer = csv.writer(ShownStream(cast(TextIO, file or sys.stdout)), lineterminator="\n")
    writer.writerow([cell_text(column.name) for column in table.columns])
    numbers = [index for index, column in enumerate(table.columns) if column.kind == "number"]
    texts = [index for index, column in enumerate(table.columns) if column.kind == "text"]
    rows = 0
    for batch in _batches(table):
        writer.writerows(_spelled(_without_formulas(cells, texts), numbers) for cells in batch)
        rows += len(batch)
    return rows


def _without_formulas(cells: Cells, texts: Sequence[int]) -> Cells:
    escaped = [*cells]
    for index in texts:
        if escaped[index] is not None:
            escaped[index] = cell_text(escaped[index])
    return escaped


def _spelled(cells: Cells, numbers: Sequence[int]) -> Cells:
    if all(cells[index] is None or math.isfinite(cells[index]) for index in numbers):
        return cells
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    return [names.get(str(cell), cell) if index in numbers else cell for index, cell in enumerate(cells)]


def _moment(text: str | None) -> datetime | None:
    """Return an ISO time in UTC; None within hours of the years 1 and 10000, where UTC has none."""
    try:
        return None if text is None else datetime.fromisoformat(text).astimezone(UTC)
    except OverflowError:
        return None


def _write_parquet(table: Table, path: Path) -> int:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    types = {"text": arrow.string(), "integer": arrow.int64(), "number": arrow.float64(), "truth": arrow.bool_()}
    types |= {"moment": arrow.timestamp("us", tz="UTC")}
    schema = arrow.schema([(column.name, types[column.kind]) for column in table.columns])
    rows = 0
    with parquet.ParquetWriter(path, schema) as writer:
        for batch in _batches(table):
            columns = zip(table.columns, zip(*batch, strict=True), strict=True)
            cells = [(column.kind, [*map(_moment, values)] if column.kind == "moment" else values) for column, values in columns]
            arrays = [arrow.array(values, type=types[kind]) for kind, values in cells]
            writer.write_batch(arrow.record_batch(arrays, schema=schema))
            rows += len(batch)
    return rows


Quantity = str  # ``loss``, ``steps_per_second``, ``examples_per_second``, or the name of a metric
Axis = Literal["steps", "examples", "seconds"]
Flags = NDArray[np.bool_]
OF_EVERY_RUN: tuple[Quantity, ...] = ("loss", "steps_per_second", "examples_per_second")
AXES: tuple[Axis, ...] = ("steps", "examples", "seconds")
POINTS = 200  # default grid: the resolution of a usual picture
MAX_VALUES = 1_000_000  # of all runs together, of some hundred bytes each
MIN_SECONDS = 1e-9  # shorter times are rounding errors of the clock


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves on one grid [points], by the runs' names; NaN without a value."""

    quantity: Quantity
    over: Axis
    weight: float | None  # None without smoothing, and `smooth` is empty
    grid: Floats
    raw: Mapping[str, Floats]
    smooth: Mapping[str, Floats]
    inside: Mapping[str, Flags]  # false beyond a run's range

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; null beyond a run's range, ``"NaN"`` for a NaN figure."""
        smooth = {name: self._listed(name, values) for name, values in self.smooth.items()}
        runs = [{"run": name, "raw": self._listed(name, values), "smoothed": smooth.get(name)} for name, values in self.raw.items()]
        document = {"quantity": self.quantity, "over": self.over, "smooth": self.weight, "grid": self.grid.tolist(), "runs": runs}
        plain: dict[str, Any] = finite_json(document)
        return plain

    def to_csv(self) -> str:
        """Return a line per grid point: the point, and each run's value and smoothed value."""
        columns: dict[str, list[Any]] = {self.over: self.grid.tolist()}
        for name, values in self.raw.items():
            columns[name] = self._listed(name, values)
            if name in self.smooth:
                columns[f"{name} smoothed"] = self._listed(name, self.smooth[name])
        return write_rows([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])

    def _listed(self, name: str, values: Floats) -> list[float | None]:
        return [float(value) if inside else None for value, inside in zip(values, self.inside[name], strict=True)]


def quantities(runs: Sequence[Run]) -> list[Quantity]:
    """Return the quantities with curves: the loss, the metrics of any run, and speeds."""
    metrics = [info.name for run in runs for info in run.metrics]
    loss, *rates = OF_EVERY_RUN
    return list(dict.fromkeys([loss, *metrics, *rates]))


def curves(runs: Sequence[Run], quantity: Quantity, over: Axis, *, smooth: float | None = None, points: int = POINTS) -> Curves:
    """Return the curves of some runs. Raises UsageError, also for more than `MAX_VALUES`.

    The grid is even over the range of all runs; a run has no value beyond its own. Loss is per update, a metric per evaluation on ``test``,
    a rate the mean since the previous grid point. `smooth` (0 to below 1) is the weight of the past in an exponential moving average over
    the run's values (rates: over the grid).
    """
    if points * len(runs) > MAX_VALUES:
        most = f"at most {MAX_VALUES // len(runs):,}" + (f" each for {len(runs):,} runs" if len(runs) > 1 else "")
        raise UsageError.of("--points", points, f"{most}; the records themselves are written by `trainer runs export`")
    points_of_run = {run.name: _points(run, quantity, over) for run in labelled(runs)}
    known = [x for x, _ in points_of_run.values() if len(x)]
    if not known:
        raise UsageError(f"--curves: got {quantity!r}, of which none of these runs has anything recorded.")
    grid = np.linspace(min(x[0] for x in known), max(x[-1] for x in known), points)
    grid = grid if over == "seconds" else np.unique(np.round(grid))
    inside = {name: (grid >= x[0]) & (grid <= x[-1]) if len(x) else np.zeros(len(grid), bool) for name, (x, _) in points_of_run.items()}
    rates = quantity.endswith("_per_second")
    if rates:
        inside = {name: known & np.append(False, known[:-1]) for name, known in inside.items()}  # a rate needs a previous point
    shape: Callable[[Floats, Floats], Floats] = (
        (lambda x, y: _rates(grid, x, y)) if rates else (lambda x, y: _interpolate_between(grid, x, y))
    )
    raw = {name: shape(x, y) if len(x) else np.full(len(grid), np.nan) for name, (x, y) in points_of_run.items()}
    if rates:
        inside = {name: known & ~np.isnan(raw[name]) for name, known in inside.items()}
    even: dict[str, Floats] = {}
    if smooth is not None:
        for name, (x, y) in points_of_run.items():
            even[name] = _smooth_rates(raw[name], inside[name], smooth) if rates else _interpolate_between(grid, x, smoothed(y, smooth))
    return Curves(quantity, over, smooth, grid, raw, even, inside)


def _points(run: Run, quantity: Quantity, over: Axis) -> tuple[Floats, Floats]:
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
    total: Integers = np.concatenate([[0], steps.examples])
    return total[np.searchsorted(steps.step, done, side="left")]


def _progress(steps: StepSeries, quantity: Quantity, over: Axis) -> tuple[Floats, Floats]:
    order = steps.in_time()
    seconds, counts = steps.time_seconds[order], ~steps.profiled[order]
    examples = np.diff(steps.examples, prepend=0)[order]
    where = {"steps": np.arange(1, len(order) + 1), "examples": np.cumsum(examples), "seconds": seconds}
    done = np.cumsum(counts if quantity == "steps_per_second" else examples * counts)
    return where[over].astype(np.float64), np.stack([training_clock(seconds, steps.profile_pauses()), done], axis=1)


def _interpolate_between(grid: Floats, x: Floats, y: Floats) -> Floats:
    if not len(x):
        return np.full(len(grid), np.nan)
    values: Floats = np.interp(grid, x, y)
    return values


def _rates(grid: Floats, x: Floats, y: Floats) -> Floats:
    passed, done = (np.diff(np.interp(grid, x, column), prepend=np.nan) for column in y.T)
    rates: Floats = np.divide(done, passed, out=np.full(len(grid), np.nan), where=passed > MIN_SECONDS)
    return rates


def _smooth_rates(values: Floats, inside: Flags, weight: float) -> Floats:
    even = np.full(len(values), np.nan)
    even[inside] = smoothed(values[inside], weight)
    return even
