"""A run's folder of checkpoints: listing, finding the newest sound one, and pruning."""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from ..core.drafts import lock
from ..core.errors import UsageError
from ..metrics import MetricInfo
from .files import MANIFEST
from .meta import META, peek_meta
from .reader import Checkpoint, DamagedCheckpointError, read_checkpoint
from .writer import published_name, remove

CHECKPOINTS = "checkpoints"  # folder within the run directory
_NAME = re.compile(r"step-\d{9,}")


def list_checkpoints(run_path: Path) -> list[Path]:
    """Return a run's checkpoints, sound or not, newest (most updates) first.

    A checkpoint renamed for a successor still counts if its writer was killed before publishing. An active run may change the folder, so it
    is read until two listings agree.
    """
    folder = run_path / CHECKPOINTS
    entries = _list_entries(folder)
    while True:
        checkpoints = _find_checkpoints([folder / name for name in entries])
        if (now := _list_entries(folder)) == entries:
            return [checkpoints[name] for name in sorted(checkpoints, key=lambda name: int(name.removeprefix("step-")), reverse=True)]
        entries = now


def _list_entries(folder: Path) -> dict[str, int]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.inode() for entry in entries}
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}


def _find_checkpoints(paths: Sequence[Path]) -> dict[str, Path]:
    aside = [path for path in paths if fnmatch(path.name, ".step-*.old-*")]
    hidden = {published_name(path): path for path in aside if _NAME.fullmatch(published_name(path)) and _has_files(path)}
    return hidden | {path.name: path for path in paths if _NAME.fullmatch(path.name) and path.is_dir()}


def _has_files(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # removed since its name was read, or never created
        return False


def read_sound(paths: Callable[[], Sequence[Path]], count: int = 1) -> tuple[list[Checkpoint], list[DamagedCheckpointError]]:
    """Read up to `count` sound ones of some checkpoints; also return the damage found before.

    Starts again if an active run removes a checkpoint, as it has a newer one then.
    """
    sound: list[Checkpoint] = []
    damaged: list[DamagedCheckpointError] = []
    for path in paths():
        try:
            sound.append(read_checkpoint(path))
        except DamagedCheckpointError as error:
            if not path.exists():
                return read_sound(paths, count)
            damaged.append(error)
        if len(sound) == count:
            break
    return sound, damaged


def no_checkpoint(run_path: Path, damaged: Sequence[DamagedCheckpointError]) -> UsageError:
    """Return the error about a run without a sound checkpoint."""
    if damaged:
        return UsageError("\n".join([f"run: {str(run_path)!r} has no sound checkpoint.", *map(str, damaged)]))
    return UsageError(f"run: {str(run_path)!r} has no checkpoint. A run saves its last state, and more often with --checkpoint-every.")


def newest_sound(run_path: Path) -> tuple[Checkpoint, list[DamagedCheckpointError]]:
    """Return a run's newest sound checkpoint, and the damage of newer ones.

    Raises UsageError if there is none.
    """
    sound, damaged = read_sound(partial(list_checkpoints, run_path))
    if not sound:
        raise no_checkpoint(run_path, damaged)
    return sound[0], damaged


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, sound or not."""
    return (path / META).is_file() or (path / MANIFEST).is_file()


def find_checkpoint(path: Path) -> tuple[Checkpoint, list[DamagedCheckpointError]]:
    """Return a checkpoint, or a run's newest sound one and damaged newer ones.

    Raises UsageError, DamagedCheckpointError.
    """
    if is_checkpoint(path):
        return read_checkpoint(path), []
    if not path.is_dir():
        raise UsageError(f"run: there is no folder {str(path)!r}. Give a run directory or a checkpoint.")
    return newest_sound(path)


@contextmanager
def read_lock(path: Path) -> Iterator[bool]:
    """Protect a checkpoint from an active run's pruning within the block.

    Yield whether it exists.
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
    """Return a run's evaluated checkpoints, sound or not, best first.

    Of equal ones the earliest comes first.
    """
    figures = {path: figure for path in reversed(list_checkpoints(run_path)) if (figure := _read_metric(path, metric.name)) is not None}
    return sorted(figures, key=lambda path: -figures[path] if metric.better == "higher" else figures[path])


def prune(run_path: Path, keep: int, keep_best: MetricInfo | None = None, keep_best_count: int = 1) -> list[Path]:
    """Remove a run's checkpoints except the `keep` newest, the best, and locked ones.

    Return the removed paths. Raises OSError.
    """
    paths = list_checkpoints(run_path)
    retained = set(paths[:keep])
    if keep_best is not None:
        retained.update(best_checkpoints(run_path, keep_best)[:keep_best_count])
    removed: list[Path] = []
    for path in paths:
        if path not in retained and (descriptor := lock(path)) is not None:
            try:
                remove(path)
            finally:
                os.close(descriptor)
            removed.append(path)
    return removed


def _read_metric(path: Path, name: str) -> float | None:
    meta = peek_meta(path)
    value = None if meta is None or meta.metrics is None else meta.metrics.get(name)
    return None if value is None or math.isnan(value) else value
