"""Where is the run that somebody means? A path, or a name below the folder that runs are made in."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...core.errors import UsageError
from ...core.settings.sweeps import SWEEP_FILE
from ...core.untrusted.bounded_json import read_json
from ...core.untrusted.console import note
from ...records.store.jsonl import DamagedRunError
from .run import Run

__all__ = [
    "UnreadableFolderError",
    "check_readable",
    "find_finished_runs",
    "find_places",
    "find_readable_runs",
    "find_run",
    "find_runs",
    "find_sweep",
    "is_run",
    "run_names",
    "runs_at",
]

_MOST_HINTS = 3

# os.path.isdir and isfile say no where a path may not be looked at, or is too long; Path's own raise there.


class UnreadableFolderError(UsageError):
    """A folder is there, or may be, and this user may not look into it."""

    def __init__(self, path: Path, refusal: OSError) -> None:
        super().__init__(
            f"{str(path)!r} cannot be read ({refusal.strerror or refusal}); give a folder that you may read, or ask its owner."
        )


def check_readable(path: Path) -> None:
    """Raise UnreadableFolderError where a folder's entries cannot be listed or looked at; a path that leads nowhere is no such."""
    try:
        os.stat(path)
        if os.path.isdir(path):
            os.stat(os.path.join(path, "."))  # takes the right to look at entries, which listing does without
            os.scandir(path).close()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # no such folder; ValueError: no such name can be
        return
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise UnreadableFolderError(path, error) from error


def is_run(path: Path) -> bool:
    """Return whether a folder is a run directory: ``job.json`` or ``status.json`` lies in it."""
    return os.path.isfile(path / "status.json") or os.path.isfile(path / "job.json")


def find_sweep(text: str, out: Path) -> Path | None:
    """Return the folder of a sweep that `text` means, a path or a name below `out`; None where it means something else."""
    return next((folder for folder in (Path(text), out / text) if text and os.path.isfile(folder / SWEEP_FILE)), None)


def run_names(out: Path, passed_over: list[Path] | None = None) -> Iterator[str]:
    """Yield the run directories below `out`: ``RUN``, and ``FOLDER/RUN`` for those that a sweep keeps one level deeper; none without `out`.

    Hidden folders are passed over, and so are folders that vanish meanwhile and folders in `out` that cannot be read, which are added to
    `passed_over`. The order is the file system's. Raises UnreadableFolderError where `out` cannot be read.
    """
    check_readable(out)
    for name in _folders(out):
        if is_run(out / name):
            yield name
            continue
        try:
            check_readable(out / name)
        except UnreadableFolderError:
            if passed_over is not None:
                passed_over.append(out / name)
        else:
            yield from (f"{name}/{inner}" for inner in _folders(out / name) if is_run(out / name / inner))


