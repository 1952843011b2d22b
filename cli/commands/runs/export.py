"""``trainer runs export``: which table goes into which file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ....core.errors import UsageError
from ....records.text.numbers import count_text
from ....report.catalog.run import Run
from ....report.export.records_table import TABLES, table_of
from ....report.export.table_files import FORMATS, check_format, check_new, write_csv, write_file
from ...run_arguments import warn_of_lost_updates
from ...streams import output_is_a_copy

__all__ = ["export"]


def export(runs: Sequence[Run], file_format: str, what: str | None, output: str | None, *, overwrite: bool) -> None:
    """Write one table (`what`) or all of them over `runs`, and say what was written. Raises UsageError before anything is written."""
    if file_format not in FORMATS:
        raise UsageError.of("--format", file_format, ", ".join(FORMATS), FORMATS)
    if what is not None and what not in TABLES:
        raise UsageError.of("--what", what, ", ".join(TABLES), TABLES)
    check_format(file_format)
    if what in (None, "steps"):
        warn_of_lost_updates(runs)
    if output == "-":
        if what is None or file_format != "csv":
            raise UsageError("--output: - prints one table as csv; say which with --what, and leave --format out.")
        write_csv(table_of(what, runs), sys.stdout)
        return
    output_is_a_copy()
    targets = _targets(runs, file_format, what, output)
    for path in targets.values():
        if path.parent.is_dir():
            check_new(path, overwrite=overwrite)
    for table, path in targets.items():
        _make_folder(path.parent)
        rows = write_file(table_of(table, runs), path, file_format, overwrite=overwrite)
        click.echo(f"{path}  ({count_text(rows)} row{'' if rows == 1 else 's'})")


def _targets(runs: Sequence[Run], file_format: str, what: str | None, output: str | None) -> dict[str, Path]:
    """Return the file of each table. Several runs share their files, and a name that says how many they are."""
    name = runs[0].path.resolve().name if len(runs) == 1 else f"{len(runs)}-runs"
    if what is None:
        folder = Path(output or f"{name}-tables")
        return {table: folder / f"{table}.{file_format}" for table in TABLES}
    own = f"{name}-{what}.{file_format}"
    if output is None:
        return {what: Path(own)}
    path = Path(output)
    if path.suffix[1:] in FORMATS and path.suffix[1:] != file_format:
        raise UsageError(f"--output: {output!r} would hold {file_format}; give it another name, or --format {path.suffix[1:]}.")
    return {what: path / own if path.is_dir() or output.endswith("/") else path}


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output: the folder {str(path)!r} cannot be made ({error.strerror}). Give another.") from error
