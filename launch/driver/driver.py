"""The driver: the process of ``trainer run``.

It owns nodes, records, clock, signals and restart policy; tasks and their training belong to an `Attempt`. What the run does now is a
`RunPhase`, each with one method of `Driver` that returns the next.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ...checkpoint import CHECKPOINTS
from ...core.console import note, note_in_handler
from ...core.errors import DiskError, InterruptedRunError, ResumableRunError, RunFailedError, TrainerError, UsageError
from ...core.job import Job
from ...data.base import TextFeatures
from ...engine.epochs import EpochIndex
from ...engine.policies import Triggers
from ...engine.progress import Progress
from ...monitor.host import provenance
from ...records.store.run_directory import RunReader, RunState
from ...records.store.schema import Clock
from ...records.store.vocabulary import VOCABULARY, write_vocabulary
from ...records.summary import DriverFacts
from ..launchers.base import Launcher
from ..launchers.machine_checks import EndingSignals
from .attempt import Attempt
from .cluster_setup import driver_node, infer_isolation, machine_id
from .first_failure import SilentTaskError
from .nodes import Nodes, ReportHandlers
from .notify import Notifier
from .outcome import Outcome, Shutdown, add_to_first_line, finalize_records, mark_resumable, resume_hint, with_newest_checkpoint
from .position import Resumption, RunPosition
from .recorder import RunRecorder
from .restart_policy import Decision, RestartPolicy, RestartTask, failure_from_error, policy_for_job
from .restarts import RestartCoordinator
from .training_job import TrainingJob


@dataclass(frozen=True)
class Invocation:
    """The user's command line, and the source of each value of the job."""

    command: Sequence[str]
    sources: Mapping[str, str]


class RunPhase(Enum):
    """What a run does now."""

    CONNECTING = "connecting"  # to the agents of its nodes
    STARTING = "starting"  # the tasks of an attempt
    TRAINING = "training"  # until the end or an interrupt
    TRANSLATING = "translating"  # the test split, by the trained model
    RESTARTING = "restarting"  # a failed task or all of them, as the policy decides
    RESIZING = "resizing"  # to more nodes
    RESUMING = "resuming"  # from the newest checkpoint, after a failure
    COMPLETING = "completing"  # the last samples, and the calibration
    ENDING = "ending"


