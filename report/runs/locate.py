"""Lookup of runs by path, or by name below the folder of runs."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...core.bounded_json import read_json
from ...core.console import note
from ...core.errors import UsageError
from ...core.settings.sweeps import SWEEP_FILE
from ...records.store.jsonl import DamagedRunError
from .run import Run

_MAX_HINTS = 3

# Path's methods raise for inaccessible and overlong paths; os.path.isdir and isfile return False.


class UnreadableFolderError(UsageError):
    """A folder is not readable."""

    def __init__(self, path: Path, refusal: OSError) -> None:
        super().__init__(
            f"{str(path)!r} cannot be read ({refusal.strerror or refusal}); give a folder that you may read, or ask its owner."
        )


def check_readable(path: Path) -> None:
    """Raise UnreadableFolderError if an existing folder is not readable."""
    try:
        os.stat(path)
        if os.path.isdir(path):
            os.stat(os.path.join(path, "."))  # needs permission to search the folder, which listing does not
            os.scandir(path).close()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # no such folder; ValueError: an impossible name
        return
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise UnreadableFolderError(path, error) from error


def is_run(path: Path) -> bool:
    """Return whether a folder has ``job.json`` or ``status.json``."""
    return os.path.isfile(f"{path}/status.json") or os.path.isfile(f"{path}/job.json")


def find_sweep(text: str, out: Path) -> Path | None:
    """Return the sweep folder of a path, or of a name below `out`, if any."""
    return next((folder for folder in (Path(text), out / text) if text and os.path.isfile(folder / SWEEP_FILE)), None)


def run_names(out: Path, skipped: list[Path] | None = None) -> Iterator[str]:
    """Yield the run directories below `out`, unsorted. Raises UnreadableFolderError for `out`."""
    # Hidden and vanished folders are skipped, and unreadable ones in `out` are added to `skipped`.
    check_readable(out)
    for name in _folders(out):
        if is_run(out / name):
            yield name
            continue
        try:
            check_readable(out / name)
        except UnreadableFolderError:
            if skipped is not None:
                skipped.append(out / name)
        else:
            yield from (f"{name}/{inner}" for inner in _folders(out / name) if is_run(out / name / inner))


def _folders(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()  # the latter raises for a link to itself


def find_run(text: str, out: Path) -> Path:
    """Return the run directory of a path or name. Raises UsageError if not exactly one exists."""
    return _resolve(text, out, folders=False)[0]


def find_runs(texts: Sequence[str], out: Path) -> list[Path]:
    """Return the run directories of `texts`, each once; a folder yields its runs."""
    runs: dict[str, Path] = {}
    for paths in _resolve_each(texts, out):
        for path in paths:
            runs.setdefault(os.path.realpath(path), path)
    return list(runs.values())


def _resolve_each(texts: Sequence[str], out: Path) -> Iterator[list[Path]]:
    named: dict[tuple[str, ...], str] = {}
    for text in texts:
        paths = _resolve(text, out, folders=True)
        place = tuple(map(os.path.realpath, paths))
        if (before := named.get(place)) is not None:
            note(f"{text!r} {'is named again' if before == text else f'is {before!r} by another path'}; it counts once")
        named.setdefault(place, text)
        yield paths


def find_readable_runs(texts: Sequence[str], out: Path, *, with_figures: bool = False) -> tuple[list[Run], list[Run]]:
    """Return the readable runs that are named or in named folders, and the folders' other runs.

    A run that is named directly counts as readable, and so do all runs of a folder without a readable one.
    """
    readable: dict[str, Run] = {}
    skipped: dict[str, Run] = {}
    for paths in _resolve_each(texts, out):
        runs = list(_existing_runs(paths))
        chosen = {run for run in runs if len(runs) == 1 or _is_readable(run, with_figures=with_figures)}
        for run in runs:
            wanted = readable if run in chosen or not chosen else skipped
            wanted.setdefault(os.path.realpath(run.path), run)
    return list(readable.values()), [run for real, run in skipped.items() if real not in readable]


def _existing_runs(paths: Sequence[Path]) -> Iterator[Run]:
    """Yield the runs, without vanished ones. Raises UsageError for a single vanished run."""
    for path in paths:
        try:
            yield Run(path)
        except UsageError:
            if len(paths) == 1:
                raise


def _is_readable(run: Run, *, with_figures: bool) -> bool:
    try:
        has_figures = run.has_summary
        _ = run.job, run.nodes
    except DamagedRunError:
        return False
    return has_figures or not with_figures


def find_places(texts: Sequence[str], out: Path) -> list[Path]:
    """Return the run or folder (maybe empty) of each text. Raises UsageError if none exists."""
    places: dict[str, Path] = {}
    for text in texts:
        folders = (folder for folder in (Path(text), out / text) if text and os.path.isdir(folder))
        place = _one_run(text, out) or next(folders, None)
        if place is None:
            raise UsageError(_missing(text, out))
        check_readable(place)
        places.setdefault(os.path.realpath(place), place)
    return list(places.values())


def runs_at(place: Path) -> list[Path]:
    """Return the run directories at `place`, as `find_runs`. Raises UnreadableFolderError."""
    return [place] if is_run(place) else [place / name for name in _ordered(place, run_names(place))]


def _one_run(text: str, out: Path) -> Path | None:
    for path in (Path(text), out / text):
        if text and is_run(path):
            return path
    inner = [out / name for name in _names_below(out) if name.endswith(f"/{text}")]
    if len(inner) > 1:
        raise UsageError(f"run: {text!r} is the name of {len(inner)} runs; say which: {', '.join(map(str, sorted(inner)))}.")
    return inner[0] if inner else None


def _resolve(text: str, out: Path, *, folders: bool) -> list[Path]:
    if (run := _one_run(text, out)) is not None:
        return [run]
    for folder in (Path(text), out / text):
        below = _ordered(folder, run_names(folder)) if text and os.path.isdir(folder) else []
        if below and folders:
            return [folder / name for name in below]
        if below:
            raise UsageError(f"run: {str(folder)!r} is a folder of runs; give one of them, such as {str(folder / below[0])!r}.")
    raise UsageError(_missing(text, out))


def _names_below(out: Path) -> list[str]:
    """Return the names of the runs; none if `out` is unreadable, as the run may be elsewhere."""
    try:
        return list(run_names(out))
    except UnreadableFolderError:
        return []


def _ordered(folder: Path, names: Iterator[str]) -> list[str]:
    try:
        points = [str(point["name"]) for point in read_json(folder / SWEEP_FILE)["points"]]
    except (OSError, ValueError, KeyError, TypeError):  # no readable sweep; `trainer sweep` reports why
        points = []
    rank = {name: number for number, name in enumerate(points)}
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), name))


def _missing(text: str, out: Path) -> str:
    if text:
        check_readable(Path(text))
    names = sorted(run_names(out))
    if os.path.isdir(Path(text)):
        return f"run: {text!r} is not a run directory (it has neither job.json nor status.json){_hint(text, names, out)}"
    return f"run: got {text!r}; allowed: the path of a run directory, or the name of one in {str(out)!r}{_hint(text, names, out)}"


def _hint(text: str, names: Sequence[str], out: Path) -> str:
    if not names:
        return f"; there are no runs in {str(out)!r}." if os.path.isdir(out) else f"; there is no folder {str(out)!r} (--out, TRAINER_OUT)."
    wanted = Path(text).name.lower()
    last = {name.rpartition("/")[2].lower(): name for name in names}
    near = [last[close] for close in difflib.get_close_matches(wanted, last, n=_MAX_HINTS, cutoff=0.6)]
    near += [name for name in names if wanted and wanted in name.lower() and name not in near]
    if not near:
        return f"; trainer runs lists those in {str(out)!r}."
    return f". Did you mean {' or '.join(map(repr, near[:_MAX_HINTS]))}?"
