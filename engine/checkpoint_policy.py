"""When a run saves a checkpoint, and which saves are under way: from the task that copies its state to the saver that writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..core.job import Job
from ..metrics.ranking import BestFew
from ..models.objectives import Objective
from ..records.schema import EvalRecord
from .epochs import DataCursor
from .loop_interfaces import CheckpointSink, ImpossibleAnswerError, PendingCheckpoint, ResumePoint
from .protocol.messages import Message
from .triggers import Triggers

__all__ = ["CheckpointPolicy"]

MOST_PAUSE_SHARE = 0.005
"""Where the run itself says how often it saves: training may stand still for so much of the time, at most."""


class CheckpointPolicy:
    """Decides when a checkpoint is due, and passes states on to `saver`. `clock` returns seconds on the run clock."""

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
        self.saves_on_interrupt = job.saves_on_the_way

    def start_clock(self) -> None:
        """Begin to count the seconds to the first checkpoint of a cadence by time."""
        self._last_seconds = self._clock()

    @property
    def final(self) -> bool:
        """Whether the last state is to be saved: the job says so, or the last evaluation is among the best, and it ended the run."""
        return self._saves_last or self._improved

    @property
    def waits_for_evaluation(self) -> bool:
        """Whether what an evaluation shows decides on a checkpoint."""
        return self._figure is not None

    def due(self, step: int) -> bool:
        """Return whether to save before update `step` is planned."""
        if self._improved:
            return True  # also where this state was saved before it was evaluated: the checkpoint takes the place of that one
        if step == self._last_step:
            return False
        if self._budget.checkpoints.unit == "seconds":
            return self._clock() - self._last_seconds >= self._interval_seconds
        return self._budget.checkpoint_due(step)

    @property
    def _interval_seconds(self) -> float:
        """Of a cadence by time: what the job says, or where it leaves that to the run, so long that pauses are a small share of it."""
        least = self._budget.checkpoints.amount
        return max(least, self._pause_seconds / MOST_PAUSE_SHARE) if self._automatic else least

    def unsaved(self, step: int) -> bool:
        """Return whether what `step` updates have made has not been saved, or not with the figures that put it among the best.

        The run ends there: the saver learns that, and a save that it has refused for the sake of what was to come counts as none.
        """
        refused = self._saver.ending(step)
        return refused or self._improved or step != self._last_step

    def evaluated(self, record: EvalRecord) -> None:
        """Take note of an evaluation; with ``--keep-best`` one that is among the best so far makes a checkpoint due."""
        if self._best is not None and self._figure is not None and self._best.add(record.figure(self._figure)):
            self._improved = True

    def on_requested(self, sequence: int, cursor: DataCursor) -> None:
        """A command ``state`` has been sent."""
        if cursor.step >= self._budget.total:
            self._saver.ending(cursor.step)
        self._last_step, self._last_seconds, self._improved = cursor.step, self._clock(), False
        self._in_flight[sequence] = PendingCheckpoint(cursor, 0.0, 0.0, None)

    def on_copied(self, sequence: int, seconds: float, evaluation: EvalRecord | None) -> None:
        """The task has copied its state, in so many seconds; `evaluation` is the last one."""
        save = self._in_flight[sequence]
        self._pause_seconds = seconds
        own = evaluation if evaluation is not None and evaluation.step == save.cursor.step else None
        self._in_flight[sequence] = replace(save, run_seconds=self._clock(), stall_seconds=seconds, evaluation=own)

    @property
    def active_at(self) -> float:
        """When, on the monotonic clock, bytes of a state were last dealt with."""
        return self._saver.active_at

    @property
    def outstanding(self) -> bool:
        """Whether states are still on their way."""
        return bool(self._in_flight)

    def on_message(self, message: Message) -> None:
        """Pass a message of a state on. Raises ImpossibleAnswerError for one that cannot be."""
        save = self._in_flight.get(message["sequence"])
        if save is None:
            raise ImpossibleAnswerError("a state that nobody asked for")
        if message.kind == "state_begin":
            self._saver.begin(save, message)
        elif message.kind == "state_part":
            self._saver.chunk(message)
        else:
            self._saver.end()
            del self._in_flight[message["sequence"]]

    def wait(self) -> None:
        """Wait until every state that arrived is on disk, or has failed."""
        self._saver.wait()
