"""What RUN and CHECKPOINT mean to several commands."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from ..checkpoint import CHECKPOINTS, is_checkpoint, list_checkpoints
from ..core.errors import UsageError
from ..core.job import Job
from ..core.untrusted.bounded_json import first_problem
from ..core.untrusted.console import note
from ..records.store.jsonl import DamagedRunError
from ..records.store.run_directory import RunReader
from ..report.catalog.locate import find_finished_runs, find_readable_runs, find_run, is_run
from ..report.catalog.run import Run

__all__ = ["find_run_or_checkpoint", "finished_runs", "readable_runs", "recorded_start_timeout", "warn_of_lost_updates"]


def find_run_or_checkpoint(path: Path) -> Path:
    """Return a run directory or a checkpoint: a path, or the same below the folder of runs (TRAINER_OUT, by default ``runs``).

    Raises UsageError where there is none, naming the run's checkpoints, or runs that are called alike.
    """
    out = _out()
    for folder in (path, out / path):
        if is_checkpoint(folder) or list_checkpoints(folder):
            return folder
        if folder.parent.name == CHECKPOINTS and is_run(folder.parent.parent):
            run = folder.parent.parent
            found = ", ".join(one.name for one in list_checkpoints(run)) or "none"
            raise UsageError(f"checkpoint: there is no {str(folder)!r}; checkpoints of the run {run.name!r}: {found}.")
    return find_run(str(path), out)


def _out() -> Path:
    return Path(os.environ.get("TRAINER_OUT") or "runs")


def recorded_start_timeout(path: Path) -> float | None:
    """Return the start time-out of the run that `path` means; None where this node has no such run.

    Raises DamagedRunError where the run's files cannot be read.
    """
    for folder in (path, _out() / path):
        run = folder.parent.parent if is_checkpoint(folder) else folder
        if not (run / "job.json").is_file():
            continue
        value = RunReader(run).job().get("start_timeout", Job.model_fields["start_timeout"].default)
        try:
            return Job.model_validate({"start_timeout": value}).start_timeout
        except ValidationError as error:
            raise DamagedRunError(f"{run / 'job.json'}: {first_problem(error)}.") from error
    return None


def readable_runs(texts: Sequence[str], out: Path) -> list[Run]:
    """Return the runs that `texts` mean; of a folder, those that can be read, and a note names the others. Raises UsageError."""
    runs, left_out = find_readable_runs(texts, out)
    if left_out:
        note(f"skipped (unreadable files): {', '.join(run.path.name for run in left_out)}")
    warn_of_lost_updates(runs)
    return runs


def finished_runs(texts: Sequence[str], out: Path) -> list[Run]:
    """Return the runs that `texts` mean and that have figures; of a folder a note names the others. Raises UsageError."""
    runs, left_out = find_finished_runs(texts, out)
    if left_out:
        note(f"skipped (no readable figures): {', '.join(run.path.name for run in left_out)}")
    warn_of_lost_updates(runs)
    return runs


def warn_of_lost_updates(runs: Sequence[Run]) -> None:
    """Warn of runs that succeeded and whose records lack updates. Raises DamagedRunError where a summary cannot be read."""
    from ..report.catalog.lost_updates import lost_updates

    for run in runs:
        if (lost := lost_updates(run)) is not None:
            note(f"warning: {lost}.")
