"""The records of runs as long tables for other programs: CSV or Parquet, with units in the names of the columns.

A row of ``steps`` is an update, of ``evals`` an evaluation, of ``system`` a node's sample, of ``summary`` a run; the first column names the
run. Rows are written a batch at a time, so that a run of any length needs little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ...core.untrusted.console import json_text
from ...metrics import LOSS
from ...records.schema import EvalRecord, SystemRecord
from ...records.store.jsonl import finite_json
from ...records.store.summary_schema import type_parts
from ...records.summary.node_usage import rate_between
from ..catalog.index import FIGURES, row_type, run_row
from ..catalog.run import Run, labelled
from ..catalog.summary_rows import metric_figures

__all__ = ["TABLES", "Column", "Table", "table_of"]

Kind = Literal["text", "integer", "number", "truth", "moment"]
"""A moment is a text as ISO 8601 writes it."""

Cells = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column's name and what its cells hold, or None."""

    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Table:
    """A table's columns and its rows, which may be taken once; their first cell is the run."""

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

_EVALS = [field.name for field in fields(EvalRecord)]
_RATES = ("network_sent_bytes", "network_received_bytes")


def table_of(what: str, runs: Sequence[Run]) -> Table:
    """Return a table, one of `TABLES`, over the rows of all `runs` in their order. Its rows raise DamagedRunError as they are read."""
    runs = labelled(runs)
    if what == "summary":
        return _summary(runs)
    if what == "evals":
        return _evals(runs)
    columns, rows = _RECORDS[what]
    return Table(columns, ((run.name, *cells) for run in runs for cells in rows(run)))


# Records --------------------------------------------------------------------------------------------------------------


def _steps(run: Run) -> Iterator[Cells]:
    """Yield the updates; within a group, whose end alone was measured, their times are spread evenly."""
    for record in run.steps():
        count, rates = record.count, record.learning_rates
        each = record.seconds / count if count else 0.0
        group = (
            record.step,
            count,
            record.time_seconds,
            record.seconds,
            record.examples,
            record.data_wait_seconds,
            record.network_wait_seconds,
            record.profiled_seconds,
        )
        for index, loss in enumerate(record.losses):
            yield (
                record.step + index,
                record.epoch,
                record.worker,
                record.time_seconds - each * (count - 1 - index),
                loss,
                None if not rates else rates[0] if len(rates) == 1 else rates[index],
                None if record.staleness is None else record.staleness[index],
                *group,
            )


def _evals(runs: Sequence[Run]) -> Table:
    """Return the evaluations, with a column for each metric that any of the runs has."""
    metrics = list(dict.fromkeys([LOSS.name, *(info.name for run in runs for info in run.metrics)]))
    before, after = _EVALS[: _EVALS.index("loss")], _EVALS[_EVALS.index("metrics") + 1 :]
    kinds = {column.name: column for column in _of_record(EvalRecord)}
    columns = [_RUN, *(kinds[name] for name in before), *(Column(name, "number") for name in metrics), *(kinds[name] for name in after)]

    def cells(record: EvalRecord) -> Cells:
        figures = (record.loss if name == LOSS.name else record.metrics.get(name) for name in metrics)
        return *(getattr(record, name) for name in before), *figures, *(getattr(record, name) for name in after)

    return Table(columns, ((run.name, *cells(record)) for run in runs for record in run.evals))


def _system(run: Run) -> Iterator[Cells]:
    """Yield the samples, and the rates of the network's counters since the node's sample before."""
    before: dict[int, SystemRecord] = {}
    nested = {column.name for column in _of_record(SystemRecord) if column.kind == "text"} - {"network_source"}
    for record in run.samples():
        cells = [_json(record, field.name) if field.name in nested else getattr(record, field.name) for field in fields(SystemRecord)]
        yield (*cells, *(rate_between(before.get(record.node), record, counter) for counter in _RATES))
        before[record.node] = record


def _json(record: SystemRecord, name: str) -> str | None:
    value = getattr(record, name)
    if name == "tasks":
        value = [{field.name: getattr(task, field.name) for field in fields(task)} for task in value]
    return None if value is None else json_text(finite_json(value))


def _of_record(record: type[Any]) -> list[Column]:
    """Return a column for each field of a kind of record; what is no single figure becomes JSON text."""
    types = get_type_hints(record)
    return [Column(field.name, _kind_declared(types[field.name])) for field in fields(record)]


def _kind_declared(declared: Any) -> Kind:
    of = set(get_args(declared)) - {type(None)} if get_origin(declared) in (Union, UnionType) else {declared}
    return "integer" if of == {int} else "number" if of == {float} else "text"


_RUN = Column("run", "text")
_RECORDS: Mapping[str, tuple[Sequence[Column], Callable[[Run], Iterator[Cells]]]] = {
    "steps": ([Column(name, kind) for name, kind in _STEP_COLUMNS.items()], _steps),
    "system": ([_RUN, *_of_record(SystemRecord), *(Column(f"{name}_per_second", "number") for name in _RATES)], _system),
}


# Summaries ------------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[Run]) -> Table:
    """Return a row a run, also of runs that ended without a summary.

    A column's kind is that of its figure, whatever the runs have, so that files of other runs go with it; lists become JSON text.
    """
    rows = [{**run_row(run), "run": run.name} for run in runs]
    figures = [name for name in FIGURES if name not in ("run", "folder")]
    columns = [_RUN, *(Column(name, _kind(name)) for name in figures), *(Column(name, "number") for name in metric_figures(rows))]
    return Table(columns, (tuple(_cell(row.get(column.name), column.kind) for column in columns) for row in rows))


def _kind(name: str) -> Kind:
    """Return the kind of one of `FIGURES`."""
    if name == "created_at":
        return "moment"
    kinds: Mapping[type, Kind] = {list: "text", bool: "truth", int: "integer", float: "number"}
    parts = [get_origin(part) or part for part in type_parts(row_type(name))]
    return next((kind for of, kind in kinds.items() if of in parts), "text")


def _cell(value: Any, kind: Kind) -> Any:
    if value is None or kind in ("truth", "integer"):
        return value
    if kind == "number":
        return float(value) if isinstance(value, str) else value  # the name of one that is not finite
    return value if isinstance(value, str) else json_text(finite_json(value))
