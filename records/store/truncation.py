"""Cuts a run's records back to one of its checkpoints: later records are removed, so that curves continue from there without overlap.

A file is replaced in one move, and only where lines are removed. Lines are copied as they are; an incomplete last one is removed too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...core.untrusted.bounded_json import UnreadableError, parse_json, read_lines
from .jsonl import DamagedRunError

__all__ = ["cut_records"]

Keeps = Callable[[Mapping[str, Any]], bool]


def cut_records(path: Path, step: int, run_seconds: float) -> None:
    """Cut the records of the run directory `path` back to `step` updates, taken at `run_seconds` on the run clock.

    What stays: updates before `step`; evaluations of at most `step` updates and events and samples up to `run_seconds`; and the events
    about checkpoints up to that step, the last of which is later than the state it saved. ``summary.json`` goes, as it told of the end.
    Raises DamagedRunError where a line that is not the last cannot be read, and OSError where the disk has no room for the shorter
    files beside the longer ones; nothing is cut then.
    """

    def by_time(record: Mapping[str, Any]) -> bool:
        return float(record["time_seconds"]) <= run_seconds

    def event(record: Mapping[str, Any]) -> bool:
        return by_time(record) or (record["event"] == "checkpoint_saved" and record["detail"]["step"] <= step)

    rules: dict[str, Keeps] = {
        "steps.jsonl": lambda record: int(record["step"]) < step,
        "evals.jsonl": lambda record: int(record["step"]) <= step and by_time(record),
        "events.jsonl": event,
        "system.jsonl": by_time,
    }
    partial: dict[str, Path] = {}
    try:
        for name, keeps in rules.items():
            if (path / name).exists():
                partial[name] = _copy(path / name, keeps)
        for name, copied in partial.items():
            os.replace(copied, path / name)
    finally:
        for copied in partial.values():
            copied.unlink(missing_ok=True)
    (path / "summary.json").unlink(missing_ok=True)
    shutil.rmtree(path / "tensorboard", ignore_errors=True)  # both are derived from the records, and written anew from them
    for name in ("mllog.txt", "calibration.json"):
        (path / name).unlink(missing_ok=True)


def _copy(path: Path, keeps: Keeps) -> Path:
    """Copy the lines that stay into a file beside; return it, on the disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    torn: int | None = None
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as target:
            for number, line in enumerate(read_lines(path), 1):
                if torn is not None:
                    raise DamagedRunError(f"{path}, line {torn}: not a whole JSON record, and more lines follow it.")
                try:
                    record = parse_json(line)
                    stays = keeps(record)
                except (ValueError, KeyError, TypeError):
                    torn = number
                    continue
                if stays:
                    target.write(line)
            target.flush()
            os.fsync(target.fileno())
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, UnreadableError):
            raise DamagedRunError(f"{path}: {error}.") from error
        raise
    return partial
