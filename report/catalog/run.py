"""A finished run as other files of this folder take it: its summary, and what was asked and where it ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...records.store.run_directory import RunReader
from .labels import labels

__all__ = ["DescribedRun", "describe", "labelled"]

_STATES = {"died": "it was killed before it could write one", "failed": "it failed", "interrupted": "it was interrupted"}


@dataclass(frozen=True, slots=True)
class DescribedRun:
    """A run that has a summary: ``summary.json``, ``job.json``, and the nodes of ``env.json`` (empty where it has none).

    `label` is what it is called among others (`labels.labels`); alone it is called as its directory.
    """

    path: Path
    summary: Mapping[str, Any]
    job: Mapping[str, Any]
    nodes: Sequence[Mapping[str, Any]] = ()
    label: str | None = None

    @property
    def name(self) -> str:
        """What it is called."""
        return self.label or str(self.summary["run"])


def labelled(runs: Sequence[DescribedRun]) -> list[DescribedRun]:
    """Return the runs with labels that tell them apart, where they have none yet."""
    return [replace(run, label=run.label or label) for run, label in zip(runs, labels([run.path for run in runs]), strict=True)]


def describe(path: Path | str) -> DescribedRun:
    """Read a run. Raises UsageError for one that does not exist or has no summary (yet), DamagedRunError for one that cannot be read."""
    reader = RunReader(path)
    return DescribedRun(Path(path), _summary(reader, path), reader.job(), reader.env())


def _summary(reader: RunReader, path: Path | str) -> dict[str, Any]:
    summary = reader.summary()
    if summary is not None:
        return summary
    status = reader.status()
    cause = f" ({status['cause']})" if status["cause"] else ""
    state = reader.state()
    advice = "Wait until it has ended." if state in ("starting", "running") else "Run it again, or leave it out."
    raise UsageError(f"run: {str(path)!r} has no summary.json; {_STATES.get(state, f'it is {state}')}{cause}. {advice}")
