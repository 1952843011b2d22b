"""From rows to columns that models read.

A first pass over a table keeps its cells in compact form, and a second one reads these.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ....core.console import one_line
from ....core.errors import UsageError
from ...base import PreparedColumns, Split, TableFeatures
from ...columns import Column, ColumnSpec
from ..disk import require_disk
from ..target_classes import MAX_CLASSES, Task, classes_of, joined, labels_of, predicts_numbers, task_note, wrong
from .cells import Categories, CellError, Cells, Kind, kind_of, mixed, numbers_of
from .rows import Rows, Table

Array = NDArray[Any]
INPUT, TARGET = "x", "y"  # columns of the dataset
MAX_CATEGORIES = 1000
UNIT, MAX_LOST = 2.0**-24, 1e-3  # rounding in float32, and how much of a column's standard deviation it may be
MAX_INPUTS = 1 << 16
MAX_WHOLE = 2**53
MAX_BLOCK_INPUTS = 1 << 24  # that are in memory together as one-hot columns
DATES = "dates and times"
COMMAS_ADVICE = "Give decimal=comma where decimals follow it, write thousands without it, or give categorical={name}."
LEFT_OUT_ADVICE = "Leave the column out with leave-out={name}, or turn it into numbers."
_SPLITS: tuple[Split, ...] = ("train", "test")
_SPOOL = "cells.bin"


@dataclass(frozen=True, slots=True)
class Choices:
    """What a user may choose about a table.

    `share`: of the rows that are for the test, by a hash of each. `split`: the column that says it instead, as train or test.
    """

    target: str
    task: Task = "auto"
    categories: Literal["one-hot", "codes"] = "one-hot"
    missing: Literal["refuse", "mean", "drop"] = "refuse"
    standardise: bool = True
    split: str = ""
    share: float = 0.2
    left_out: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()


@dataclass
class _InputColumn:
    """An input column: its place in the file, its kind, and its categories."""

    name: str
    place: int
    kind: Kind
    categories: Categories


class Survey:
    """The first pass: kinds of columns, cells in compact form in a folder, and sums for means."""

    def __init__(self, tables: Sequence[Table], choices: Choices, work: Path) -> None:
        self._tables, self._choices, self._spool = tables, choices, work / _SPOOL
        names = list(tables[0].names)
        if len(tables) > 1 and list(tables[1].names) != names:
            raise wrong(tables[1].path, f"its columns are not those of {tables[0].path.name!r}.")
        for name in (choices.target, choices.split, *choices.left_out, *choices.categorical):
            if name and name not in names:
                raise UsageError.of(f"data: column of {tables[0].path.name!r}", name, ", ".join(names), names)
        self._names = names
        unread = {choices.target, choices.split, *choices.left_out}
        self._inputs: list[_InputColumn] = []
        self._input_names = [name for name in names if name not in unread]
        if not self._input_names:
            raise wrong(tables[0].path, "there is no column to predict the target from.")
        self._notation = tables[0].notation
        for name in (*self._input_names, choices.target):
            if (what := tables[0].unreadable.get(name)) is not None:
                raise wrong(tables[0].path, f"the column {name!r} holds {what}. Leave it out, or give each value a column.")
        self._target_kind: Kind = "numbers"
        self._target_codes = Categories(self._notation.missing)
        self._whole = True
        self.counts: dict[Split, int] = {"train": 0, "test": 0}
        self.dropped = 0
        self._sums = self._known = self._largest = np.zeros(0)
        self._seen: dict[Split, list[set[int]]] = {}
        self._target_seen: dict[Split, set[float]] = {"train": set(), "test": set()}

    def read(self) -> None:
        """Read all tables."""
        with self._spool.open("wb") as file:
            for number, table in enumerate(self._tables):
                for rows in table.blocks():
                    if not self._inputs:
                        self._begin(table, rows)
                    self._add(file, table, rows, number)
        if not self._inputs:
            raise wrong(self._tables[0].path, "there are no rows below the header.")
        for split in _SPLITS:
            if not self.counts[split]:
                raise wrong(self._tables[0].path, f"no row is for the {split} split.")

    def _begin(self, table: Table, rows: Rows) -> None:
        """Decide on kinds by the first rows.

        Raises UsageError for columns that cannot be read, TrainerError for too little disk.
        """
        unread: dict[str, list[str]] = {}
        for name in self._input_names:
            place = self._names.index(name)
            kind = "categories" if name in self._choices.categorical else kind_of(rows.columns[place], self._notation)
            if kind == "numbers" or kind == "categories":
                self._inputs.append(_InputColumn(name, place, kind, Categories(self._notation.missing)))
            else:
                unread.setdefault(kind, []).append(name)
        for what, names in unread.items():
            advice = (LEFT_OUT_ADVICE if what == "dates" else COMMAS_ADVICE).format(name=";".join(names))
            raise wrong(table.path, f"{DATES if what == 'dates' else what} are no inputs: {joined(names)}. {advice}")
        name, cells = self._choices.target, rows.columns[self._names.index(self._choices.target)]
        target = "categories" if name in self._choices.categorical else kind_of(cells, self._notation)
        if target == "numbers with commas":
            raise wrong(table.path, f"the target {name!r} holds {target}. {COMMAS_ADVICE.format(name=name)}")
        if target == "dates" or (target == "categories" and self._choices.task == "regression"):
            raise wrong(table.path, f"the target {name!r} holds {'dates' if target == 'dates' else 'text'}, not numbers.")
        self._target_kind = target
        numbers = len(self._numbers)
        self._sums, self._known, self._largest = np.zeros(numbers), np.zeros(numbers), np.zeros(numbers)
        self._seen = {split: [set() for _ in self._texts] for split in _SPLITS}
        total = math.ceil(len(rows.places) / max(rows.share, 1e-9))
        hot = sum(len(set(rows.columns[column.place])) for column in self._texts) if self._choices.categories == "one-hot" else 0
        require_disk(table.path, self._spool.parent, total * (12 * len(self._inputs) + 4 * hot + 32))

    @property
    def _numbers(self) -> list[_InputColumn]:
        return [column for column in self._inputs if column.kind == "numbers"]

    @property
    def _texts(self) -> list[_InputColumn]:
        return [column for column in self._inputs if column.kind == "categories"]

    def _add(self, file: Any, table: Table, rows: Rows, number: int) -> None:
        numbers = [self._numeric(table, rows, column.name, rows.columns[column.place]) for column in self._numbers]
        codes = [self._coded(table, rows, column.name, rows.columns[column.place], column.categories) for column in self._texts]
        target = self._target(table, rows)
        shape = len(rows.places), -1
        values = np.array(numbers).T.reshape(shape) if numbers else np.zeros((shape[0], 0))
        coded = np.array(codes, np.int32).T.reshape(shape) if codes else np.zeros((shape[0], 0), np.int32)
        keep = self._kept(table, rows, values, coded, target)
        values, coded, target = values[keep], coded[keep], target[keep]
        is_test = self._is_test(table, rows, number, keep, values, coded, target)
        for split, mask in (("train", ~is_test), ("test", is_test)):
            self._count(split, values[mask], coded[mask], target[mask])  # type: ignore[arg-type]
        for array in (is_test, values, coded, target):
            np.save(file, array)

    def _count(self, split: Split, values: Array, coded: Array, target: Array) -> None:
        self.counts[split] += len(target)
        if not len(target):
            return
        if split == "train" and values.shape[1]:
            known = np.nan_to_num(values)
            self._sums, self._largest = _added(self._sums, known), np.maximum(self._largest, np.abs(known).max(0))
            self._known += np.isfinite(values).sum(0)
        for seen, column in zip(self._seen[split], coded.T, strict=True):
            seen.update(np.unique(column).tolist())
        if len(self._target_seen[split]) <= MAX_CLASSES:
            self._target_seen[split].update(np.unique(target).tolist())

    def _cell_error(self, table: Table, rows: Rows, name: str, error: CellError) -> UsageError:
        place = f"{table.unit} {rows.places[error.number]:,}, column {name!r}"
        return wrong(table.path, f"{error}.", place)

    def _numeric(self, table: Table, rows: Rows, name: str, cells: Cells) -> Array:
        try:
            return numbers_of(cells, self._notation)
        except CellError as error:
            problem = CellError(error.number, f"{error}; if the column has categories, give categorical={name}")
            raise self._cell_error(table, rows, name, problem) from error

    def _coded(self, table: Table, rows: Rows, name: str, cells: Cells, categories: Categories, most: int = MAX_CATEGORIES) -> Array:
        if isinstance(cells, np.ndarray):
            cells = ["" if math.isnan(number) else f"{number:.15g}" for number in cells]
        try:
            return categories.take(cells, most)
        except CellError as error:
            advice = LEFT_OUT_ADVICE.format(name=name)
            problem = CellError(error.number, f"{error}; more than {most:,} categories, or long texts, are free text. {advice[:-1]}")
            raise self._cell_error(table, rows, name, problem) from error

    def _target(self, table: Table, rows: Rows) -> Array:
        name = self._choices.target
        cells = rows.columns[self._names.index(name)]
        if self._target_kind == "categories":
            target = self._coded(table, rows, name, cells, self._target_codes, MAX_CLASSES).astype(np.float64)
            return np.where(target < 0, np.nan, target)
        numbers = self._numeric(table, rows, name, cells)
        known = numbers[np.isfinite(numbers)]
        self._whole = self._whole and bool((known == np.round(known)).all())
        if self._whole and self._choices.task != "regression" and (far := np.abs(numbers) >= MAX_WHOLE).any():
            problem = CellError(int(far.argmax()), f"whole numbers from {MAX_WHOLE:,} on are not told apart; give categorical={name}")
            raise self._cell_error(table, rows, name, problem)
        return numbers

    def _kept(self, table: Table, rows: Rows, values: Array, coded: Array, target: Array) -> Array:
        """Return which rows remain. Raises UsageError for missing cells that may not be."""
        policy = self._choices.missing
        absent = np.isnan(target)
        if policy != "mean":
            absent = absent | np.isnan(values).any(1) | (coded < 0).any(1)
        if not absent.any() or policy == "drop":
            self.dropped += int(absent.sum())
            return ~absent
        row = int(absent.argmax())
        columns = [*self._numbers, *self._texts]
        cells = [*np.isnan(values[row]), *(coded[row] < 0)]
        name = (
            self._choices.target if np.isnan(target[row]) else next(column.name for column, bad in zip(columns, cells, strict=True) if bad)
        )
        allowed = "missing=drop" if np.isnan(target[row]) else "missing=mean or missing=drop"
        raise wrong(table.path, f"the cell is empty. Fill it, or choose {allowed}.", f"{table.unit} {rows.places[row]:,}, column {name!r}")

    def _is_test(self, table: Table, rows: Rows, number: int, keep: Array, values: Array, coded: Array, target: Array) -> Array:
        if len(self._tables) > 1:
            return np.full(len(target), number == 1)
        if self._choices.split:
            cells = [str(cell).strip() for cell in rows.columns[self._names.index(self._choices.split)]]
            for row, cell in enumerate(cells):
                if cell not in _SPLITS:
                    raise self._cell_error(table, rows, self._choices.split, CellError(row, f"{cell[:40]!r} is neither train nor test"))
            return np.array([cell == "test" for cell in cells], np.bool_)[keep]
        parts = [column.view(np.uint32).astype(np.uint64) for column in np.ascontiguousarray(values.T, np.float32)]
        parts += [column.categories.hashes(codes) for column, codes in zip(self._texts, coded.T, strict=True)]
        parts.append(self._target_codes.hashes(target.astype(np.int32)) if self._target_kind == "categories" else target.view(np.uint64))
        share: Array = mixed(parts) < self._choices.share
        return share

    def prepared(self) -> PreparedColumns:
        """Return the columns for a store, from the second pass."""
        table = self._tables[0]
        numbers, texts, one_hot = self._numbers, self._texts, self._choices.categories == "one-hot"
        orders = [_order(column.categories.names) for column in texts]
        hot = [order for order in orders if one_hot]
        width = len(numbers) + sum(map(len, hot))
        if width > MAX_INPUTS:
            raise wrong(table.path, f"there are {width:,} inputs, and at most {MAX_INPUTS:,} are possible. Choose categories=codes.")
        means = self._sums / np.maximum(self._known, 1.0)
        if (never := np.flatnonzero(self._known == 0)).size:
            raise wrong(table.path, f"the column {numbers[int(never[0])].name!r} is empty in all training rows. Leave it out.")
        classes, names = self._classes()
        codes = [] if one_hot else _identifiers(table.path, texts)
        columns = [ColumnSpec(INPUT, "float32", (width,))] if width else []
        columns += [ColumnSpec(name, "int64") for name in codes]
        columns.append(ColumnSpec(TARGET, "int64" if names else "float32"))
        mean, std = [*means.tolist(), *([0.0] * (width - len(numbers)))], [1.0] * width
        notes: list[str] = []
        shifts = np.zeros(len(numbers))
        if numbers:
            deviations = np.sqrt(self._squares(means) / self.counts["train"])
            lost = (self._largest * UNIT > MAX_LOST * deviations) & (deviations > 0)
            shifts, mean[: len(numbers)] = np.where(lost, means, 0.0), np.where(lost, 0.0, means)
            if lost.any():
                far = [column.name for column, is_lost in zip(numbers, lost, strict=True) if is_lost]
                notes.append(f"kept relative to their mean, as float32 has 7 digits: {joined(far)}")
            constant = [column.name for column, deviation in zip(numbers, deviations, strict=True) if not deviation]
            std[: len(numbers)] = [float(deviation) or 1.0 for deviation in deviations]
            if constant:
                notes.append(f"constant in training, and so not scaled: {joined(constant)}")
        statistics = ({INPUT: tuple(map(float, mean))}, {INPUT: tuple(std)}) if width and self._choices.standardise else ({}, {})
        notes += self._notes(texts, names)
        described = {
            "rows": self.counts,
            "dropped": self.dropped,
            "numbers": [column.name for column in numbers],
            "categories": {
                column.name: [column.categories.names[code] for code in order] for column, order in zip(texts, orders, strict=True)
            },
            "target": self._choices.target,
            "classes": names,
            **{name: getattr(self._choices, name) for name in ("missing", "standardise", "split", "share")},
            "means": dict(zip((column.name for column in numbers), means.tolist(), strict=True)),
            "relative to": {column.name: shift for column, shift in zip(numbers, shifts.tolist(), strict=True) if shift},
        }
        return PreparedColumns(
            tuple(columns),
            TableFeatures(TARGET, len(names), tuple(names), *statistics),
            {split: partial(self._blocks, split, (means, shifts), orders, codes, classes) for split in _SPLITS},
            attachments=lambda: {"table.json": json.dumps(described, ensure_ascii=False, indent=1).encode()},
            notes=lambda: notes,
        )

    def _classes(self) -> tuple[Array | None, list[str]]:
        """Return the target's values in the order of the classes, and the classes' names.

        They are None and [] for numbers.
        """
        seen, choices, path = self._target_seen, self._choices, self._tables[0].path
        if self._target_kind == "categories":
            texts = self._target_codes.names
            return classes_of(path, choices.target, seen, lambda value: texts[int(value)], sorted_by_text=True)
        if predicts_numbers(choices.task, len(seen["train"] | seen["test"]), whole=self._whole):
            return None, []
        if not self._whole:
            raise wrong(path, f"the target {choices.target!r} has fractions; classes are whole numbers or text.")
        return classes_of(path, choices.target, seen, lambda value: str(int(value)), sorted_by_text=False)

    def _squares(self, means: Array) -> Array:
        total = np.zeros(len(means))
        for is_test, values, _, _ in self._spooled():
            difference = np.nan_to_num(values[~is_test] - means)
            total = _added(total, difference**2)
        return total

    def _spooled(self, most: int = 1 << 62) -> Iterator[tuple[Array, Array, Array, Array]]:
        """Yield the rows in blocks of at most so many."""
        size = self._spool.stat().st_size
        with self._spool.open("rb") as file:
            while file.tell() < size:
                is_test, values, coded, target = (np.load(file) for _ in range(4))
                for start in range(0, len(target), most):
                    part = slice(start, start + most)
                    yield is_test[part], values[part], coded[part], target[part]

    def _blocks(
        self, split: Split, shifted: tuple[Array, Array], orders: Sequence[Sequence[int]], codes: Sequence[str], classes: Array | None
    ) -> Iterator[Mapping[str, Column]]:
        places, (means, shifts) = [_places(order) for order in orders], shifted
        width = len(means) + (0 if codes else sum(map(len, orders)))
        for is_test, values, coded, target in self._spooled(max(1, MAX_BLOCK_INPUTS // max(width, 1))):
            mask = is_test if split == "test" else ~is_test
            if not mask.any():
                continue
            numbers = (np.where(np.isnan(values[mask]), means, values[mask]) - shifts).astype(np.float32)
            ranks = [place[column + 1] for place, column in zip(places, coded[mask].T, strict=True)]
            block = {name: Column(rank) for name, rank in zip(codes, ranks, strict=False)}
            hot = [] if codes else [_one_hot(rank, len(order)) for rank, order in zip(ranks, orders, strict=True)]
            if numbers.shape[1] or hot:
                block[INPUT] = Column(np.concatenate([numbers, *hot], axis=1))
            labels = target[mask]
            block[TARGET] = Column(labels.astype(np.float32) if classes is None else labels_of(labels, classes))
            yield block

    def _notes(self, texts: Sequence[_InputColumn], classes: Sequence[str]) -> list[str]:
        choices, notes = self._choices, []
        if self.dropped:
            rows = "1 row has" if self.dropped == 1 else f"{self.dropped:,} rows have"
            notes.append(f"{rows} empty cells and were left out (missing=drop)")
        if choices.task == "auto" and self._target_kind == "numbers":
            notes.append(task_note(choices.target, len(classes)))
        for column, (train, test) in zip(texts, zip(self._seen["train"], self._seen["test"], strict=True), strict=True):
            if unseen := sorted(column.categories.names[code] for code in test - train if code >= 0):
                notes.append(f"categories of {one_line(column.name)} that training never sees: {joined(unseen)}")
        return notes


def _added(total: Array, rows: Array) -> Array:
    """Add row by row to a total, which is then the same however rows are cut into blocks."""
    sums: Array = np.cumsum(np.concatenate([total[None], rows]), axis=0)[-1]
    return sums


def _order(names: Sequence[str]) -> list[int]:
    """Return codes in the alphabetical order of the categories."""
    return sorted(range(len(names)), key=names.__getitem__)


def _places(order: Sequence[int]) -> NDArray[np.int64]:
    """Return the rank of each code, from code −1, whose rank is behind all others."""
    places = np.full(len(order) + 1, len(order), np.int64)
    for rank, code in enumerate(order):
        places[code + 1] = rank
    return places


def _one_hot(ranks: Array, count: int) -> Array:
    """Return a 1 for each row's category, and none where it is missing."""
    marked: Array = ranks[:, None] == np.arange(count)
    return marked.astype(np.float32)


def _identifiers(path: Path, texts: Sequence[_InputColumn]) -> list[str]:
    """Return a name for the codes of each column, as models' parameters are called."""
    names = [re.sub(r"\W|^(?=\d)", "_", column.name) for column in texts]
    if taken := [name for number, name in enumerate(names) if name in (INPUT, TARGET, *names[:number])]:
        raise wrong(path, f"{taken[0]!r} is the name of another column. Rename it.")
    return names
