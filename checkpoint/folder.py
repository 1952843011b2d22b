"""A run's folder of checkpoints: which there are, the newest that is sound, which to keep."""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from ..core.errors import UsageError
from ..metrics import MetricInfo
from .draft_folders import lock, published_name, remove
from .manifest import MANIFEST
from .meta import META, peek_meta
from .reader import Checkpoint, DamagedCheckpointError, read_checkpoint

__all__ = ["CHECKPOINTS", "best_checkpoints", "find_checkpoint", "is_checkpoint", "list_checkpoints", "newest_sound", "prune", "read_lock"]

CHECKPOINTS = "checkpoints"
"""Name of the folder within the run directory."""

_NAME = re.compile(r"step-\d{9,}")


def list_checkpoints(run_path: Path) -> list[Path]:
    """Return a run's checkpoints, sound or not, newest (most updates) first.

    One that stepped aside for a successor that never came, because its writer was killed just then, counts still. The run may be at work:
    what has been listed may be gone when it is looked at, and its successor not listed yet, so all is done again until nothing has changed.
    """
    folder = run_path / CHECKPOINTS
    entries = _entries(folder)
    while True:
        found = _checkpoints_among([folder / name for name in entries])
        if (now := _entries(folder)) == entries:
            return [found[name] for name in sorted(found, key=_step, reverse=True)]
        entries = now


def _entries(folder: Path) -> dict[str, int]:
    """Return what is in a folder, each name with the number by which the file system tells it from another of that name."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.inode() for entry in entries}
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}


def _checkpoints_among(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the checkpoints by final name."""
    aside = [path for path in paths if fnmatch(path.name, ".step-*.old-*")]
    found = {published_name(path): path for path in aside if _NAME.fullmatch(published_name(path)) and _holds_files(path)}
    return found | {path.name: path for path in paths if _NAME.fullmatch(path.name) and path.is_dir()}


def _holds_files(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # it has been removed since its name was read, or no writer has made it
        return False


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def newest_sound(run_path: Path) -> tuple[Checkpoint, list[DamagedCheckpointError]]:
    """Return a run's newest sound checkpoint, and the damage of each newer one; the run may be at work meanwhile.

    Raises UsageError where the run has none, naming what is wrong with each where all are damaged.
    """
    damaged: list[DamagedCheckpointError] = []
    for path in list_checkpoints(run_path):
        try:
            return read_checkpoint(path), damaged
        except DamagedCheckpointError as error:
            if not path.exists():  # the run has removed it for a newer one just now
                return newest_sound(run_path)
            damaged.append(error)
    if damaged:
        raise UsageError("\n".join([f"run: {str(run_path)!r} has no sound checkpoint.", *map(str, damaged)]))
    raise UsageError(f"run: {str(run_path)!r} has no checkpoint. A run saves its last state, and more often with --checkpoint-every.")


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is meant as a checkpoint, sound or not."""
    return (path / META).is_file() or (path / MANIFEST).is_file()


def find_checkpoint(path: Path) -> tuple[Checkpoint, list[DamagedCheckpointError]]:
    """Return the checkpoint at `path`, or the newest sound one of the run at `path` with the damage of each newer one.

    Raises DamagedCheckpointError where `path` is a checkpoint itself and damaged, UsageError where nothing is there.
    """
    if is_checkpoint(path):
        return read_checkpoint(path), []
    if not path.is_dir():
        raise UsageError(f"run: there is no folder {str(path)!r}. Give a run directory or a checkpoint.")
    return newest_sound(path)


@contextmanager
def read_lock(path: Path) -> Iterator[bool]:
    """Keep a run that is at work from pruning a checkpoint within the block; say whether it is there.

    The kernel lets go of it when the process ends, however it ends.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
    finally:
        os.close(descriptor)


def best_checkpoints(run_path: Path, metric: MetricInfo) -> list[Path]:
    """Return a run's checkpoints that were evaluated, sound or not, the best by a metric first; among equals the earliest."""
    figures = {path: figure for path in reversed(list_checkpoints(run_path)) if (figure := _figure(path, metric.name)) is not None}
    return sorted(figures, key=lambda path: -figures[path] if metric.better == "higher" else figures[path])


def prune(run_path: Path, keep: int, keep_best: MetricInfo | None = None, keep_best_count: int = 1) -> list[Path]:
    """Remove all checkpoints of a run but the `keep` newest and those that were best by the metric `keep_best`, so many of them.

    Return what was removed; one that somebody holds (`read_lock`) stays until the next time. Raises OSError.
    """
    paths = list_checkpoints(run_path)
    kept = set(paths[:keep])
    if keep_best is not None:
        kept.update(best_checkpoints(run_path, keep_best)[:keep_best_count])
    removed: list[Path] = []
    for path in paths:
        if path not in kept and (descriptor := lock(path)) is not None:
            try:
                remove(path)
            finally:
                os.close(descriptor)
            removed.append(path)
    return removed


def _figure(path: Path, name: str) -> float | None:
    """Return a figure of the evaluation that a checkpoint knows of, None where there is none or it is not a number."""
    meta = peek_meta(path)
    value = None if meta is None or meta.metrics is None else meta.metrics.get(name)
    return None if value is None or math.isnan(value) else value