class Driver:
    """Runs one job."""

    def __init__(
        self,
        job: Job,
        invocation: Invocation,
        progress: Progress,
        resumption: Resumption | None = None,
        policy: RestartPolicy | None = None,  # by default the job's
        notifier: Notifier | None = None,
        *,
        starts_again: bool = False,  # an external launcher restarts the nodes after a loss (`Membership`)
    ) -> None:
        self.job = job
        self._sources = dict(invocation.sources)
        self._progress = progress
        self._command = job.recorded_command(invocation.command)
        self._resumption = resumption
        self._policy = policy or policy_for_job(job)
        self._notices = notifier or Notifier({}, note)
        self._notices.begin(job.name, self._done)
        self._starts_again = starts_again
        self._position = RunPosition(job.nodes, self._command, resumption)
        self._phase = RunPhase.CONNECTING
        self._shutdown = Shutdown()
        self._attempts: list[Attempt] = []
        self._interrupts: list[Callable[[], None]] = []
        self._signals = EndingSignals(self._end_gracefully, self._end_immediately)
        self._recording: RunRecorder
        self._launcher: Launcher
        self._nodes: Nodes
        self._restarts: RestartCoordinator
        self._failure: TrainerError  # the newest, of an attempt
        self._may_continue = False  # its attempt, by the restart of one task
        self._training: TrainingJob  # on all nodes of the run
        self._next_training: TrainingJob  # of the next attempt
        self._deadline = math.inf  # for the start of its tasks

    @property
    def path(self) -> Path:
        """The run directory, once `execute` has been called."""
        return self._recording.path

    def execute(self, launcher: Launcher) -> dict[str, Any]:
        """Run the job and return the summary, or raise the failure; notify the end in both cases."""
        outcome = Outcome.from_failure(None)
        try:
            return self._executed(launcher)
        except BaseException as error:
            outcome = Outcome.from_failure(error)
            raise
        finally:
            self._notices.ended(outcome.state, outcome.cause, outcome.task, outcome.exit_code)

    def _executed(self, launcher: Launcher) -> dict[str, Any]:
        self._launcher = launcher
        self._training = self._next_training = TrainingJob.from_job(self.job, begins=self._resumption is None)
        if self._training.initial is not None:
            self._position.begin_with(self._training.initial)
        began = time.monotonic()
        was_checked = self._training.check_translation(self._progress.message)
        check_seconds = time.monotonic() - began
        self._recording = RunRecorder(self._training.requested, self._progress, self._resumption.path if self._resumption else None)
        self._notices.has_directory(self.path, self._recording.event)
        if was_checked:
            self._recording.event("model_checked", seconds=check_seconds)
        if self._resumption is not None:
            self._position.status_to_restore = RunReader(self._resumption.path).status()
        try:
            self._begin_records()
        except DiskError:
            self._recording.close()
            if self._resumption is None:
                shutil.rmtree(self.path)
            raise
        self._interrupts.append(launcher.interrupt)
        with self._signals:
            return self._supervised()

    def _begin_records(self) -> None:
        with_git = ThreadPoolExecutor(max_workers=1, thread_name_prefix="provenance")  # git runs while the nodes start
        self._code = with_git.submit(provenance, Path())  # also works if the working directory was removed
        with_git.shutdown(wait=False)
        self._position.write(partial(self._recording.writer.write_job, self._described()))
        self._recording.writer.write_status("starting")
        if self.job.mllog and self._resumption is None:
            self._recording.add_mllog(self._training.data.info.sizes)
        if self._training.data.made_seconds:
            self._recording.event("dataset_made", seconds=self._training.data.made_seconds)
        self._report_skipped_files()
        if (too_long := self._training.too_long) is not None:
            self._progress.message(too_long)

    def _report_skipped_files(self) -> None:
        files = self._training.data.left_out
        if not files:
            return
        self._recording.event("files_left_out", count=len(files), files=list(files))
        if isinstance(self._training.data.info.features, TextFeatures):
            self._progress.message(f"skipped in {self.job.data}: {'; '.join(files)}")
            return
        what = "1 file was" if len(files) == 1 else f"{len(files):,} files were"
        self._progress.message(f"{what} no usable picture and skipped in {self.job.data}; {self.path / 'events.jsonl'} names them")

    def _described(self) -> dict[str, Any]:
        return {
            **self._training.document,
            "total_steps": Triggers(self.job, EpochIndex(self._training.sampler, self._position.first.start.cursor)).total,
            "sources": self._sources,
            "command": self._command,
            "segments": list(self._position.segments),
        }

    def _supervised(self) -> dict[str, Any]:
        shutdown = self._shutdown
        shutdown.defer(self._launcher.close)
        shutdown.defer(lambda: self._launcher.ended(shutdown.outcome.exit_code))
        try:
            while self._phase is not RunPhase.ENDING:
                self._phase = self._advance()
        except InterruptedRunError as error:
            shutdown.set_failure(error if self._attempts else with_newest_checkpoint(error, self.job, self.path))
        except BaseException as error:  # noqa: BLE001 — recorded in the run directory, then raised again below
            shutdown.set_failure(error)
        self._phase = RunPhase.ENDING
        self._recording.ending()
        shutdown.run(self._end_clock)
        shutdown.run_deferred()
        finalize_records(self._recording, shutdown, self._summary, self._position.status_to_restore)
        return self._result(shutdown.failure)

    def _result(self, ended_by: BaseException | None) -> dict[str, Any]:
        failure = RunFailedError(str(ended_by)) if isinstance(ended_by, DiskError) else ended_by
        if isinstance(failure, UsageError) and self._newest_trained is None and self._resumption is None:
            shutil.rmtree(self.path)  # nothing was trained
        if isinstance(failure, RunFailedError | InterruptedRunError) and self._recording.writer.there:
            failure.run = self.path
        if failure is not None:
            raise failure
        summary = RunReader(self.path).summary()
        if summary is None:
            raise RuntimeError("a run that succeeded has no summary")
        return summary

    def _advance(self) -> RunPhase:
        """Do what the phase is for; return the next one. Raises the error that ends the run."""
        steps = {
            RunPhase.CONNECTING: self._connect,
            RunPhase.STARTING: self._start,
            RunPhase.TRAINING: self._train,
            RunPhase.TRANSLATING: self._translate,
            RunPhase.RESTARTING: self._restart,
            RunPhase.RESIZING: self._resize,
            RunPhase.RESUMING: self._resume,
            RunPhase.COMPLETING: self._complete,
        }
        try:
            return steps[self._phase]()
        except TrainerError as error:
            if self._phase in (RunPhase.STARTING, RunPhase.TRAINING, RunPhase.TRANSLATING):
                self._failure, self._may_continue = error, self._attempts[-1].began
                return RunPhase.RESTARTING
            if self._phase is RunPhase.RESTARTING and isinstance(error, RunFailedError | InterruptedRunError):
                raise self._with_resume_hint(error) from error.__cause__
            raise

    def _connect(self) -> RunPhase:
        recording, shutdown = self._recording, self._shutdown
        channels = self._launcher.start()
        self._deadline = time.monotonic() + self.job.start_timeout
        leaving = self._signals.ask if self._starts_again else None
        nodes = self._nodes = Nodes(
            channels,
            ReportHandlers(recording.sample, recording.log, recording.trace, leaving),
            self._launcher.check,
            node_timeout_seconds=self.job.node_timeout,
            replace=self._launcher.replace,
            on_useless=self._progress.message,
        )
        shutdown.defer(lambda: nodes.finish(shutdown.outcome.exit_code))
        if self._starts_again:
            shutdown.defer(self._leave_to_starter)
        shutdown.defer(lambda: shutdown.set_failure(recording.violation or nodes.violation or recording.refused))
        shutdown.defer(lambda: self._end_attempts(graceful=shutdown.failure is None))
        self._interrupts.append(nodes.interrupt)
        if self._signals.interrupted:
            raise InterruptedRunError("interrupted by the user")
        hosts = nodes.greet(self._deadline - time.monotonic())
        infer_isolation(nodes.channels, hosts)
        self._position.write(partial(recording.writer.write_env, hosts, self._code.result()))
        self._restarts = RestartCoordinator(self._policy, self._training, nodes, recording)
        return RunPhase.STARTING

    def _start(self) -> RunPhase:
        if self._attempts:
            self._deadline = time.monotonic() + self.job.start_timeout
        recording, training, origin = self._recording, self._next_training, self._position.origin
        attempt = Attempt(training, self._nodes, recording, origin, self._spent, self._notices.restarted, self._compiled_before)
        self._attempts.append(attempt)
        self._nodes.when_more_answer = attempt.pause
        hosts = self._nodes.hosts
        attempt.form_cluster(hosts, self._deadline)
        self._write_job(attempt)
        recording.expect(attempt.tasks.node_of, driver_node(training.places, hosts))
        attempt.start_tasks(self._deadline)
        recording.event("tasks_started", tasks=list(attempt.tasks.node_of))
        if self._resumption is None:
            recording.add_loggers(self._command)
        else:
            recording.load_loggers()
        attempt.await_ready(self._deadline)
        if self.job.compile == "auto":
            self._write_job(attempt)
        attempt.keep_spares()
        recording.event("cluster_ready")
        attempt.load_origin()
        self._begin_training(attempt)
        return RunPhase.TRAINING

    @property
    def _compiled_before(self) -> bool | None:
        """Whether steps are compiled; None if ``--compile auto`` has yet to choose."""
        if self.job.compile != "auto":
            return self.job.compile == "on"
        chosen = [attempt.compiled for attempt in self._attempts if attempt.compiled is not None]
        if chosen or self._resumption is None:
            return chosen[-1] if chosen else None
        return self._resumption.compiled

    def _write_job(self, attempt: Attempt) -> None:
        chosen = {} if self.job.compile != "auto" or attempt.compiled is None else {"compiled": attempt.compiled}
        described = {**self._described(), "total_steps": attempt.loop.triggers.total, **attempt.cluster, **chosen}
        self._position.write(partial(self._recording.writer.write_job, described))
        if VOCABULARY in self._training.data.attachments:
            self._position.write(partial(write_vocabulary, self.path, self._training.data.attachment(VOCABULARY)))

    def _begin_training(self, attempt: Attempt) -> None:
        """Begin to train; the run clock lasts from the first attempt's start to the last one's end."""
        recording, position, places = self._recording, self._position, attempt.training.places
        restarts = self._newest_trained is not None
        before = recording.run_seconds if restarts else position.first.run_seconds
        if restarts or self._resumption is not None:
            self._take_back(before)
        nodes: dict[str, Any] = {}
        if position.begin_segment(places, before):
            nodes = {"nodes": list(places)}
            recording.begin_segment(before)
            self._write_job(attempt)
        recording.writer.write_status("running")
        if self.job.monitor:
            attempt.tasks.sample_now()
        recording.start_clock(before)
        if restarts:
            lost = max(0.0, before - position.origin.run_seconds)
            recording.event("run_restarted", **position.origin.place, **nodes, seconds_lost=lost)
            failure = Outcome.from_failure(self._failure)
            self._notices.restarted(failure.cause or "", failure.task)
        else:
            recording.event("run_started" if self._resumption is None else "run_resumed", **position.resumed, **nodes)
            self._progress.start(self.job, attempt.loop.objective.infos, attempt.loop.triggers.total)

    def _take_back(self, run_seconds: float) -> None:
        recording, origin = self._recording, self._position.origin
        origin.remove_later_checkpoints(self.path)  # first, so that records never end before the newest checkpoint
        recording.rewind(origin.start.cursor.step, run_seconds)
        self._position.commit()
        recording.add_loggers(self._command, run_seconds)
        if self.job.mllog:
            recording.add_mllog(self._training.data.info.sizes, run_seconds)
        for error in origin.damaged:
            recording.event("checkpoint_damaged", path=f"{CHECKPOINTS}/{error.path.name}", file=error.file, problem=error.problem)

    def _train(self) -> RunPhase:
        attempt = self._attempts[-1]
        attempt.train()
        if attempt.loop.only_translates:
            return RunPhase.TRANSLATING
        paused = attempt.totals.interrupted and not self._signals.interrupted
        return RunPhase.RESIZING if paused else RunPhase.COMPLETING

    def _translate(self) -> RunPhase:
        self._attempts[-1].translate()
        return RunPhase.COMPLETING

    def _restart(self) -> RunPhase:
        """Do what the policy decides about a failure. Raises the failure that ends the run."""
        attempt, error = self._attempts[-1], self._failure
        decision = self._restart_task(attempt, error)
        if isinstance(decision, RestartTask) or isinstance(error, SilentTaskError):
            return RunPhase.TRAINING
        self._may_continue = False
        if attempt.began:
            error = self._failure = attempt.with_task_states(error)
        failure = failure_from_error(error, attempt.totals.updates_reported)
        if failure is None or self._nodes.violation is not None:  # no message of the node can be trusted
            raise error
        restart = self._restarts.expect_restart(decision or self._restarts.decide(failure), failure, error)
        if self._signals.interrupted:  # during training, before a checkpoint was saved
            raise InterruptedRunError(f"interrupted by the user, before a failure: {failure.cause}") from error
        self._next_training = self._restarts.restart(restart, failure, attempt, error)
        return RunPhase.RESUMING if attempt.began else RunPhase.STARTING

    def _restart_task(self, attempt: Attempt, error: TrainerError) -> Decision | None:
        """Return the policy's decision on a task that can restart alone; else None.

        After `RestartTask` it restarts.
        """
        failure = failure_from_error(error, attempt.totals.updates_reported, rejoins=True)
        if failure is None or self._nodes.violation is not None or not (attempt.began and attempt.tasks.can_replace(failure.task)):
            return None
        decision = self._restarts.decide(failure)
        if isinstance(decision, RestartTask):
            attempt.restart_task(failure, decision.after_seconds)
        return decision

    def _with_resume_hint(self, error: RunFailedError | InterruptedRunError) -> RunFailedError | InterruptedRunError:
        """Add to the error after a failed attempt what the run can resume from."""
        if isinstance(error, InterruptedRunError) and not (error is self._failure and self._attempts[-1].began):
            error = with_newest_checkpoint(error, self.job, self.path)
        if not isinstance(error, ResumableRunError) and self._newest_trained is not None:
            add_to_first_line(error, resume_hint(self.job, self.path))
        return error

    def _resize(self) -> RunPhase:
        self._next_training = self._restarts.resize(self._attempts[-1])
        self._position.go_back(self.path)
        return RunPhase.STARTING

    def _resume(self) -> RunPhase:
        self._position.go_back(self.path, self._failure)
        return RunPhase.STARTING

    def _complete(self) -> RunPhase:
        recording, attempt = self._recording, self._attempts[-1]
        recording.stop_clock()
        recording.event("run_ended")
        if self.job.monitor:
            with self._nodes.interrupts_deferred():  # the run is complete: an interrupt only ends its calibration
                attempt.tasks.sample_now()
        if attempt.totals.interrupted:
            hint = resume_hint(self.job, self.path)
            if attempt.saver.newest is None:
                raise InterruptedRunError(f"interrupted by the user; the last checkpoint could not be saved; {hint}")
            raise ResumableRunError(f"interrupted by the user; {hint}")
        if self.job.calibrate:
            attempt.calibrate()
        if attempt.saver.unsaved is not None:
            hint = resume_hint(self.job, self.path)
            raise RunFailedError(f"the last checkpoint, {attempt.saver.unsaved}, could not be saved; {hint}")
        return RunPhase.ENDING

    @property
    def _newest_trained(self) -> Attempt | None:
        return next((attempt for attempt in reversed(self._attempts) if attempt.began), None)

    def _end_clock(self) -> None:
        self._recording.flush_pending(self._position.first.run_seconds)
        self._recording.stop_clock()

    def _end_attempts(self, *, graceful: bool) -> None:
        for attempt in self._attempts:
            attempt.stop(graceful=graceful)

    def _leave_to_starter(self) -> None:
        if self._nodes.violation is None:  # a restart would break again
            mark_resumable(self._shutdown.failure, saved=any(attempt.saver.newest for attempt in self._attempts))

    def _summary(self, state: RunState) -> dict[str, Any] | None:
        attempt = self._newest_trained
        if attempt is None:
            return None
        spent = self._spent(attempt)
        clock = Clock(
            run_seconds=self._recording.run_seconds,
            total_seconds=self._position.total_seconds + time.time() - self._recording.began,
            translate_seconds=attempt.totals.translate_seconds,
            earlier=self._position.earlier,
            **{**spent, "train_seconds_by_node": tuple(spent["train_seconds_by_node"])},
        )
        facts = DriverFacts(
            nodes_sharing_cores=attempt.nodes_sharing_cores,
            precision_used=attempt.precision_used,
            device_used=attempt.device_used,
            compiled=attempt.compiled,
            machines=[machine_id(host) for host in self._nodes.hosts],
        )
        return self._training.summary(self.path, clock, state, attempt.totals, facts)

    def _done(self) -> tuple[int, float]:
        if (attempt := self._newest_trained) is not None:
            return attempt.totals.updates_reported, self._recording.run_seconds
        return self._position.first.start.cursor.step, self._position.first.run_seconds

    def _spent(self, attempt: Attempt) -> dict[str, Any]:
        totals = attempt.totals
        return {
            "init_seconds": self._position.init_seconds + self._recording.init_seconds,
            "train_seconds": totals.train_seconds,
            "eval_seconds": totals.eval_seconds,
            "checkpoint_seconds": totals.checkpoint_seconds,
            "train_seconds_by_node": attempt.train_seconds_by_node,
        }

    def _end_gracefully(self) -> None:
        translates = self._phase is RunPhase.TRANSLATING
        if (translates or self._phase is RunPhase.TRAINING) and self._attempts[-1].interrupt():
            what = "ending the translation; the run is complete" if translates else "saving a checkpoint and ending the run"
            note_in_handler(f"trainer: {what} (once more to end it at once)")
            return
        if self._phase is RunPhase.RESTARTING and self._may_continue and self._attempts[-1].interrupt_once_training():
            note_in_handler("trainer: saving a checkpoint and ending the run, if training continues (once more to end it at once)")
            return
        note_in_handler("trainer: ending the run (once more to end it at once)")
        for interrupt in self._interrupts:
            interrupt()

    def _end_immediately(self) -> NoReturn:
        self._launcher.kill()
        cause = "interrupted twice by the user"
        note_in_handler(f"error: {cause}; ended at once; {resume_hint(self.job, self.path)}")
        code = InterruptedRunError.exit_code
        try:
            self._recording.writer.write_status("interrupted", cause=cause, exit_code=code)
        except DiskError as error:
            note_in_handler(f"trainer: the status (interrupted, exit code {code}) could not be written: {error}")
        finally:
            os._exit(code)  # agents end with this process, and tasks with their agents


def run(
    job: Job,
    invocation: Invocation,
    *,
    progress: Progress,
    launcher: Launcher,
    resumption: Resumption | None = None,
    policy: RestartPolicy | None = None,
    notifier: Notifier | None = None,
    starts_again: bool = False,
) -> tuple[Path, dict[str, Any]]:
    """Run or resume a job with a `Driver`; return the run directory and the summary."""
    driver = Driver(job, invocation, progress, resumption, policy, notifier, starts_again=starts_again)
    summary = driver.execute(launcher)
    return driver.path, summary
