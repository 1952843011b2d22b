"""``--resume auto``: the same command begins a run, goes on with it every later time it is given, and ends when it has succeeded."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from ..checkpoint import list_checkpoints
from ..core.errors import UsageError, writing
from ..core.job import Job
from ..core.untrusted.console import note
from ..launch.resume.resumption import refuse_at_work
from ..records.store.run_directory import RunReader
from ..report.catalog.locate import is_run

__all__ = ["Standing", "standing_run"]


class Standing(Enum):
    """What becomes of a run that is to begin, or to go on."""

    BEGINS = "begins"
    GOES_ON = "goes on"
    HAS_SUCCEEDED = "has succeeded"


def standing_run(job: Job) -> tuple[Standing, Path]:
    """Return how the run that the job names stands, and its directory.

    The directory of one that ended before its first checkpoint is moved aside, as such a run begins anew. Raises UsageError where the job
    has no name, where the run is still at work, and where something else is in its place.
    """
    if job.name is None:
        raise UsageError("--resume auto resumes the run of the same name; give the run a --name")
    path = job.out / job.name
    if not path.exists():
        return Standing.BEGINS, path
    if not is_run(path):
        raise UsageError(f"--resume auto: {str(path)!r} is no run; give another --name")
    reader = RunReader(path)
    if reader.state() == "succeeded":
        return Standing.HAS_SUCCEEDED, path
    if list_checkpoints(path):
        return Standing.GOES_ON, path
    refuse_at_work(reader)
    aside = next(place for number in range(1, 10_000) if not (place := path.with_name(f"{path.name}.before-{number}")).exists())
    with writing(path.parent):
        path.rename(aside)
    note(f"the run {path.name} ended before its first checkpoint and restarts; the old directory is now {aside}")
    return Standing.BEGINS, path
