"""Training loop in the driver, for every backend and mode.

About half a second of work is queued to hide round trips; a plan never crosses the end of an epoch, an evaluation or a checkpoint.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Plan, StepResult
from ..core.errors import RunFailedError, StalledRunError
from ..core.job import Job
from ..core.liveness import TICK_SECONDS, SilenceCounter
from ..core.units import Target
from ..core.update_rules import learning_rates
from ..data.base import DataInfo
from ..data.sampler import run_sampler
from ..metrics import LOSS
from ..models.objectives import Objective
from ..records.store.schema import EvalRecord
from ..records.text import figure_text
from .epochs import EpochIndex
from .loop_interfaces import CheckpointSink, OutstandingPlans, Recorder, ResumePoint, TaskGroup, TrainingTotals
from .policies import CheckpointPolicy, LossGuard, Patience, Triggers
from .progress import Progress
from .protocol.messages import ImpossibleAnswerError, WireMessage
from .protocol.state_transfer import StateBegin, StateEnd, StatePart
from .protocol.task_messages import Command, Decoded, Done, Evaluated, SendState, Steps, Train, step_record
from .translation import AllTranslated, EvaluationInProgress, WholeEvaluation
from .worker_watch import WorkerWatch

PLAN_SECONDS = 0.5  # long enough to hide the round trip, short enough to react to a user
FIRST_PLAN_STEPS = 4  # doubled with each plan until the speed is known
MAX_COMMANDS_QUEUED = 64
MAX_TRANSLATIONS_QUEUED = 2  # one in progress, one waiting: tasks never idle, and an interrupt is quick
TASKS = 0  # the only peer whose silence is counted: all leading tasks together


@dataclass
class _Command:
    message: Command
    updates: int
    waiting: int
    at_step: int


@dataclass(frozen=True)
class Subject:
    """Subject of training: the data, with lengths of text examples, and the model's objective."""

    data: DataInfo
    objective: Objective
    lengths: Mapping[str, NDArray[np.int64]] | None = None
    width: int | None = None


@dataclass(frozen=True)
class Outputs:
    """Destinations of a run's records, progress and checkpoints.

    `clock` is the run clock in seconds.
    """

    recorder: Recorder
    progress: Progress
    saver: CheckpointSink
    clock: Callable[[], float]


