"""Where an attempt at a run begins: at the model's initial state, or at a checkpoint's state, position and time spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from ...backends.base import State
from ...checkpoint import Checkpoint, DamagedCheckpointError, Meta, list_checkpoints, newest_sound, peek_meta
from ...checkpoint.draft_folders import remove
from ...core.job import Job
from ...engine.epochs import DataCursor
from ...engine.loop_interfaces import ResumePoint
from ...engine.protocol.codec import state_from_arrays
from ...models.base import ModelSpec
from ...records.schema import EvalRecord
from ...records.store.run_directory import RunReader

__all__ = ["Origin", "cursor_of", "evaluations_until", "later_checkpoints", "newest_origin", "resume_point", "saved_figures"]


@dataclass(frozen=True)
class Origin:
    """Where an attempt begins: at the beginning of the run, where there is no `state` and no `checkpoint`, or at a checkpoint.

    `spent` has the seconds that the run had spent by then, as checkpoints have them. `damaged` are the newer checkpoints that could not
    be used.
    """

    start: ResumePoint = field(default_factory=ResumePoint)
    state: State | None = None
    checkpoint: Checkpoint | None = None
    spent: Mapping[str, Any] = field(default_factory=dict)
    damaged: tuple[DamagedCheckpointError, ...] = ()

    @property
    def place(self) -> dict[str, Any]:
        """Where in the training that is, for the run's records."""
        cursor = self.start.cursor
        saved = {} if self.checkpoint is None else {"checkpoint": self.checkpoint.path.name}
        return {"step": cursor.step, "epoch": cursor.epoch, "examples": cursor.examples, **saved}

    def with_node_seconds_before(self, seconds: Sequence[float | None]) -> list[float | None]:
        """Add to the training time of each node, in seconds, what it was at the checkpoint; nodes that are no more are left out."""
        before = [*self.spent.get("train_seconds_by_node", ()), *[None] * len(seconds)]
        both = zip(seconds, before[: len(seconds)], strict=True)
        return [None if now is None and then is None else (now or 0.0) + (then or 0.0) for now, then in both]

    @property
    def run_seconds(self) -> float:
        """The run clock there."""
        return 0.0 if self.checkpoint is None else self.checkpoint.meta.run_seconds

    def remove_later_checkpoints(self, run: Path) -> None:
        """Remove the run's checkpoints that are newer than this: damaged, or of updates that will be done anew."""
        for path in list_checkpoints(run) if self.checkpoint is None else later_checkpoints(run, self.checkpoint):
            remove(path)


def cursor_of(meta: Meta) -> DataCursor:
    """Return where the run stood that a checkpoint was taken of."""
    return DataCursor(meta.step, meta.epoch, meta.examples, meta.arranged)


def later_checkpoints(run: Path, checkpoint: Checkpoint) -> list[Path]:
    """Return a run's checkpoints that are newer than one of them, newest first."""
    return list(takewhile(lambda path: not path.samefile(checkpoint.path), list_checkpoints(run)))  # one of the two may be relative


def newest_origin(run: Path, job: Job, model: ModelSpec, first: Origin) -> Origin:
    """Return where a run that is at work can begin anew: at its newest sound checkpoint, or at its beginning where it has saved none.

    `first` is where this process began with it: of that very checkpoint it is returned, since the job may have changed there. A target
    that had been reached by the checkpoint is reached again at the next evaluation that does. Raises UsageError where all checkpoints
    are damaged.
    """
    if not list_checkpoints(run):
        return Origin()
    checkpoint, damaged = newest_sound(run)
    if first.checkpoint is not None and first.checkpoint.path.exists() and checkpoint.path.samefile(first.checkpoint.path):
        return first
    meta = checkpoint.meta
    start = resume_point(cursor_of(meta), evaluations_until(RunReader(run), checkpoint), saved_figures(run, meta.step), meta.spent)
    state = state_from_arrays(dict(checkpoint.arrays), int(meta.spent.get("updates", meta.step)), meta.scalars)
    return Origin(start, state, checkpoint, meta.spent, tuple(damaged))


def evaluations_until(reader: RunReader, checkpoint: Checkpoint) -> list[EvalRecord]:
    """Return a run's evaluations on test examples up to a checkpoint."""
    meta = checkpoint.meta
    return [
        record
        for record in reader.evals()
        if record.split == "test" and record.step <= meta.step and record.time_seconds <= meta.run_seconds
    ]


def saved_figures(run: Path, until_step: int) -> list[Mapping[str, float]]:
    """Return the figures of a run's checkpoints, up to that after so many updates, oldest first; of those that were evaluated."""
    described = [meta for path in reversed(list_checkpoints(run)) if (meta := peek_meta(path)) is not None]
    return [meta.metrics for meta in described if meta.step <= until_step and meta.metrics is not None]


def resume_point(
    cursor: DataCursor,
    evals: Sequence[EvalRecord],
    saved: Sequence[Mapping[str, float]],
    spent: Mapping[str, Any],
    time_to_target_seconds: float | None = None,
) -> ResumePoint:
    """Return where training goes on. `evals` are those so far; a run whose target was reached before is not stopped by it again."""
    return ResumePoint(
        cursor,
        spent.get("train_seconds", 0.0),
        spent.get("eval_seconds", 0.0),
        spent.get("checkpoint_seconds", 0.0),
        tuple(evals),
        tuple(saved),
        time_to_target_seconds,
    )
