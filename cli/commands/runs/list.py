"""``trainer runs``: the runs of a folder, one of them, and what can be done with them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ....core.errors import UsageError
from ....core.process import there_to_work_in
from ....core.suggestions import nearest
from ....core.untrusted.console import json_text, note, one_line
from ....records.store.jsonl import finite_json
from ....report.catalog.index import STATES, list_runs
from ....report.catalog.locate import check_readable, find_run, find_runs, find_sweep
from ....report.catalog.query import Condition, fitting, in_order, parse_order, parse_since
from ....report.catalog.run import Run
from ....report.catalog.summary_rows import metric_figures
from ....report.tables.runs_list import runs_table
from ...options import GivenPath, IntegerRange
from ...streams import echo_wrapped, output_is_a_copy

__all__ = ["runs"]

Row = Mapping[str, Any]

COLUMNS = 100
"""Characters of a line of the table, where the terminal is not narrower."""

_SETTINGS = ("backend", "mode", "model", "data", "state")
_CLOSED = {"mode": ("sync", "async"), "state": STATES}


class _ListingGroup(click.Group):
    """A group that lists where no subcommand is named."""

    stands_for = "list"
    """Whose options it takes, for shells that complete."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``list`` before options that stand alone."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Name what exists where the subcommand is unknown."""
        if args and args[0] not in self.commands:
            near = nearest(args[0], self.commands)
            hint = f" Did you mean {near!r}?" if near else ""
            raise click.UsageError(f"got {args[0]!r}; there is no such command; allowed: {', '.join(self.commands)}.{hint}", ctx)
        return super().resolve_command(ctx, args)


_out = click.option("--out", type=GivenPath(), default=Path("runs"), envvar="TRAINER_OUT", help="Folder with the runs. [default: runs]")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group(cls=_ListingGroup)
def runs() -> None:
    """List, show, delete and export runs.

    `trainer runs` alone lists, with the options of `trainer runs list`. RUN is a run directory, or the name of one in
    the folder with the runs.
    """


# List -----------------------------------------------------------------------------------------------------------------


@runs.command("list", short_help="List runs, filtered and sorted by their figures.")
@click.option("--backend", multiple=True, metavar="NAME", help="Only runs of this backend.")
@click.option("--mode", multiple=True, metavar="|".join(_CLOSED["mode"]), help="Only runs of this mode.")
@click.option("--model", multiple=True, metavar="NAME", help="Only runs of this model.")
@click.option("--data", multiple=True, metavar="NAME", help="Only runs on this dataset.")
@click.option("--state", multiple=True, metavar="|".join(STATES), help="Only runs in this state.")
@click.option("--since", metavar="AGE|DATE", help="Only runs since then, such as 12h, 7d or 2026-11-01.")
@click.option("--where", multiple=True, metavar="CONDITION", help="Only runs with such a figure: 'accuracy>=0.9'.")
@click.option("--sort", metavar="FIGURE[:desc]", help="Order by a figure [default: the newest first].")
@click.option("--limit", type=IntegerRange(min=1), metavar="N", help="Only the first N.")
@click.option("--wide", is_flag=True, help=f"Every column, however wide that is [default: those that fit into {COLUMNS} characters].")
@_as_json
@_out
@click.pass_context
def list_command(
    ctx: click.Context,
    /,
    since: str | None,
    where: Sequence[str],
    sort: str | None,
    limit: int | None,
    wide: bool,
    as_json: bool,
    out: Path,
    **settings: Sequence[str],
) -> None:
    """List the runs of a folder and its subfolders, such as sweeps.

    A figure is any that --json prints, or one of the table: name, loss, a metric such as accuracy, batch, time_to_target, when. If an
    option is repeated, one value has to match; of --where all have to. Failed, running and damaged runs are listed too.
    """
    earliest = parse_since(since, datetime.now().astimezone()) if since is not None else None
    _check_closed(settings)
    check_readable(out)
    if not out.is_dir() and (ctx.get_parameter_source("out") != ParameterSource.DEFAULT or there_to_work_in() != "."):
        raise UsageError(f"--out: there is no folder {str(out)!r}. Give the folder with the runs.")
    known = list_runs(out) if out.is_dir() else []
    others = metric_figures(known)
    conditions = [Condition.parse(text, others) for text in where]
    for name in _SETTINGS:
        _tell_unknown(name, settings[name], known)
    chosen = [row for row in known if all(_is_one_of(row, name, settings[name]) for name in _SETTINGS)]
    chosen = [row for row in chosen if earliest is None or _made_since(row, earliest)]
    ordered = in_order(fitting(chosen, conditions), sort, others)[:limit]
    if as_json:
        click.echo(json_text({"runs": ordered}, indent=1))
    elif ordered:
        asked = [condition.figure for condition in conditions] + ([parse_order(sort, others)[0]] if sort else [])
        _print_table(ordered, asked, wide=wide)
    elif known:
        note(f"none of the runs in {str(out)!r} fits (there {'is' if len(known) == 1 else 'are'} {len(known)})")
    else:
        note(f"{str(out)!r} has no runs")


def _print_table(rows: Sequence[Row], asked: Sequence[str], *, wide: bool) -> None:
    """Print the columns that fit, what was asked for in any case; all of them where it may be `wide`."""
    width = min(COLUMNS, shutil.get_terminal_size().columns) if sys.stdout.isatty() else COLUMNS
    text, left_out = runs_table(rows, None if wide else width, asked)
    click.echo(text, nl=False)
    if left_out:
        note(f"not shown, to fit into {width} columns: {', '.join(left_out)}; --wide shows them")


def _check_closed(settings: Mapping[str, Sequence[str]]) -> None:
    for name, allowed in _CLOSED.items():
        for value in settings[name]:
            if value.lower() not in allowed:
                raise UsageError.of(f"--{name}", value, ", ".join(allowed), allowed)


def _is_one_of(row: Row, name: str, wanted: Sequence[str]) -> bool:
    """Return whether a setting is one of those asked for; a dataset's name stands for any arguments."""
    value = str(row[name] or "").lower()
    return not wanted or any(value == asked.lower() or value.partition(":")[0] == asked.lower() for asked in wanted)


