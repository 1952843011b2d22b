"""Start of an attempt: the model's initial state, or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from ...backends.base import State
from ...checkpoint import Checkpoint, DamagedCheckpointError, Meta, list_checkpoints, newest_sound, peek_meta
from ...checkpoint.writer import remove
from ...core.job import Job
from ...engine.epochs import DataCursor
from ...engine.loop_interfaces import ResumePoint
from ...engine.protocol.codec import state_from_arrays
from ...models.base import ModelSpec
from ...records.store.run_directory import RunReader
from ...records.store.schema import EvalRecord


@dataclass(frozen=True)
class Origin:
    """Start of an attempt: a checkpoint, or without one the beginning of the run."""

    start: ResumePoint = field(default_factory=ResumePoint)
    state: State | None = None
    checkpoint: Checkpoint | None = None
    spent: Mapping[str, Any] = field(default_factory=dict)  # seconds so far, as in checkpoints
    damaged: tuple[DamagedCheckpointError, ...] = ()  # newer, unusable checkpoints

    @property
    def place(self) -> dict[str, Any]:
        """The position in training, for the run's records."""
        cursor = self.start.cursor
        saved = {} if self.checkpoint is None else {"checkpoint": self.checkpoint.path.name}
        return {"step": cursor.step, "epoch": cursor.epoch, "examples": cursor.examples, **saved}

    def with_node_seconds_before(self, seconds: Sequence[float | None]) -> list[float | None]:
        """Add the training seconds of each node at the checkpoint."""
        before = [*self.spent.get("train_seconds_by_node", ()), *[None] * len(seconds)]
        both = zip(seconds, before[: len(seconds)], strict=True)
        return [None if now is None and then is None else (now or 0.0) + (then or 0.0) for now, then in both]

    @property
    def run_seconds(self) -> float:
        """The run clock at the checkpoint."""
        return 0.0 if self.checkpoint is None else self.checkpoint.meta.run_seconds

    def remove_later_checkpoints(self, run: Path) -> None:
        """Remove the run's newer checkpoints: they are damaged, or their updates are repeated."""
        for path in list_checkpoints(run) if self.checkpoint is None else later_checkpoints(run, self.checkpoint):
            remove(path)


def cursor_of(meta: Meta) -> DataCursor:
    """Return the position of a run at its checkpoint."""
    return DataCursor(meta.step, meta.epoch, meta.examples, meta.arranged)


def later_checkpoints(run: Path, checkpoint: Checkpoint) -> list[Path]:
    """Return the checkpoints of a run that are newer than this one, newest first."""
    return list(takewhile(lambda path: not path.samefile(checkpoint.path), list_checkpoints(run)))  # paths may be relative


def newest_origin(run: Path, job: Job, model: ModelSpec, first: Origin) -> Origin:
    """Return where a run restarts: its newest valid checkpoint, if any, or its beginning.

    A target reached before the checkpoint is reached again at the next such evaluation. Raises UsageError if all checkpoints are damaged.
    """
    if not list_checkpoints(run):
        return Origin()
    checkpoint, damaged = newest_sound(run)
    if first.checkpoint is not None and first.checkpoint.path.exists() and checkpoint.path.samefile(first.checkpoint.path):
        return first  # the job may have changed there
    meta = checkpoint.meta
    start = resume_point(cursor_of(meta), evaluations_until(RunReader(run), checkpoint), saved_figures(run, meta.step), meta.spent)
    state = state_from_arrays(dict(checkpoint.arrays), int(meta.spent.get("updates", meta.step)), meta.scalars)
    return Origin(start, state, checkpoint, meta.spent, tuple(damaged))


def evaluations_until(reader: RunReader, checkpoint: Checkpoint) -> list[EvalRecord]:
    """Return the evaluations on test examples up to a checkpoint."""
    meta = checkpoint.meta
    return [
        record
        for record in reader.evals()
        if record.split == "test" and record.step <= meta.step and record.time_seconds <= meta.run_seconds
    ]


def saved_figures(run: Path, until_step: int) -> list[Mapping[str, float]]:
    """Return the figures of the evaluated checkpoints up to a step, oldest first."""
    described = [meta for path in reversed(list_checkpoints(run)) if (meta := peek_meta(path)) is not None]
    return [meta.metrics for meta in described if meta.step <= until_step and meta.metrics is not None]


def resume_point(
    cursor: DataCursor,
    evals: Sequence[EvalRecord],
    saved: Sequence[Mapping[str, float]],
    spent: Mapping[str, Any],
    time_to_target_seconds: float | None = None,
) -> ResumePoint:
    """Return where training resumes after `evals`; a reached target does not stop it again."""
    return ResumePoint(
        cursor,
        spent.get("train_seconds", 0.0),
        spent.get("eval_seconds", 0.0),
        spent.get("checkpoint_seconds", 0.0),
        tuple(evals),
        tuple(saved),
        time_to_target_seconds,
    )
