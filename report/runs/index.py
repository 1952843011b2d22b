"""Runs as flat rows of figures, read from their directories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.console import note
from ...core.errors import TrainerError, UsageError
from ...records.store.summary_schema import summary_type
from ...records.summary import job_fields, read_job
from .locate import is_run, run_names
from .run import Run
from .summary_rows import figure_type, row

DAMAGED = "damaged"  # the state of a run with unreadable files; `problem` says why
STATES = ("starting", "running", "succeeded", "failed", "interrupted", "died", DAMAGED)
# Keys of a row: those of `summary_rows.row`, and path, start (ISO 8601), problem and folder (such as a sweep's).
FIGURES = ("path", "folder", "created_at", "problem", *row({"per_node": []}))
_TYPES: Mapping[str, Any] = {"created_at": str | None, "problem": str | None, "eval_error": summary_type(("eval", "loss"))}


def row_type(name: str) -> Any:
    """Return the pydantic type of one of `FIGURES`; each may be None."""
    return str if name == "path" else _TYPES.get(name) or figure_type(name)


def list_runs(out: Path) -> list[dict[str, Any]]:
    """Return a row for each run below `out`, by name. Raises UnreadableFolderError for `out`."""
    # Keys are `FIGURES`, None if unknown. Runs without summary have their job's figures, unreadable ones the state `DAMAGED`.
    rows = []
    skipped: list[Path] = []
    for name in sorted(run_names(out, skipped)):
        try:
            found = run_row(Run(out / name))
        except UsageError:
            continue  # removed by another process
        if found["state"] != DAMAGED or is_run(out / name):
            rows.append({"path": found["path"], "folder": name.rpartition("/")[0] or None, **found})
    if skipped:
        note(f"passed over, as they cannot be read: {', '.join(sorted(map(str, skipped)))}")
    return rows


def run_row(run: Run) -> dict[str, Any]:
    """Return the row of one run from its files, without `folder`."""
    created = None
    try:
        created = str(run.status["created_at"])
        figures = row(run.summary) if run.has_summary else _without_summary(run)
        return {"path": str(run.path), "created_at": created, "problem": None, **figures, "state": run.state}
    except (TrainerError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        problem = str(error) if isinstance(error, TrainerError) else f"{run.path}: {type(error).__name__}: {error}"
        unknown = row({"per_node": []})
        return {
            "path": str(run.path),
            "created_at": created,
            "problem": problem,
            **unknown,
            "run": run.path.name,
            "state": DAMAGED,
        }


def _without_summary(run: Run) -> dict[str, Any]:
    job = read_job(run.job)
    return row({**job_fields(job, run.own_name), "target": job.until, "per_node": []})
