"""``trainer runs``: list, show, delete and export runs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import psutil
from click.core import ParameterSource

from ...checkpoint import list_checkpoints, peek_meta
from ...checkpoint.writer import rename_hidden
from ...core.console import json_text, note, one_line
from ...core.drafts import lock
from ...core.errors import TrainerError, UsageError
from ...core.process import child_working_directory
from ...core.settings.sweeps import EARLIER, SWEEP_FILE
from ...core.suggestions import did_you_mean
from ...records.store.jsonl import finite_json
from ...records.store.run_directory import RunReader, describe_folder
from ...records.text import bytes_text, code_text, count_text, instructions_text
from ...report.compare.run_tables import one_run, to_text
from ...report.compare.runs_list import runs_table
from ...report.pages.export import FORMATS, TABLES, check_format, check_new, table_of, write_csv, write_file
from ...report.runs.columns import metric_figures
from ...report.runs.locate import check_readable, find_run, find_runs, find_sweep, is_run, run_names
from ...report.runs.query import STATES, Condition, fitting, in_order, list_runs, parse_order, parse_since, run_row
from ...report.runs.run import Run, lost_updates, repeat_command
from ..group import refuse_unknown_command
from ..options import GivenPath, IntegerRange, check_choice
from ..run_request import warn_of_lost_updates
from ..streams import echo_wrapped, output_is_a_copy

Row = Mapping[str, Any]
COLUMNS = 100  # characters of a line of the table, unless the terminal is narrower
_SETTINGS = ("backend", "mode", "model", "data", "state")
_CLOSED = {"mode": ("sync", "async"), "state": STATES}


class _ListingGroup(click.Group):
    default_command = "list"  # the command whose options shell completion offers

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        refuse_unknown_command(ctx, args, self.commands)
        return super().resolve_command(ctx, args)


_out = click.option("--out", type=GivenPath(), default=Path("runs"), envvar="TRAINER_OUT", help="Folder with the runs. [default: runs]")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group(cls=_ListingGroup)
def runs() -> None:
    """List, show, delete and export runs.

    `trainer runs` alone lists, with the options of `trainer runs list`. RUN is a run directory, or the name of one in
    the folder with the runs.
    """


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
    if not out.is_dir() and (ctx.get_parameter_source("out") != ParameterSource.DEFAULT or child_working_directory() != "."):
        raise UsageError(f"--out: there is no folder {str(out)!r}. Give the folder with the runs.")
    known = list_runs(out) if out.is_dir() else []
    metrics = metric_figures(known)
    conditions = [Condition.parse(text, metrics) for text in where]
    for name in _SETTINGS:
        _note_unknown(name, settings[name], known)
    chosen = [row for row in known if all(_is_one_of(row, name, settings[name]) for name in _SETTINGS)]
    chosen = [row for row in chosen if earliest is None or _is_since(row, earliest)]
    ordered = in_order(fitting(chosen, conditions), sort, metrics)[:limit]
    if as_json:
        click.echo(json_text({"runs": ordered}, indent=1))
    elif ordered:
        figures = [condition.figure for condition in conditions] + ([parse_order(sort, metrics)[0]] if sort else [])
        _print_table(ordered, figures, wide=wide)
    elif known:
        note(f"none of the runs in {str(out)!r} fits (there {'is' if len(known) == 1 else 'are'} {len(known)})")
    else:
        note(f"{str(out)!r} has no runs")


def _print_table(rows: Sequence[Row], figures: Sequence[str], *, wide: bool) -> None:
    width = min(COLUMNS, shutil.get_terminal_size().columns) if sys.stdout.isatty() else COLUMNS
    text, left_out = runs_table(rows, None if wide else width, figures)
    click.echo(text, nl=False)
    if left_out:
        note(f"not shown, to fit into {width} columns: {', '.join(left_out)}; --wide shows them")


def _check_closed(settings: Mapping[str, Sequence[str]]) -> None:
    for name, allowed in _CLOSED.items():
        for value in settings[name]:
            if value.lower() not in allowed:
                raise UsageError.of(f"--{name}", value, ", ".join(allowed), allowed)


def _is_one_of(row: Row, name: str, wanted: Sequence[str]) -> bool:
    value = str(row[name] or "").lower()
    return not wanted or any(value == allowed.lower() or value.partition(":")[0] == allowed.lower() for allowed in wanted)


def _note_unknown(name: str, wanted: Sequence[str], known: Sequence[Row]) -> None:
    if name in _CLOSED or not known:
        return
    values = sorted({str(row[name]) for row in known if row[name] is not None})
    for value in wanted:
        if not any(_is_one_of(row, name, [value]) for row in known):
            note(f"no run has {name} {value!r}; there are: {one_line(', '.join(values))}.{did_you_mean(value, values)}")


def _is_since(row: Row, earliest: datetime) -> bool:
    try:
        return datetime.fromisoformat(row["created_at"] or "").astimezone() >= earliest
    except ValueError:  # a damaged run has no value
        return False


@runs.command("show", short_help="Show one run in detail.")
@click.argument("run", metavar="RUN")
@_as_json
@_out
def show_command(run: str, as_json: bool, out: Path) -> None:
    """Show a run: figures, files, machine, checkpoints, and the command that repeats it."""
    described = describe(find_run(run, out))
    if as_json:
        click.echo(json_text(finite_json(described), indent=1))
    else:
        echo_wrapped("".join(f"{line}\n" for line in _lines(described)))


@runs.command("delete", short_help="Delete runs, after asking.")
@click.argument("names", nargs=-1, required=True, metavar="RUN…")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@_out
def delete_command(names: Sequence[str], yes: bool, out: Path) -> None:
    """Delete run directories with their checkpoints, after confirmation.

    Rejects a run in progress. RUN may also be the folder of a sweep: all of its runs are deleted, then the folder, unless it holds other
    files. Each run is removed atomically; the next deletion cleans up after an interrupted one.
    """
    output_is_a_copy()
    sweeps = {name: find_sweep(name, out) for name in names}
    single_runs = [find_run(name, out) for name, sweep in sweeps.items() if sweep is None]
    delete(single_runs, [sweep for sweep in sweeps.values() if sweep is not None], yes=yes)


@runs.command("export", short_help="Write the records of runs as CSV or Parquet.")
@click.argument("names", nargs=-1, required=True, metavar="RUN…")
@click.option("--format", "file_format", default="csv", metavar="csv|parquet", help="File format. [default: csv]")
@click.option("--what", metavar="steps|evals|system|summary", help="One table [default: a folder with all].")
@click.option("--output", "-o", metavar="FILE|FOLDER", help="Output [default: RUN-WHAT.csv or the folder RUN-tables here]; - prints csv.")
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
@_out
def export_command(names: Sequence[str], file_format: str, what: str | None, output: str | None, overwrite: bool, out: Path) -> None:
    """Export the records of runs as tables for other programs.

    There is one row per update, evaluation, node sample or run. RUN may also be a folder of runs, such as a sweep's. Column names have
    units; the first column is the run.
    """
    exported = [Run(path) for path in find_runs(names, out)]
    check_choice("--format", file_format, FORMATS)
    check_choice("--what", what, TABLES)
    check_format(file_format)
    if what in (None, "steps"):
        warn_of_lost_updates(exported)
    if output == "-":
        if what is None or file_format != "csv":
            raise UsageError("--output: - prints one table as csv; say which with --what, and leave --format out.")
        write_csv(table_of(what, exported), sys.stdout)
        return
    output_is_a_copy()
    targets = _targets(exported, file_format, what, output)
    for path in targets.values():
        if path.parent.is_dir():
            check_new(path, overwrite=overwrite)
    for table, path in targets.items():
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output: the folder {str(path.parent)!r} cannot be made ({error.strerror}). Give another.") from error
        rows = write_file(table_of(table, exported), path, file_format, overwrite=overwrite)
        click.echo(f"{path}  ({count_text(rows)} row{'' if rows == 1 else 's'})")


def describe(path: Path) -> dict[str, Any]:
    """Return a run's documents: null if missing; ``damaged`` lists unreadable ones."""
    run = Run(path)
    damaged: list[str] = []

    def read(document: str) -> Any:
        try:
            return getattr(run, document)
        except (TrainerError, OSError, KeyError) as error:
            damaged.append(str(error))
            return None

    summary = read("summary") if read("has_summary") else None  # first, so that the row has it without another read
    row, status, job, nodes = run_row(run), read("status"), read("job"), read("nodes")
    code = None if nodes is None else read("code")
    if summary is not None and (lost := lost_updates(run)) is not None:
        damaged.append(lost)
    files = describe_folder(path)
    return {
        "path": str(path.resolve()),
        "run": run.own_name,
        "state": row["state"],
        "created_at": row["created_at"],
        "cause": (status or {}).get("cause"),
        "damaged": damaged,
        "row": row,
        "command": repeat_command(job, os.environ) if job else None,
        "typed": (job or {}).get("command"),
        "resumed": max(len((job or {}).get("segments", ())) - 1, 0),
        "bytes": sum(file.bytes for file in files),
        "files": [{"path": file.path, "bytes": file.bytes, "purpose": file.purpose} for file in files],
        "checkpoints": [_checkpoint(path, checkpoint) for checkpoint in list_checkpoints(path)],
        "nodes": nodes,
        "code": code,
        "job": job,
        "status": status,
        "summary": summary,
    }


