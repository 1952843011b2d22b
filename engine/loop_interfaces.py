"""The interfaces that the training loop uses (tasks, recorder, checkpoint sink), where it begins, and what it has done at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from ..records.schema import EvalRecord, StepRecord
from .epochs import START, DataCursor
from .protocol.impossible_answers import ImpossibleAnswerError
from .protocol.messages import Message

__all__ = ["CheckpointSink", "ImpossibleAnswerError", "PendingCheckpoint", "Recorder", "ResumePoint", "TaskGroup", "TrainingTotals"]


class TaskGroup(Protocol):
    """The leading tasks as one: what is sent goes to each of them."""

    def send(self, message: Message) -> None:
        """Send a command to every leading task."""
        ...

    def receive(self, timeout_seconds: float) -> tuple[int, Message] | None:
        """Return the next answer and the number of the leading task it comes from, or None after the time.

        Raises RunFailedError when a task has died, InterruptedRunError when the user has asked to stop.
        """
        ...

    def refuse(self, leader: int, wrong: str) -> NoReturn:
        """Give the node of a leading task up, whose answer cannot be. Raises RunFailedError, which says so."""
        ...

    def __len__(self) -> int: ...


class Recorder(Protocol):
    """Where the loop writes; the run directory's writer is one."""

    def step(self, record: StepRecord) -> None:
        """Record a group of updates."""
        ...

    def evaluation(self, record: EvalRecord) -> None:
        """Record an evaluation."""
        ...

    def event(self, event: str, **detail: Any) -> None:
        """Record that something happened just now."""
        ...

    def check(self) -> None:
        """Raise DiskError where nothing can be recorded any more; called at least once a second."""
        ...


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint in the making: where the run stood, when, what training paid for it, and the evaluation of these parameters."""

    cursor: DataCursor
    run_seconds: float
    stall_seconds: float
    evaluation: EvalRecord | None


class CheckpointSink(Protocol):
    """Who writes checkpoints, off the loop's thread; a save that fails does not fail the run."""

    active_at: float
    """When, on the monotonic clock, bytes of a state were last dealt with."""

    def begin(self, save: PendingCheckpoint, message: Message) -> None:
        """A state is there to be taken: ``state_begin``; whoever writes it answers."""
        ...

    def chunk(self, message: Message) -> None:
        """A chunk of it has arrived: ``state_part``; whoever writes it acknowledges it."""
        ...

    def end(self) -> None:
        """All of it has been taken."""
        ...

    def wait(self) -> None:
        """Wait until all that has arrived is on disk, or has failed."""
        ...

    def ending(self, step: int) -> bool:
        """The run ends after `step` updates, so that their state may take the room that was kept for the rest of it.

        Return whether this state found no room but that, and so is worth another try.
        """
        ...


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run begins, or goes on: the seconds spent so far, its evaluations on test examples, and when its target was reached.

    `saved` are the figures, by name, of the checkpoints that there are, oldest first.
    """

    cursor: DataCursor = START
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    evaluations: Sequence[EvalRecord] = ()
    saved: Sequence[Mapping[str, float]] = ()
    time_to_target_seconds: float | None = None

    @property
    def last_evaluation(self) -> EvalRecord | None:
        """The last evaluation so far."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def resumed(self) -> bool:
        """Whether anything was done before."""
        return self.cursor != START


@dataclass
class TrainingTotals:
    """What the run has done so far. Seconds are those spent inside commands on the first leading task."""

    updates_scheduled: int = 0
    updates_reported: int = 0
    updates_applied: int | None = None
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    translate_seconds: float = 0.0
    train_seconds_by_leader: list[float] = field(default_factory=list)
    seconds_by_worker: dict[int, float] = field(default_factory=dict)
    target_reached: bool | None = None
    time_to_target_seconds: float | None = None
    last_evaluation: EvalRecord | None = None
    interrupted: bool = False

    @classmethod
    def at(cls, start: ResumePoint, leaders: int) -> TrainingTotals:
        """Return what was done before `start`; the seconds by leader and by worker are those of this segment of the run alone."""
        step, evaluation = start.cursor.step, start.last_evaluation
        return cls(
            updates_scheduled=step,
            updates_reported=step,
            updates_applied=evaluation.updates_applied if evaluation else None,
            train_seconds=start.train_seconds,
            eval_seconds=start.eval_seconds,
            checkpoint_seconds=start.checkpoint_seconds,
            train_seconds_by_leader=[0.0] * leaders,
            target_reached=True if start.time_to_target_seconds is not None else None,
            time_to_target_seconds=start.time_to_target_seconds,
            last_evaluation=evaluation,
        )