class TrainingLoop:
    """Training loop of a job.

    `on_silent` gets the number of an async worker that is silent too long.
    """

    def __init__(
        self,
        job: Job,
        subject: Subject,
        tasks: TaskGroup,
        outputs: Outputs,
        start: ResumePoint | None = None,
        on_silent: Callable[[int], None] | None = None,
    ) -> None:
        start = start or ResumePoint()
        objective, recorder, progress = subject.objective, outputs.recorder, outputs.progress
        self.job = job
        self.data = subject.data
        self.objective = objective
        self.width = subject.width
        self.tasks = tasks
        self.recorder = recorder
        self.progress = progress
        self.saver = outputs.saver
        self.clock = outputs.clock
        self.epochs = EpochIndex(run_sampler(job, self.data.sizes["train"], subject.lengths), start.cursor)
        self.triggers = Triggers(job, self.epochs)
        self.checkpoints = CheckpointPolicy(job, objective, self.triggers, start, outputs.saver, outputs.clock)
        self._evaluation = EvaluationInProgress(job, objective, self.data.sizes, len(tasks))
        self.target = Target.parse(job.until) if job.until else None
        self.patience = Patience(job, objective, start, recorder, progress)
        self.outcome = TrainingTotals.from_start(start, len(tasks))
        self._queued: deque[_Command] = deque()
        self._plans = OutstandingPlans(job)
        self._decoding: dict[tuple[bool, int], list[float]] = {}
        self._next_plan_steps = FIRST_PLAN_STEPS
        self._sequence = 0
        self._next_step = start.cursor.step
        self._evaluated_at = start.last_evaluation.step if start.last_evaluation else 0
        self._last_evaluation_seconds = 0.0
        self._rate: float | None = None
        self._losses = LossGuard(job.on_nan, job.lr, progress.message)
        self._workers = WorkerWatch(job.workers, job.stall_timeout, recorder.event, progress.message, on_silent=on_silent)
        self._rate_since = (start.cursor.step, 0.0)
        self._messages_received = 0
        self._silence = SilenceCounter(job.stall_timeout, time.monotonic())
        self._stopping = self._stop_requested = self._pause_requested = False
        self._running = self._trained = False
        self._work = self._train()
        self._epochs_ended = self.epochs.start.epoch
        self._last_position = float(self.epochs.epochs_at(self.triggers.total, 1)[0])

    def advance(self) -> bool:
        """Send what is due and handle one answer.

        Return False once the stopping rule holds or interrupted.
        Exceptions of `tasks.receive` pass; `outcome` stays valid, and a further call continues.
        """
        more, self._running = False, True
        try:
            if next(self._work, False):
                self._await()
                more = True
        finally:
            self._running = more
        return more

    def _train(self) -> Iterator[bool]:
        """Send the commands of the run; yield True for each answer to await."""
        self._silence = SilenceCounter(self.job.stall_timeout, time.monotonic())
        self._rate_since = (self._next_step, self.clock())
        self._last_evaluation_seconds = self.clock()
        self.checkpoints.start_clock()
        self._queue_commands()
        while self._queued:
            yield True
            self._queue_commands()
        complete = self._stopping or (self._next_step >= self.triggers.total and self._evaluated_at == self._next_step)
        self._trained = complete or not self._halting
        self.outcome.interrupted = not self._trained
        if self.target is not None and self.outcome.target_reached is None:
            self.outcome.target_reached = False
        if (self.checkpoints.final or self.outcome.interrupted) and self.checkpoints.unsaved(self._next_step):
            self._save()
        while self._queued or self.checkpoints.outstanding:
            yield True
        self.saver.wait()
        if self._trained:
            yield from self._translate_all()

    def interrupt(self) -> bool:
        """Stop with a checkpoint after the queued commands.

        Return False without intermediate checkpoints.
        After training, stop the final translations. Safe in a signal handler of the loop's thread.
        """
        if not self._running or not (self._trained or self.checkpoints.saves_on_interrupt):
            return False
        self._stop_requested = True
        return True

    @property
    def only_translates(self) -> bool:
        """Whether only the final translations are left."""
        return self._trained and self.objective.translation is not None

    def pause(self) -> bool:
        """Interrupt to resume training elsewhere; return False also if nothing is left to train."""
        if not self._running or self._trained or not self.checkpoints.saves_on_interrupt:
            return False
        self._pause_requested = True
        return True

    def on_worker_absent(self, worker: int) -> None:
        """Note the restart of an async worker, which counts as activity for the stall time-out."""
        self._messages_received += 1
        self._workers.on_absent(worker)

    def on_worker_back(self, worker: int) -> None:
        """Note that the worker participates again."""
        self._workers.on_back(worker)

    @property
    def _halting(self) -> bool:
        return self._stop_requested or self._pause_requested

    def _queue_commands(self) -> None:
        while not (self._stopping or self._halting) and len(self._queued) < MAX_COMMANDS_QUEUED and not self._enough_queued():
            if self._awaiting_decision():
                return
            if self._evaluation_due():
                self._evaluated_at = self._next_step
                self._last_evaluation_seconds = self.clock()
                for message in self._evaluation.begin("test"):
                    self._send(message, 0)
            elif self.checkpoints.due(self._next_step):
                self._save()
            elif self._next_step < self.triggers.total:
                self._send_plan()
            else:
                return

    def _enough_queued(self) -> bool:
        updates = sum(command.updates for command in self._queued)
        if self._rate is None:
            return len(self._queued) >= 2
        return len(self._queued) >= 2 and updates / self._rate >= PLAN_SECONDS

    def _awaiting_decision(self) -> bool:
        """Whether a pending evaluation translates, may end the run or make a checkpoint due."""
        if self._evaluation.translating:
            return True
        decides = self.target is not None or self.patience.limited or self.checkpoints.waits_for_evaluation
        return decides and any(command.message.kind == "evaluate" for command in self._queued)

    def _evaluation_due(self) -> bool:
        if self._evaluated_at == self._next_step:
            return False
        if self.triggers.evaluation_due(self._next_step):
            return True
        if self.triggers.evaluations.unit == "seconds":
            return self.clock() - self._last_evaluation_seconds >= self.triggers.evaluations.amount
        return False

    def _save(self) -> None:
        self.checkpoints.on_requested(self._sequence + 1, self.epochs.cursor(self._next_step))
        self._send(SendState(), 0)

    def _send_plan(self) -> None:
        step = self._next_step
        place = self.epochs.place(step)
        wanted = self._next_plan_steps if self._rate is None else max(1, int(self._rate * PLAN_SECONDS))
        self._next_plan_steps *= 2
        count = min(wanted, place.left, self.triggers.next_stop(step) - step)
        positions = self.epochs.epochs_at(step, count)
        rates = learning_rates(self.job, step, count, self.epochs.steps_per_epoch, self._last_position, positions, self.width)
        plan = Plan(step, count, place.epoch, place.first_in_epoch, rates, place.skip, place.arranged)
        self._plans.add(plan)
        self._next_step += count
        self.outcome.updates_scheduled += count
        self._send(Train.from_plan(plan), count)

    def _send(self, message: Command, updates: int) -> None:
        self._sequence += 1
        message.sequence = self._sequence
        self._queued.append(_Command(message, updates, len(self.tasks), self._next_step))
        self.tasks.send(message)

    def _await(self) -> None:
        """Handle one answer. Raises StalledRunError on time-out.

        Suspended time counts one tick at most.
        """
        self.recorder.check()
        self._workers.tick()
        answer = self.tasks.receive(TICK_SECONDS)
        self._show_activity()
        if answer is None:
            if self._silence.tick(time.monotonic(), {TASKS: (self._messages_received, self.saver.active_at)}):
                silent, limit = self._silence.seconds(TASKS), self.job.stall_timeout
                raise StalledRunError(f"stalled: no step finished for {silent:.0f} s (--stall-timeout {limit:g})")
            return
        self._messages_received += 1
        leader, message = answer
        try:
            self._on_answer(leader, message)
        except ImpossibleAnswerError as error:
            self.tasks.refuse(leader, str(error))

    def _show_activity(self) -> None:
        command = self._queued[0] if self._queued else None
        activity = self._evaluation.progress_text if command is not None and command.message.kind == "decode" else None
        if command is not None and command.message.kind == "evaluate":
            activity = f"evaluating after step {command.at_step:,}"
        self.progress.doing(activity)

    def _on_answer(self, leader: int, message: WireMessage) -> None:
        match message:
            case Steps():
                self._on_steps(message.result())
            case Evaluated():
                step = self._command(message).at_step
                self._on_evaluation(self._evaluation.on_evaluated(message.result(), step))
            case Decoded():
                self._on_evaluation(self._evaluation.on_decoded(leader, message))
            case StateBegin() | StatePart() | StateEnd():
                self.checkpoints.on_message(message)
            case Done():
                self._on_done(leader, message)
            case _:
                raise ImpossibleAnswerError(f"{message.kind!r}, which the training loop does not know")

    def _command(self, answer: Evaluated | Done) -> _Command:
        return next(command for command in self._queued if command.message.sequence == answer.sequence)

    def _on_done(self, leader: int, message: Done) -> None:
        command = self._command(message)
        if leader == 0 and command.message.kind != "train":
            self._require_reported_before(command)
            self._workers.on_quiescent()
        command.waiting -= 1
        seconds, drained = message.seconds, message.drain_seconds
        training = seconds if command.message.kind == "train" else drained
        self.outcome.train_seconds_by_leader[leader] += training
        if leader == 0:
            self.outcome.train_seconds += training
            if command.message.kind == "evaluate":
                self.outcome.eval_seconds += seconds - drained
            if command.message.kind == "state":
                self.outcome.checkpoint_seconds += seconds - drained
                self.checkpoints.on_copied(command.message.sequence, seconds - drained, self.outcome.last_evaluation)
        if command.message.kind == "decode":
            self._on_decode_done(command.at_step, leader, seconds - drained)
        if command.waiting == 0:
            self._queued.remove(command)

    def _on_decode_done(self, at_step: int, leader: int, seconds: float) -> None:
        """Add the slowest leading task's time: tasks translate independently and all wait for it."""
        by_leader = self._decoding.setdefault((self._trained, at_step), [0.0] * len(self.tasks))
        before = max(by_leader)
        by_leader[leader] += seconds
        more = max(by_leader) - before
        if self._trained:
            self.outcome.translate_seconds += more
        else:
            self.outcome.eval_seconds += more
        if len(self._decoding) > 2:  # earlier evaluations have no pending work
            del self._decoding[next(iter(self._decoding))]

    def _require_reported_before(self, command: _Command) -> None:
        """Raise ImpossibleAnswerError for unreported updates before a command other than ``train``."""
        if not self._plans.reported_before(command.at_step):
            raise ImpossibleAnswerError(f"{command.message.kind!r} is done, and updates that come before it were not reported")

    def _on_steps(self, result: StepResult) -> None:
        now = self.clock()
        plan = self._plans.take(result)
        self.outcome.updates_reported += result.count
        if result.profiled_seconds is None:
            self._measure_rate(now)
        else:  # profiled updates are slow and would shorten the next plans
            self._rate_since = (self.outcome.updates_reported, now)
        offset = result.first_step - plan.first_step
        rates = plan.learning_rates[offset : offset + result.count]
        if result.worker is not None:
            self._workers.on_updates(result.worker)
            self.outcome.seconds_by_worker[result.worker] = self.outcome.seconds_by_worker.get(result.worker, 0.0) + result.seconds
        self.recorder.step(step_record(result, plan.epoch, now, rates))
        while self.outcome.updates_reported >= self.epochs.first_step_in_epoch(self._epochs_ended + 1):
            self._epochs_ended += 1
            self.recorder.event("epoch_ended", epoch=self._epochs_ended)
        self._losses.trained(result.first_step, result.losses, rates)
        left = (self.triggers.total - self.outcome.updates_reported) / self._rate if self._rate else None
        step = self.outcome.updates_reported
        self.progress.update(step, float(result.losses[-1]), self._rate, left, plan.epoch)

    def _measure_rate(self, now: float) -> None:
        since_step, since = self._rate_since
        if now - since >= PLAN_SECONDS / 4:
            fresh = (self.outcome.updates_reported - since_step) / (now - since)
            self._rate = fresh if self._rate is None else 0.5 * (self._rate + fresh)
            self._rate_since = (self.outcome.updates_reported, now)

    def _translate_all(self) -> Iterator[bool]:
        """Translate the whole test split, as in `_train`; an interrupt stops between two orders."""
        for message in self._evaluation.begin_last("test"):
            if not self._stop_requested:
                self._send(message, 0)
            while len(self._queued) >= MAX_TRANSLATIONS_QUEUED or (self._stop_requested and self._queued):
                yield True
        while self._queued:
            yield True
        self.progress.doing(None)
        if self._evaluation.translating:
            self.recorder.event("translation_interrupted", step=self._next_step, split="test")
            self.progress.message("the run is complete, but its test sentences were not all translated (interrupted by the user)")

    def _on_all_translated(self, translated: AllTranslated) -> None:
        figures, headline = translated.figures, self.objective.infos[0]
        self.recorder.event(
            "translated",
            step=self._next_step,
            split="test",
            sentences=translated.sentences,
            signature=translated.signature,
            seconds=translated.seconds,
            **figures,
        )
        self._report_without_numbers(translated.without_numbers, self._next_step)
        shown = f"{headline.label} {figure_text(headline.name, figures[headline.name])}" if headline.name in figures else ""
        self.progress.message(f"all {translated.sentences:,} test sentences translated: {shown} ({translated.signature})")

    def _report_without_numbers(self, sentences: int, step: int) -> None:
        if sentences:
            self.recorder.event("translations_without_numbers", step=step, split="test", sentences=sentences)
            subject = "sentence has" if sentences == 1 else "sentences have"
            self.progress.message(f"{sentences:,} {subject} an empty translation, as the model's output for it is not finite")

    def _on_evaluation(self, whole: WholeEvaluation | AllTranslated | None) -> None:
        if isinstance(whole, AllTranslated):
            self._on_all_translated(whole)
        if not isinstance(whole, WholeEvaluation):
            return
        result, step = whole.result, whole.step
        self._report_without_numbers(whole.without_numbers, step)
        expected = self.data.sizes[result.split]
        if result.examples != expected:
            raise RunFailedError(f"the evaluation counted {result.examples} examples of split {result.split!r}, which has {expected}")
        epoch = self.epochs.epochs(step)
        figures = self.objective.figures(result.sums)
        loss = figures.pop(LOSS.name)
        now = self.clock()
        record = EvalRecord(step, epoch, now, result.seconds, result.split, result.examples, loss, figures, result.updates_applied)
        self.outcome.last_evaluation = record
        self.outcome.updates_applied = result.updates_applied
        self.recorder.evaluation(record)
        self.progress.evaluation(record)
        self._losses.evaluated(step, result.split, record.loss)
        self.checkpoints.evaluated(record)
        self._stopping = self.patience.evaluated(record) or self._stopping
        if self.target is not None and self.target.reached(record.figure(self.target.metric)) and not self.outcome.target_reached:
            self.outcome.target_reached = True
            self.outcome.time_to_target_seconds = now
            self._stopping = True
            self.recorder.event("target_reached", target=self.job.until, step=step)
            self.progress.message(f"stopping: target reached (--until {self.job.until})")