def _checkpoint(run: Path, path: Path) -> dict[str, Any]:
    meta = peek_meta(path)
    return {
        "path": path.relative_to(run).as_posix(),
        "step": meta.step if meta else None,
        "epoch": meta.epoch if meta else None,
        "metrics": meta.metrics if meta else None,
        "bytes": sum(file.bytes for file in describe_folder(path)),
    }


def _lines(described: Mapping[str, Any]) -> Iterator[str]:
    yield described["run"]
    yield ""
    if described["summary"] is not None:
        yield to_text(one_run(described["summary"], described["job"], Path(described["path"]))).rstrip("\n")
    if described["summary"] is None or described["state"] != described["summary"].get("state"):
        yield f"state: {described['state']}; {'no summary yet' if described['state'] in ('starting', 'running') else 'no summary'}"
    if described["cause"]:
        yield f"cause: {one_line(described['cause'])}"
    yield from (f"damaged: {one_line(problem)}" for problem in described["damaged"])
    yield ""
    for number, node in enumerate(described["nodes"] or ()):
        yield one_line(f"node {number}: {_node(node)}")
    if (code := code_text(described["code"])) is not None:
        yield one_line(f"code: {code}")
    times = described["resumed"]
    resumed = f"; resumed {times} time{'s' if times > 1 else ''}" if times else ""
    yield f"made: {described['created_at'] or 'unknown'}{resumed}"
    size = f"{len(described['files'])} files, {bytes_text(described['bytes'])}"
    yield f"files: {one_line(described['path'])} ({size}; trainer export --describe lists them)"
    for checkpoint in described["checkpoints"]:
        step = "cannot be read" if checkpoint["step"] is None else f"{count_text(checkpoint['step'])} updates"
        yield f"checkpoint: {checkpoint['path']} ({step}, {bytes_text(checkpoint['bytes'])})"
    if described["command"]:
        yield f"again: {one_line(described['command'])}"


