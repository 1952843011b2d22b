"""Policies for evaluations, checkpoints, early stopping and non-finite losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..core.errors import RunFailedError
from ..core.job import DEFAULT_EPOCHS, Job
from ..core.units import Cadence
from ..metrics.base import BestFew, Improvements
from ..models.objectives import Objective
from ..records.store.schema import EvalRecord
from .epochs import DataCursor, EpochIndex
from .loop_interfaces import CheckpointSink, PendingCheckpoint, Recorder, ResumePoint
from .progress import Progress
from .protocol.messages import ImpossibleAnswerError
from .protocol.state_transfer import StateBegin, StateEnd, StatePart


class Triggers:
    """Schedule of evaluations and checkpoints, and the total updates of a run."""

    def __init__(self, job: Job, epochs: EpochIndex) -> None:
        self.epochs = epochs
        self.total = total_steps(job, epochs)
        self.evaluations = Cadence.parse(job.eval_every)
        self.checkpoints = Cadence.parse(job.saved_every or "end")

    def next_stop(self, step: int) -> int:
        """Return the first step after `step` at which a plan has to end."""
        due = (_next(cadence, self.epochs, step) for cadence in (self.evaluations, self.checkpoints))
        return min([self.total, *(step_due for step_due in due if step_due is not None)])

    def evaluation_due(self, step: int) -> bool:
        """Return whether to evaluate after `step` updates."""
        return step >= self.total or _due(self.evaluations, self.epochs, step)

    def checkpoint_due(self, step: int) -> bool:
        """Return whether to save after `step` updates; not for the final checkpoint."""
        return _due(self.checkpoints, self.epochs, step)


def total_steps(job: Job, epochs: EpochIndex) -> int:
    """Return the updates of a job without a target or early stopping."""
    if job.steps is not None:
        return job.steps
    return epochs.first_step_in_epoch(job.epochs or DEFAULT_EPOCHS) if job.examples is None else epochs.steps_until(job.examples)


def _next(cadence: Cadence, epochs: EpochIndex, step: int) -> int | None:
    """Return the cadence's first step after `step`; None for cadences by time and ``end``."""
    every = int(cadence.amount)
    if cadence.unit == "steps":
        return (step // every + 1) * every
    if cadence.unit == "epochs":
        return epochs.first_step_in_epoch((epochs.place(step).epoch // every + 1) * every)
    return None


def _due(cadence: Cadence, epochs: EpochIndex, step: int) -> bool:
    if step == 0:
        return False
    if cadence.unit == "steps":
        return step % int(cadence.amount) == 0
    if cadence.unit == "epochs":
        cursor = epochs.cursor(step)
        return cursor.examples == 0 and cursor.epoch % int(cadence.amount) == 0
    return False


MAX_PAUSE_SHARE = 0.005  # largest share of training time paused for saving, for automatic intervals


class CheckpointPolicy:
    """Schedule of checkpoints; passes states on to `saver`. `clock` returns run seconds."""

    def __init__(
        self, job: Job, objective: Objective, budget: Triggers, start: ResumePoint, saver: CheckpointSink, clock: Callable[[], float]
    ) -> None:
        self._budget = budget
        self._saver = saver
        self._clock = clock
        self._figure = job.keep_best
        self._best: BestFew | None = None
        if job.keep_best is not None:
            earlier = (figures[job.keep_best] for figures in start.saved if job.keep_best in figures)
            self._best = BestFew(objective.info(job.keep_best), job.keep_best_count, earlier)
        self._improved = False
        self._automatic = job.checkpoint_every is None
        self._pause_seconds = 0.0
        self._last_step = start.cursor.step if start.resumed else 0
        self._last_seconds = 0.0
        self._in_flight: dict[int, PendingCheckpoint] = {}
        self._saves_last = job.save_final or job.checkpoint_every == "end"
        self.saves_on_interrupt = job.saves_intermediate_checkpoints

    def start_clock(self) -> None:
        """Start the interval of a cadence by time."""
        self._last_seconds = self._clock()

    @property
    def final(self) -> bool:
        """Whether to save the last state: requested, or its evaluation is among the best."""
        return self._saves_last or self._improved

    @property
    def waits_for_evaluation(self) -> bool:
        """Whether evaluations decide on checkpoints."""
        return self._figure is not None

    def due(self, step: int) -> bool:
        """Return whether to save before planning update `step`."""
        if self._improved:
            return True  # also after an earlier save of this state: the checkpoint replaces it
        if step == self._last_step:
            return False
        if self._budget.checkpoints.unit == "seconds":
            interval = self._budget.checkpoints.amount
            if self._automatic:
                interval = max(interval, self._pause_seconds / MAX_PAUSE_SHARE)
            return self._clock() - self._last_seconds >= interval
        return self._budget.checkpoint_due(step)

    def unsaved(self, step: int) -> bool:
        """Return whether the final state, after `step` updates, is still unsaved.

        Notify the saver of the end.
        """
        refused = self._saver.ending(step)
        return refused or self._improved or step != self._last_step

    def evaluated(self, record: EvalRecord) -> None:
        """Make a checkpoint due if an evaluation is among the best so far (``--keep-best``)."""
        if self._best is not None and self._figure is not None and self._best.add(record.figure(self._figure)):
            self._improved = True

    def on_requested(self, sequence: int, cursor: DataCursor) -> None:
        """Note that ``state`` has been sent."""
        if cursor.step >= self._budget.total:
            self._saver.ending(cursor.step)
        self._last_step, self._last_seconds, self._improved = cursor.step, self._clock(), False
        self._in_flight[sequence] = PendingCheckpoint(cursor, 0.0, 0.0, None)

    def on_copied(self, sequence: int, seconds: float, evaluation: EvalRecord | None) -> None:
        """Note that the task copied its state in so many seconds; `evaluation` is the last."""
        save = self._in_flight[sequence]
        self._pause_seconds = seconds
        current = evaluation if evaluation is not None and evaluation.step == save.cursor.step else None
        self._in_flight[sequence] = replace(save, run_seconds=self._clock(), stall_seconds=seconds, evaluation=current)

    @property
    def outstanding(self) -> bool:
        """Whether states are still being transferred."""
        return bool(self._in_flight)

    def on_message(self, message: StateBegin | StatePart | StateEnd) -> None:
        """Pass on a state message. Raises ImpossibleAnswerError for an unrequested state."""
        save = self._in_flight.get(message.sequence)
        if save is None:
            raise ImpossibleAnswerError("a state that nobody asked for")
        if isinstance(message, StateBegin):
            self._saver.begin(save, message)
        elif isinstance(message, StatePart):
            self._saver.chunk(message)
        else:
            self._saver.end()
            del self._in_flight[message.sequence]


class Patience:
    """Early stopping (``--patience N``), across resumptions.

    It follows the metric of ``--keep-best`` or the model's first.
    """

    def __init__(self, job: Job, objective: Objective, start: ResumePoint, recorder: Recorder, progress: Progress) -> None:
        self._limit, self._recorder, self._progress = job.patience, recorder, progress
        info = objective.info(job.keep_best) if job.keep_best else objective.infos[0]
        self._improvements = Improvements(info, ((record.step, record.figure(info.name)) for record in start.evaluations))

    @property
    def limited(self) -> bool:
        """Whether an evaluation may end the run."""
        return self._limit > 0

    def evaluated(self, record: EvalRecord) -> bool:
        """Add an evaluation; return whether it ends the run, which is recorded."""
        improvements, info = self._improvements, self._improvements.info
        improvements.add(record.step, record.figure(info.name))
        if not self.limited or improvements.since < self._limit:
            return False
        detail = {"best": improvements.best, "best_step": improvements.best_step, "evaluations": improvements.since}
        self._recorder.event("patience_exhausted", metric=info.name, step=record.step, **detail)
        evaluations = "1 evaluation" if improvements.since == 1 else f"{improvements.since} evaluations in a row"
        self._progress.message(f"stopping: {evaluations} without a better {info.label} (--patience {self._limit})")
        return True


class LossGuard:
    """Check of losses for NaN and infinity (``--on-nan``).

    Updates that fp16 skips do not count: only gradients overflowed.
    """

    def __init__(self, on_nan: Literal["fail", "continue"], rate: float, show: Callable[[str], None]) -> None:
        self._fails = on_nan == "fail"
        self._rate = rate
        self._show = show
        self._shown = False

    def trained(self, first_step: int, losses: NDArray[Any], rates: NDArray[Any]) -> None:
        """Check losses and learning rates, [k] each; `first_step` counts from 0.

        Raises RunFailedError where a loss ends the run.
        """
        self._rate = float(rates[-1])
        if bad := np.flatnonzero(~np.isfinite(losses)).tolist():
            number = first_step + bad[0]
            record = f" (number {number} in steps.jsonl, which counts from 0)"
            self._not_finite(f"the loss of step {number + 1:,}", float(losses[bad[0]]), float(rates[bad[0]]), record)

    def evaluated(self, step: int, split: str, loss: float) -> None:
        """Check an evaluation's loss after `step` updates.

        Raises RunFailedError where it ends the run.
        """
        if not np.isfinite(loss):
            self._not_finite(f"the {split} loss after {step:,} steps", loss, self._rate)

    def _not_finite(self, what: str, loss: float, rate: float, record: str = "") -> None:
        kind = "not a number" if np.isnan(loss) else "infinite"
        cause = f"{what} is {kind}{record}, at the learning rate {rate:g}; a smaller --lr may help"
        if self._fails:
            raise RunFailedError(f"{cause} (--on-nan continue trains on)")
        if not self._shown:
            self._shown = True
            self._show(f"{cause}; training continues (--on-nan continue)")