def _tell_unknown(name: str, wanted: Sequence[str], known: Sequence[Row]) -> None:
    """Say so where no run at all has a setting: it may be mistyped."""
    if name in _CLOSED or not known:
        return
    there = sorted({str(row[name]) for row in known if row[name] is not None})
    for value in wanted:
        if not any(_is_one_of(row, name, [value]) for row in known):
            near = nearest(value, there)
            listed = one_line(", ".join(there))
            note(f"no run has {name} {value!r}; there are: {listed}.{f' Did you mean {near!r}?' if near else ''}")


def _made_since(row: Row, earliest: datetime) -> bool:
    try:
        return datetime.fromisoformat(row["created_at"] or "").astimezone() >= earliest
    except ValueError:  # a damaged run does not tell
        return False


# One run --------------------------------------------------------------------------------------------------------------


@runs.command("show", short_help="Show one run in detail.")
@click.argument("run", metavar="RUN")
@_as_json
@_out
def show_command(run: str, as_json: bool, out: Path) -> None:
    """Show a run: figures, files, machine, checkpoints, and the command that repeats it."""
    from .show import as_text, shown

    found = shown(find_run(run, out))
    if as_json:
        click.echo(json_text(finite_json(found), indent=1))
    else:
        echo_wrapped(as_text(found))


@runs.command("delete", short_help="Delete runs, after asking.")
@click.argument("names", nargs=-1, required=True, metavar="RUN…")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@_out
def delete_command(names: Sequence[str], yes: bool, out: Path) -> None:
    """Delete run directories with their checkpoints, after confirmation. Rejects a run in progress.

    RUN may also be the folder of a sweep: all of its runs are deleted, then the folder, unless it holds other files. Each run is removed
    atomically; the next deletion cleans up after an interrupted one.
    """
    from .delete import delete

    output_is_a_copy()
    sweeps = {name: find_sweep(name, out) for name in names}
    runs = [find_run(name, out) for name, sweep in sweeps.items() if sweep is None]
    delete(runs, [sweep for sweep in sweeps.values() if sweep is not None], yes=yes)


@runs.command("export", short_help="Write the records of runs as CSV or Parquet.")
@click.argument("names", nargs=-1, required=True, metavar="RUN…")
@click.option("--format", "file_format", default="csv", metavar="csv|parquet", help="File format. [default: csv]")
@click.option("--what", metavar="steps|evals|system|summary", help="One table [default: a folder with all].")
@click.option("--output", "-o", metavar="FILE|FOLDER", help="Output [default: RUN-WHAT.csv or the folder RUN-tables here]; - prints csv.")
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
@_out
def export_command(names: Sequence[str], file_format: str, what: str | None, output: str | None, overwrite: bool, out: Path) -> None:
    """Export the records of runs as tables for other programs: one row per update, evaluation, node sample or run.

    RUN may also be a folder of runs, such as a sweep's. Column names have units; the first column is the run.
    """
    from .export import export

    export([Run(path) for path in find_runs(names, out)], file_format, what, output, overwrite=overwrite)