def _node(node: Mapping[str, Any]) -> str:
    cores, memory = node.get("cores_available"), node.get("memory_limit_bytes") or node.get("memory_total_bytes")
    gpus = [str(gpu.get("name")) for gpu in node.get("gpus") or ()]
    packages = [f"{name} {version}" for name, version in (node.get("packages") or {}).items() if version]
    parts = [
        node.get("hostname"),
        node.get("cpu_model"),
        instructions_text(node.get("cpu_flags")),
        None if cores is None else f"{cores:g} cores",
        None if memory is None else bytes_text(memory),
        *gpus,
        f"{node['operating_system']} {node.get('kernel') or ''}".strip() if node.get("operating_system") else None,
        f"Python {node['python']}" if node.get("python") else None,
        *packages,
    ]
    return ", ".join(part for part in parts if part) or "unknown"


def _targets(runs: Sequence[Run], file_format: str, what: str | None, output: str | None) -> dict[str, Path]:
    name = runs[0].path.resolve().name if len(runs) == 1 else f"{len(runs)}-runs"
    if what is None:
        folder = Path(output or f"{name}-tables")
        return {table: folder / f"{table}.{file_format}" for table in TABLES}
    default = f"{name}-{what}.{file_format}"
    if output is None:
        return {what: Path(default)}
    path = Path(output)
    if path.suffix[1:] in FORMATS and path.suffix[1:] != file_format:
        raise UsageError(f"--output: {output!r} would hold {file_format}; give it another name, or --format {path.suffix[1:]}.")
    return {what: path / default if path.is_dir() or output.endswith("/") else path}


