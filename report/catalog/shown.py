"""A run as reports show it, however it ended: its documents, its name among the others, its evaluations and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...records.schema import EvalRecord, EventRecord
from ...records.store.run_directory import RunReader
from .labels import labels

__all__ = ["ShownRun", "show_runs"]


@dataclass(frozen=True, slots=True)
class ShownRun:
    """A run directory as it is now. `number` counts from 0; `summary` is None where the run has none; `state` may be ``died``."""

    path: Path
    number: int
    label: str
    state: str
    cause: str | None
    job: Mapping[str, Any]
    env: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    evals: Sequence[EvalRecord]
    events: Sequence[EventRecord]

    @property
    def tests(self) -> list[EvalRecord]:
        """The evaluations on the test split."""
        return [record for record in self.evals if record.split == "test"]

    @property
    def run_seconds(self) -> float | None:
        """The run clock at the run's end, or as far as its records go; None where it never started."""
        if self.summary is not None:
            return float(self.summary["run_seconds"])
        known = [*(record.time_seconds for record in self.evals), *(event.time_seconds for event in self.events)]
        return max(known) if known and any(event.event in ("run_started", "run_resumed") for event in self.events) else None


def show_runs(paths: Sequence[Path]) -> list[ShownRun]:
    """Read the runs, in the order given. Raises UsageError for one that is none, or is not far enough to have a ``job.json``."""
    return [_show(path, number, label) for number, (path, label) in enumerate(zip(paths, labels(paths), strict=True))]


def _show(path: Path, number: int, label: str) -> ShownRun:
    reader = RunReader(path)
    if not (path / "job.json").is_file():
        raise UsageError(f"run: {str(path)!r} ended before anything was known about it (there is no job.json). Leave it out.")
    status = reader.status()
    return ShownRun(
        path,
        number,
        label,
        reader.state(),
        status["cause"],
        reader.job(),
        reader.env(),
        reader.summary(),
        list(reader.evals()),
        list(reader.events()),
    )
