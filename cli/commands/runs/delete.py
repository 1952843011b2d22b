"""``trainer runs delete``: run directories disappear in one move each, and nothing else does."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import click
import psutil

from ....checkpoint.draft_folders import lock, rename_hidden
from ....core.errors import TrainerError, UsageError
from ....core.settings.sweeps import EARLIER, SWEEP_FILE
from ....core.untrusted.console import note, one_line
from ....records.store.run_directory import RunReader
from ....records.text.numbers import bytes_text, count_text
from ....report.catalog.index import run_row
from ....report.catalog.locate import is_run, run_names
from ....report.catalog.run import Run

__all__ = ["delete"]

_MARKS = ("job.json", "status.json")
"""What tells a run directory from others; removed last, so that the rest of a killed deletion can be told as well."""

_GONE = re.compile(r"\..+\.gone-\w{8}")


def delete(runs: Sequence[Path], sweeps: Sequence[Path], *, yes: bool) -> None:
    """Show what goes, ask (unless `yes`), and delete the run directories, and sweeps' folders with theirs.

    Raises UsageError before anything is deleted: where one is a link or at work, or of a sweep at work, and where nobody can be asked.
    """
    sweeps = _once(sweeps)
    with ExitStack() as held:
        for sweep in sweeps:
            _hold(sweep, held)
        whole = {os.path.realpath(sweep) for sweep in sweeps}
        around = {Path(os.path.realpath(run)).parent for run in runs}
        for sweep in sorted(folder for folder in around if (folder / SWEEP_FILE).exists() and str(folder) not in whole):
            _hold(sweep, held)  # it counts the runs that it has done
        theirs = [run for sweep in sweeps for run in _runs_of(sweep)]
        if _delete(_once([*runs, *theirs]), yes=yes):
            _end(sweeps)


def _once(paths: Sequence[Path]) -> list[Path]:
    """Return each folder once, in whichever ways it is named; links stay apart from what they lead to."""
    return list({os.path.abspath(path): path for path in paths}.values())


def _hold(sweep: Path, held: ExitStack) -> None:
    """Keep a sweep from going on meanwhile, as it holds the same lock while it does."""
    if sweep.is_symlink():
        raise UsageError(f"run: {str(sweep)!r} is a link; give the sweep's folder that it leads to, {str(sweep.resolve())!r}.")
    descriptor = lock(sweep)
    if descriptor is None:
        raise UsageError(f"run: the sweep in {str(sweep)!r} is at work; end it first.")
    held.callback(os.close, descriptor)


def _runs_of(sweep: Path) -> list[Path]:
    """Return a sweep's run directories, with attempts at points that it began anew.

    Raises UsageError where one lies behind a link: a sweep from elsewhere would have other people's runs counted as its own.
    """
    found = [folder / name for folder in (sweep, sweep / EARLIER) for name in sorted(run_names(folder))]
    for run in found:
        if os.path.realpath(run.parent) != os.path.join(os.path.realpath(sweep), os.path.relpath(run.parent, sweep)).removesuffix("/."):
            raise UsageError(
                f"run: {str(run)!r} is not in the sweep's folder but behind a link, {str(run.parent)!r}; remove the link first."
            )
    return found


def _end(sweeps: Sequence[Path]) -> None:
    """Remove what is left of sweeps without runs. A folder with files of others stays, and is told."""
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
    """Return whether the runs were deleted: at a terminal the answer may be no."""
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
        _check(path)  # while the question stood, somebody may have resumed it
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
    except (TrainerError, KeyError, TypeError):  # its status cannot be read; a run at work has its records open
        writers = list(_writers(path))
        if writers:
            raise UsageError(f"run: {str(path)!r} is still written, by process {writers[0]}; end it first.") from None
        return
    if state in ("starting", "running"):
        unknown = " Nobody here can tell whether it still is." if reader.driver_alive() is None else ""
        raise UsageError(f"run: {str(path)!r} is {state} (process {driver['pid']} on {driver['host']}); end it first.{unknown}")


def _writers(path: Path) -> Iterator[int]:
    """Yield the processes, as far as this user may see, that have a file in `path` open for writing."""
    prefix = f"{path.resolve()}{os.sep}"
    for process in psutil.process_iter():
        try:
            files = process.open_files()
        except psutil.Error:
            continue
        if any(file.path.startswith(prefix) and file.mode != "r" for file in files):
            yield process.pid


def _size(path: Path) -> tuple[int, int]:
    """Return how many files there are below a folder, and their bytes."""
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
    """Move a run directory out of the way and remove it, under a lock that keeps other deletions from it."""
    try:
        held = lock(path)
        if held is None:
            raise FileNotFoundError
        try:
            if not _is_at(held, path):
                raise FileNotFoundError
            _empty(rename_hidden(path.resolve(), "gone"))
        finally:
            os.close(held)
    except FileNotFoundError as error:
        raise UsageError(f"run: {str(path)!r} is being deleted by another process.") from error
    except OSError as error:
        raise TrainerError(f"{path}: cannot be deleted as a whole ({error.filename}: {error.strerror}).") from error


def _is_at(descriptor: int, path: Path) -> bool:
    return os.path.samestat(os.fstat(descriptor), os.stat(path))


def _empty(folder: Path) -> None:
    """Remove a folder, what marks it as a run directory last. Links are removed, never followed."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name in _MARKS):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    folder.rmdir()


def _remove_leftovers(parent: Path) -> None:
    """Remove what deletions that were killed left in `parent`."""
    for folder in parent.glob(".*.gone-*"):
        if not _GONE.fullmatch(folder.name) or folder.is_symlink() or not (is_run(folder) or not any(folder.iterdir())):
            continue
        held = lock(folder)
        if held is None:
            continue  # another process is at it
        try:
            _empty(folder)
        finally:
            os.close(held)
