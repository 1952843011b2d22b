"""A run whose settings another one begins with (``trainer run --like RUN``), under the rules of ``--resume`` for what its files decide."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ...core.job import Job
from ...core.settings.sources import ResumedRun
from ...records.store.run_directory import RunReader
from .trust import LINK, links_outside, refuse_foreign, refuse_personal

__all__ = ["earlier_run"]


def earlier_run(path: Path, *, trusted: bool) -> ResumedRun:
    """Return the settings of a run, save its name and place, as a layer below what is given anew; nothing stands from which to count.

    Raises UsageError where its files decide what they may not (`trust`), DamagedRunError where they cannot be read.
    """
    described = RunReader(path).job()
    refuse_personal(described, path / "job.json")
    refuse_foreign({LINK: next(links_outside(path), None)}, path, (), trusted=trusted)
    fields = {field: described[field] for field in Job.model_fields if field in described and field not in ("out", "name")}
    admit = partial(refuse_foreign, source=path, typed=Job.model_fields, trusted=trusted)
    return ResumedRun(fields, path.resolve().name, None, None, admit)