def _folders(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if not entry.name.startswith(".") and os.path.isdir(path / entry.name)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def find_run(text: str, out: Path) -> Path:
    """Return the run directory that `text` means: a path, a name below `out` (``RUN``, ``FOLDER/RUN``), or a name in a folder of `out`.

    A path comes first. Raises UsageError where there is none, naming what is called alike, or where there are several.
    """
    return _found(text, out, folders=False)[0]


def find_runs(texts: Sequence[str], out: Path) -> list[Path]:
    """Return the run directories that `texts` mean, in their order, each once.

    Beside what `find_run` takes, a folder of runs stands for all of its runs, a sweep's in the order of its points, others in the order of
    their names. A note says what is named again. Raises UsageError as `find_run` does.
    """
    found: dict[str, Path] = {}
    for paths in _found_each(texts, out):
        for path in paths:
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _found_each(texts: Sequence[str], out: Path) -> Iterator[list[Path]]:
    """Yield the run directories that each text means; a note names a text that means the same as one before it, by whatever path."""
    named: dict[tuple[str, ...], str] = {}
    for text in texts:
        paths = _found(text, out, folders=True)
        place = tuple(map(os.path.realpath, paths))
        if (before := named.get(place)) is not None:
            note(f"{text!r} {'is named again' if before == text else f'is {before!r} by another path'}; it counts once")
        named.setdefault(place, text)
        yield paths


def find_finished_runs(texts: Sequence[str], out: Path) -> tuple[list[Run], list[Run]]:
    """Return the same in two parts, as runs: those to read figures of, and those of a folder that have none, or none that can be read.

    A run that was named itself is always in the first part, and so is a folder's if none of them has figures.
    """
    return _in_two_parts(texts, out, with_figures=True)


def find_readable_runs(texts: Sequence[str], out: Path) -> tuple[list[Run], list[Run]]:
    """Return the same in two parts, as runs: those whose documents can be read, and those of a folder of which one is damaged.

    A run that was named itself is always in the first part, and so is a folder's if none of them can be read.
    """
    return _in_two_parts(texts, out, with_figures=False)


def _in_two_parts(texts: Sequence[str], out: Path, *, with_figures: bool) -> tuple[list[Run], list[Run]]:
    found: dict[str, Run] = {}
    left_out: dict[str, Run] = {}
    for paths in _found_each(texts, out):
        runs = [Run(path) for path in paths]
        kept = {run for run in runs if len(runs) == 1 or _is_readable(run, with_figures=with_figures)}
        for run in runs:
            wanted = found if run in kept or not kept else left_out
            wanted.setdefault(os.path.realpath(run.path), run)
    return list(found.values()), [run for real, run in left_out.items() if real not in found]


def _is_readable(run: Run, *, with_figures: bool) -> bool:
    try:
        has_figures = run.has_summary
        _ = run.job, run.nodes
    except DamagedRunError:
        return False
    return has_figures or not with_figures


def find_places(texts: Sequence[str], out: Path) -> list[Path]:
    """Return the run directory or the folder that each text means, for those who follow what comes there (`runs_at`); each once.

    Unlike for `find_runs`, a folder need not have a run yet. Raises UsageError where there is neither.
    """
    found: dict[str, Path] = {}
    for text in texts:
        folders = (folder for folder in (Path(text), out / text) if text and os.path.isdir(folder))
        place = _one_run(text, out) or next(folders, None)
        if place is None:
            raise UsageError(_missing(text, out))
        check_readable(place)
        found.setdefault(os.path.realpath(place), place)
    return list(found.values())


def runs_at(place: Path) -> list[Path]:
    """Return the run directories that there are by now: `place` itself, or those below it, as `find_runs` orders them; maybe none.

    Raises UnreadableFolderError where `place` cannot be read.
    """
    return [place] if is_run(place) else [place / name for name in _ordered(place, run_names(place))]


def _one_run(text: str, out: Path) -> Path | None:
    """Return the run directory that a text means by itself, by its path or a name; None where there is none."""
    for path in (Path(text), out / text):
        if text and is_run(path):
            return path
    inner = [out / name for name in _names_there(out) if name.endswith(f"/{text}")]
    if len(inner) > 1:
        raise UsageError(f"run: {text!r} is the name of {len(inner)} runs; say which: {', '.join(map(str, sorted(inner)))}.")
    return inner[0] if inner else None


def _found(text: str, out: Path, *, folders: bool) -> list[Path]:
    if (run := _one_run(text, out)) is not None:
        return [run]
    for folder in (Path(text), out / text):
        below = _ordered(folder, run_names(folder)) if text and os.path.isdir(folder) else []
        if below and folders:
            return [folder / name for name in below]
        if below:
            raise UsageError(f"run: {str(folder)!r} is a folder of runs; give one of them, such as {str(folder / below[0])!r}.")
    raise UsageError(_missing(text, out))


def _names_there(out: Path) -> list[str]:
    """Return the names of the runs; none where `out` cannot be read, as what is meant may lie elsewhere."""
    try:
        return list(run_names(out))
    except UnreadableFolderError:
        return []


def _ordered(folder: Path, names: Iterator[str]) -> list[str]:
    """Put a sweep's points into its order, what it does not name behind them; all other runs into that of their names."""
    try:
        points = [str(point["name"]) for point in read_json(folder / SWEEP_FILE)["points"]]
    except (OSError, ValueError, KeyError, TypeError):  # no sweep, or none that can be read: `trainer sweep` says what is wrong with it
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
    """Return what ends the message: the names that are most like the text or hold it, or that there are none at all."""
    if not names:
        return f"; there are no runs in {str(out)!r}." if os.path.isdir(out) else f"; there is no folder {str(out)!r} (--out, TRAINER_OUT)."
    wanted = Path(text).name.lower()
    last = {name.rpartition("/")[2].lower(): name for name in names}
    near = [last[close] for close in difflib.get_close_matches(wanted, last, n=_MOST_HINTS, cutoff=0.6)]
    near += [name for name in names if wanted and wanted in name.lower() and name not in near]
    if not near:
        return f"; trainer runs lists those in {str(out)!r}."
    return f". Did you mean {' or '.join(map(repr, near[:_MOST_HINTS]))}?"
