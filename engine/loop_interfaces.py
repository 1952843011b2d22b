"""Interfaces of the training loop: tasks, recorder, checkpoint sink, start and totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Plan, StepResult
from ..core.job import Job
from ..records.store.schema import EvalRecord, StepRecord
from .epochs import START, DataCursor
from .protocol.messages import ImpossibleAnswerError, WireMessage
from .protocol.state_transfer import StateBegin, StatePart
from .protocol.task_messages import Command


class TaskGroup(Protocol):
    """All leading tasks as one."""

    def send(self, message: Command) -> None:
        """Send a command to every leading task."""

    def receive(self, timeout_seconds: float) -> tuple[int, WireMessage] | None:
        """Return the next answer and its leading task, or None.

        Raises RunFailedError for a failed task, InterruptedRunError.
        """

    def refuse(self, leader: int, wrong: str) -> NoReturn:
        """Drop the node of an impossible answer. Raises RunFailedError."""

    def __len__(self) -> int: ...


class Recorder(Protocol):
    """Writer of the loop's records."""

    def step(self, record: StepRecord) -> None:
        """Record a group of updates."""

    def evaluation(self, record: EvalRecord) -> None:
        """Record an evaluation result."""

    def event(self, event: str, **detail: Any) -> None:
        """Record an event with the current time."""

    def check(self) -> None:
        """Raise DiskError where recording fails; called at least once a second."""


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """Checkpoint in progress: its position, time, pause in seconds and evaluation."""

    cursor: DataCursor
    run_seconds: float
    stall_seconds: float
    evaluation: EvalRecord | None


class CheckpointSink(Protocol):
    """Writer of checkpoints in another thread; a failed save does not fail the run."""

    active_at: float  # monotonic time of the last bytes of a state

    def begin(self, save: PendingCheckpoint, message: StateBegin) -> None:
        """Start receiving a state, and answer."""

    def chunk(self, message: StatePart) -> None:
        """Receive and acknowledge a chunk."""

    def end(self) -> None:
        """Finish the state."""

    def wait(self) -> None:
        """Wait until every received state is written or has failed."""

    def ending(self, step: int) -> bool:
        """Release the disk space reserved for the rest of the run.

        Return whether to retry this state.
        """


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Start of a run or resumption.

    Seconds and evaluations are those so far, `saved` the checkpoints' figures, oldest first.
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
        """Whether an earlier run left work behind."""
        return self.cursor != START


@dataclass
class TrainingTotals:
    """Work of the run so far; seconds are those inside commands on the first leading task."""

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
    def from_start(cls, start: ResumePoint, leaders: int) -> TrainingTotals:
        """Return the totals before `start`; seconds by leader and worker are those of this segment."""
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


MAX_COUNT = 2**53  # updates, as records count them


@dataclass
class _Pending:
    plan: Plan
    missing: NDArray[np.bool_]


class OutstandingPlans:
    """Plans whose updates are not all reported yet; reports come in any order."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pending: dict[int, _Pending] = {}

    def add(self, plan: Plan) -> None:
        """Add a plan that is sent now."""
        self._pending[plan.first_step] = _Pending(plan, np.ones(plan.count, np.bool_))

    def reported_before(self, step: int) -> bool:
        """Return whether every update before `step` has been reported."""
        return min(self._pending, default=step) >= step

    def take(self, result: StepResult) -> Plan:
        """Mark a result's updates as reported; return their plan. Raises ImpossibleAnswerError."""
        self._require_valid(result)
        for first, pending in self._pending.items():
            if first <= result.first_step < first + pending.plan.count:
                reported = pending.missing[result.first_step - first : result.first_step - first + result.count]
                if len(reported) != result.count or not reported.all():
                    break
                reported[:] = False
                if not pending.missing.any():
                    del self._pending[first]
                return pending.plan
        raise ImpossibleAnswerError(f"{result.count} steps from step {result.first_step} on, which are not outstanding")

    def _require_valid(self, result: StepResult) -> None:
        job = self._job
        sync = job.mode == "sync"
        batch = job.global_batch if sync else job.per_worker_batch
        if not 1 <= result.count <= result.examples <= result.count * batch:
            raise ImpossibleAnswerError(f"{result.examples} examples in {result.count} steps, with batches of {batch}")
        if (result.worker is None) != sync or (result.staleness is None) != sync:
            raise ImpossibleAnswerError(f"steps with a worker or staleness, or without, in {job.mode} mode")
        if result.worker is not None and result.worker >= job.workers:
            raise ImpossibleAnswerError(f"steps of worker {result.worker}, of {job.workers}")
        if result.staleness is not None and (
            len(result.staleness) != result.count or result.staleness.min() < 0 or result.staleness.max() > MAX_COUNT
        ):
            raise ImpossibleAnswerError(f"{result.count} steps whose staleness is not a count for each")
