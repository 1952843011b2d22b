"""csv:PATH and its like: a table of a file as numbers, categories and a target."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ....core.errors import UsageError
from ...base import PreparedColumns
from ..arguments import absolute_path, existing_file, read_arguments, read_share, write_arguments
from .cells import EMPTY, MISSING, Notation
from .parquet import ParquetTable
from .rows import DELIMITERS, CsvTable, Table
from .survey import Choices, Survey

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the disk that is written to
_DEFAULTS = {
    "target": "",
    "task": "auto",
    "categories": "one-hot",
    "missing": "refuse",
    "standardise": "yes",
    "test": "",
    "split": "",
    "share": "0.2",
    "leave-out": "",
    "categorical": "",
}
_CHOICES = {
    "task": ("auto", "classes", "regression"),
    "categories": ("one-hot", "codes"),
    "missing": ("refuse", "mean", "drop"),
    "standardise": ("yes", "no"),
}


@dataclass(frozen=True)
class TableSource:
    """A table of a format.

    `values`: its arguments. `open` makes a `Table` of a path and these. `own_defaults`: of arguments that only this format has.
    """

    format: str
    description: str
    open: Callable[[Path, dict[str, str]], Table]
    own_defaults: dict[str, str] = field(default_factory=dict)
    own_choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    path: Path | None = None
    values: dict[str, str] = field(default_factory=dict)

    version = 2
    resumes = False

    @property
    def _defaults(self) -> dict[str, str]:
        return {**_DEFAULTS, **self.own_defaults}

    @property
    def name(self) -> str:
        """FORMAT:PATH with the arguments that are no defaults."""
        return self.format if self.path is None else f"{self.format}:{self.path}?{write_arguments(self.values, self._defaults)}"

    @property
    def folder(self) -> Path | None:
        """The folder that holds all files."""
        return Path(os.path.commonpath([file.parent for file in self._files])) if self.path else None

    @property
    def _files(self) -> list[Path]:
        test = self.values.get("test")
        return [self.path, *([Path(test)] if test else [])] if self.path else []

    def with_arguments(self, text: str) -> TableSource:
        """Return the source of PATH?ARGUMENTS. Raises UsageError."""
        path, _, arguments = text.partition("?") if "?" in text else (text, "", "")
        values = read_arguments(self.format, arguments, self._defaults)
        for key, allowed in {**_CHOICES, **self.own_choices}.items():
            if values[key] not in allowed:
                raise UsageError.of(f"data: {key} of {self.format!r}", values[key], ", ".join(allowed), allowed)
        if not values["target"]:
            raise UsageError(f"data: which column is to be predicted? Write {self.format}:{path}?target=NAME.")
        if not path:
            raise UsageError(f"data: {self.format!r} needs a file; write {self.format}:PATH?target=NAME.")
        if values["split"] and values["test"]:
            raise UsageError(f"data: test and split of {self.format!r} both say which rows are for the test; give one of the two.")
        read_share(self.format, values["share"])
        if values["test"]:
            values["test"] = str(absolute_path(values["test"]))
        return replace(self, path=absolute_path(path), values=values)

    def originals(self, data_dir: Path) -> Sequence[Path]:
        """Return the files. Raises UsageError if one is missing."""
        form = f"{self.format}:PATH?target=NAME"
        return [existing_file(self.path, self.format, form), *(existing_file(file, self.format, form) for file in self._files[1:])]

    def load_in(self, work: Path, data_dir: Path | None) -> PreparedColumns:
        """Read the files twice: as they are, and from what the first pass keeps in `work`."""
        values = self.values
        try:
            tables = [self.open(file, values) for file in self.originals(data_dir or Path())]
            survey = Survey(tables, self._chosen(), work)
            survey.read()
        except OSError as error:
            if error.errno in FULL or (error.filename is not None and Path(error.filename) not in self._files):
                raise
            raise UsageError(f"data: {str(error.filename or self.path)!r} cannot be read: {error.strerror}.") from error
        return survey.prepared()

    def _chosen(self) -> Choices:
        values: Any = self.values
        return Choices(
            values["target"],
            values["task"],
            values["categories"],
            values["missing"],
            values["standardise"] == "yes",
            values["split"],
            read_share(self.format, values["share"]),
            tuple(filter(None, values["leave-out"].split(";"))),
            tuple(filter(None, values["categorical"].split(";"))),
        )


def _notation(values: dict[str, str]) -> Notation:
    return Notation(MISSING if values["empty-words"] == "yes" else EMPTY, values["decimal"] == "comma")


CSV = TableSource(
    "csv",
    "a table of a file: csv:PATH?target=COLUMN,task=regression,missing=refuse",
    lambda path, values: CsvTable(path, DELIMITERS.get(values["delimiter"], ""), _notation(values)),
    {"delimiter": "auto", "decimal": "point", "empty-words": "yes"},
    {"delimiter": ("auto", *DELIMITERS), "decimal": ("point", "comma"), "empty-words": ("yes", "no")},
)
PARQUET = TableSource("parquet", "a table of a file, as csv: parquet:PATH?target=COLUMN", lambda path, values: ParquetTable(path))