_MARKS = ("job.json", "status.json")  # identify a run directory; removed last, so that an interrupted deletion still has them
_GONE = re.compile(r"\..+\.gone-\w{8}")


def delete(runs: Sequence[Path], sweeps: Sequence[Path], *, yes: bool) -> None:
    """Delete runs and sweeps, confirmed unless `yes`. Raises UsageError before any deletion."""
    sweeps = _distinct(sweeps)
    with ExitStack() as held:
        for sweep in sweeps:
            _lock_sweep(sweep, held)
        whole = {os.path.realpath(sweep) for sweep in sweeps}
        around = {Path(os.path.realpath(run)).parent for run in runs}
        for sweep in sorted(folder for folder in around if (folder / SWEEP_FILE).exists() and str(folder) not in whole):
            _lock_sweep(sweep, held)  # it counts its runs
        theirs = [run for sweep in sweeps for run in _runs_of(sweep)]
        if _delete(_distinct([*runs, *theirs]), yes=yes):
            _remove_sweep_folders(sweeps)


def _distinct(paths: Sequence[Path]) -> list[Path]:
    return list({os.path.abspath(path): path for path in paths}.values())


def _lock_sweep(sweep: Path, held: ExitStack) -> None:
    if sweep.is_symlink():
        raise UsageError(f"run: {str(sweep)!r} is a link; give the sweep's folder that it leads to, {str(sweep.resolve())!r}.")
    descriptor = lock(sweep)
    if descriptor is None:
        raise UsageError(f"run: the sweep in {str(sweep)!r} is at work; end it first.")
    held.callback(os.close, descriptor)


def _runs_of(sweep: Path) -> list[Path]:
    """Return a sweep's runs. Raises UsageError for links, whose target may be another user's."""
    runs = [folder / name for folder in (sweep, sweep / EARLIER) for name in sorted(run_names(folder))]
    for run in runs:
        if os.path.realpath(run.parent) != os.path.join(os.path.realpath(sweep), os.path.relpath(run.parent, sweep)).removesuffix("/."):
            raise UsageError(
                f"run: {str(run)!r} is not in the sweep's folder but behind a link, {str(run.parent)!r}; remove the link first."
            )
    return runs


def _remove_sweep_folders(sweeps: Sequence[Path]) -> None:
    for sweep in sweeps:
        for index in sweep.glob(".index.*"):
            if index.is_symlink() or not index.is_dir():
                index.unlink()
        (sweep / SWEEP_FILE).unlink()
        for folder in (sweep / EARLIER, sweep):
            if folder.is_symlink() or not folder.is_dir():
                continue
            if any(folder.iterdir()):
                note(f"{folder} stays, as it holds other files")
            else:
                folder.rmdir()


def _delete(paths: Sequence[Path], *, yes: bool) -> bool:
    for path in paths:
        _check(path)
    sizes = [_size(path) for path in paths]
    for path, (files, size) in zip(paths, sizes, strict=True):
        note(f"{one_line(str(path))}  ({run_row(Run(path))['state']}, {count_text(files)} files, {bytes_text(size)})")
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("runs delete: nobody can be asked, as standard input is no terminal. Give --yes to delete without asking.")
        what = f"{len(paths)} runs" if len(paths) != 1 else "this run"
        if not click.confirm(f"Delete {what}, {bytes_text(sum(size for _, size in sizes))}, for good?", err=True):
            note("nothing was deleted")
            return False
    for path, (_, size) in zip(paths, sizes, strict=True):
        _check(path)  # a run may have been resumed during the question
        parent = path.resolve().parent
        _remove(path)
        _remove_leftovers(parent)
        click.echo(f"deleted {one_line(str(path))} ({bytes_text(size)})")
    return True


def _check(path: Path) -> None:
    if path.is_symlink():
        raise UsageError(f"run: {str(path)!r} is a link; give the run directory that it leads to, {str(path.resolve())!r}.")
    if not is_run(path):
        raise UsageError(f"run: {str(path)!r} is not a run directory, or no longer one; only run directories are deleted.")
    try:
        reader = RunReader(path)
        state, driver = reader.state(), reader.status()["driver"]
    except (TrainerError, KeyError, TypeError):  # its status cannot be read; a run in progress has its records open
        writers = list(_writers(path))
        if writers:
            raise UsageError(f"run: {str(path)!r} is still written, by process {writers[0]}; end it first.") from None
        return
    if state in ("starting", "running"):
        unknown = " Nobody here can tell whether it still is." if reader.driver_alive() is None else ""
        raise UsageError(f"run: {str(path)!r} is {state} (process {driver['pid']} on {driver['host']}); end it first.{unknown}")


def _writers(path: Path) -> Iterator[int]:
    prefix = f"{path.resolve()}{os.sep}"
    for process in psutil.process_iter():
        try:
            files = process.open_files()
        except psutil.Error:
            continue
        if any(file.path.startswith(prefix) and file.mode != "r" for file in files):
            yield process.pid


def _size(path: Path) -> tuple[int, int]:
    try:
        sizes = [entry.stat(follow_symlinks=False).st_size for entry in _files(path)]
    except FileNotFoundError as error:
        raise UsageError(f"run: {str(path)!r} changes, {error.filename!r} has just gone; is somebody else at it?") from error
    return len(sizes), sum(sizes)


def _files(path: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            else:
                yield entry


def _remove(path: Path) -> None:
    try:
        held = lock(path)
        if held is None:
            raise FileNotFoundError
        try:
            if not os.path.samestat(os.fstat(held), os.stat(path)):
                raise FileNotFoundError
            _empty(rename_hidden(path.resolve(), "gone"))
        finally:
            os.close(held)
    except FileNotFoundError as error:
        raise UsageError(f"run: {str(path)!r} is being deleted by another process.") from error
    except OSError as error:
        raise TrainerError(f"{path}: cannot be deleted as a whole ({error.filename}: {error.strerror}).") from error


def _empty(folder: Path) -> None:
    """Remove a folder, `_MARKS` last; remove links without following them."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name in _MARKS):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    folder.rmdir()


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(".*.gone-*"):
        if not _GONE.fullmatch(folder.name) or folder.is_symlink() or not (is_run(folder) or not any(folder.iterdir())):
            continue
        held = lock(folder)
        if held is None:
            continue  # another process removes it
        try:
            _empty(folder)
        finally:
            os.close(held)
