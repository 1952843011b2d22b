"""The driver: the process of ``trainer run``.

It owns nodes, records, clock, signals and restart policy; tasks and their training belong to an `Attempt`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ...checkpoint import CHECKPOINTS
from ...core.console import note
from ...core.errors import DiskError, InterruptedRunError, ResumableRunError, RunFailedError, TrainerError, UsageError
from ...core.job import Job
from ...data.base import TextFeatures
from ...engine.progress import Progress
from ...monitor.host import provenance
from ...records.store.run_directory import RunReader, RunState
from ...records.store.schema import Clock
from ...records.store.vocabulary import VOCABULARY, write_vocabulary
from ...records.summary import DriverFacts
from ..launchers.base import Launcher
from ..launchers.machine_checks import EndingSignals
from .attempt import Attempt, Restarts
from .cluster_setup import Hosts, infer_isolation, machine_of, node_beside_driver
from .nodes import Nodes, ReportHandlers
from .notify import Notifier
from .origin import Origin, newest_origin
from .outcome import Ending, Outcome, finalize_records, leave_to_starter, resume_hint, with_newest_checkpoint
from .recorder import Recording
from .restart_policy import RestartPolicy, policy_of
from .resumption import Resumption
from .segments import DeferredWrites, ResizedSegments, Segments, total_steps
from .training_job import TrainingJob


@dataclass(frozen=True)
class Invocation:
    """The user's command line, and the source of each value of the job."""

    command: Sequence[str]
    sources: Mapping[str, str]


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
        self._policy = policy or policy_of(job)
        self._notices = notifier or Notifier({}, note)
        self._notices.begin(job.name, self._done)
        self._starts_again = starts_again
        self._segments = Segments(resumption, self._command)
        self._resized = ResizedSegments(job.nodes, self._command)
        self._documents = DeferredWrites()
        self._attempts: list[Attempt] = []
        self._interrupts: list[Callable[[], None]] = []
        self._signals = EndingSignals(self._end_in_good_order, self._end_at_once)
        self._hosts: Hosts | None = None
        self._failure = Outcome.of(None)
        self._recording: Recording
        self._launcher: Launcher
        self._training: TrainingJob

    @property
    def path(self) -> Path:
        """The run directory, once `execute` has been called."""
        return self._recording.path

    def execute(self, launcher: Launcher) -> dict[str, Any]:
        """Run the job and return the summary, or raise the failure; notify the end in both cases."""
        outcome = Outcome.of(None)
        try:
            return self._executed(launcher)
        except BaseException as error:
            outcome = Outcome.of(error)
            raise
        finally:
            self._notices.ended(outcome.state, outcome.cause, outcome.task, outcome.exit_code)

    def _executed(self, launcher: Launcher) -> dict[str, Any]:
        self._launcher = launcher
        self._training = TrainingJob.of(self.job)
        self._recording = Recording(self.job, self._progress, self._resumption.path if self._resumption else None)
        self._notices.has_directory(self.path, self._recording.event)
        if self._resumption is not None:
            self._documents = DeferredWrites(RunReader(self._resumption.path).status())
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
        self._documents.make(partial(self._recording.writer.write_job, self._described()))
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
            "total_steps": total_steps(self.job, self._training.data.info.sizes["train"], self._resumption, self._training.lengths),
            "sources": self._sources,
            "command": self._command,
            "segments": [*self._segments.described, *self._resized.described],
        }

    def _supervised(self) -> dict[str, Any]:
        ending = Ending()
        ending.later(self._launcher.close)
        ending.later(lambda: self._launcher.ended(ending.outcome.exit_code))
        try:
            self._run(*self._meet_nodes(ending))
        except InterruptedRunError as error:
            ending.blame(error if self._attempts else with_newest_checkpoint(error, self.job, self.path))
        except BaseException as error:  # noqa: BLE001 — recorded in the run directory, then raised again below
            ending.blame(error)
        self._recording.ending()
        ending.do(self._end_clock)
        ending.run_steps()
        finalize_records(self._recording, ending, self._summary, self._documents.status_to_restore)
        failure = RunFailedError(str(ending.failure)) if isinstance(ending.failure, DiskError) else ending.failure
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

    def _meet_nodes(self, ending: Ending) -> tuple[Nodes, Hosts, float]:
        recording = self._recording
        channels = self._launcher.start()
        deadline = time.monotonic() + self.job.start_timeout
        leaving = self._signals.ask if self._starts_again else None
        nodes = Nodes(
            channels,
            ReportHandlers(recording.sample, recording.log, recording.trace, leaving),
            self._launcher.check,
            node_timeout_seconds=self.job.node_timeout,
            replace=self._launcher.replace,
            on_useless=self._progress.message,
        )
        ending.later(lambda: nodes.finish(ending.outcome.exit_code))
        if self._starts_again:
            ending.later(lambda: self._leave_to_starter(ending, nodes))
        ending.later(lambda: ending.blame(recording.refused))
        ending.later(lambda: ending.blame(recording.violation or nodes.violation))
        ending.later(lambda: self._end_attempts(politely=ending.failure is None))
        self._interrupts.append(nodes.interrupt)
        if self._signals.interrupted:
            raise InterruptedRunError("interrupted by the user")
        hosts = nodes.greet(deadline - time.monotonic())
        infer_isolation(nodes.channels, hosts)
        self._hosts = hosts
        self._documents.make(partial(recording.writer.write_env, hosts, self._code.result()))
        return nodes, hosts, deadline

    def _run(self, nodes: Nodes, hosts: Hosts, deadline: float) -> None:
        first = origin = self._resumption.origin if self._resumption else Origin()
        restarts = Restarts(self._policy, self._training, nodes, self._recording, lambda: self._signals.interrupted)
        training = self._training
        while True:
            notify, compiled = self._notices.restarted, self._compiled_before
            attempt = Attempt(training, nodes, self._recording, origin, self._spent, restarts, notify, compiled)
            self._attempts.append(attempt)
            try:
                self._start(attempt, hosts, deadline)
                nodes.when_more_answer = attempt.regroup
                self._train(attempt)
                if not attempt.regrouped or self._signals.interrupted:
                    break
                training = restarts.regroup(attempt)
                origin = self._newest_origin(first)
            except TrainerError as error:
                self._failure = Outcome.of(error)
                training = restarts.prepare(error, attempt)
                if attempt.began:
                    origin = self._newest_origin(first, error)
            deadline = time.monotonic() + self.job.start_timeout
        self._finish(attempt, nodes)

    def _newest_origin(self, first: Origin, failure: TrainerError | None = None) -> Origin:
        try:
            return newest_origin(self.path, self.job, self._training.model, first)
        except UsageError as error:
            before = "" if failure is None else f"{failure}; and "
            raise RunFailedError(f"{before}the run cannot go on: {error}", getattr(failure, "task", None)) from failure or error

    def _start(self, attempt: Attempt, hosts: Hosts, deadline: float) -> None:
        recording = self._recording
        attempt.form_cluster(hosts, deadline)
        self._write_job(attempt)
        recording.expect(attempt.tasks.node_of, node_beside_driver(attempt.training.places, hosts))
        attempt.start_tasks(deadline)
        recording.event("tasks_started", tasks=list(attempt.tasks.node_of))
        if self._resumption is None:
            recording.add_followers(self._command)
        else:
            recording.load_followers()
        attempt.await_ready(deadline)
        if self.job.compile == "auto":
            self._write_job(attempt)
        attempt.keep_spares()
        recording.event("cluster_ready")

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
        self._documents.make(partial(self._recording.writer.write_job, described))
        if VOCABULARY in self._training.data.attachments:
            self._documents.make(partial(write_vocabulary, self.path, self._training.data.attachment(VOCABULARY)))

    def _train(self, attempt: Attempt) -> None:
        """Train; the run clock lasts from the first attempt's start to the last one's end."""
        recording, resumption = self._recording, self._resumption
        attempt.load_origin()
        restarts = self._newest_trained is not None
        before = recording.run_seconds if restarts else resumption.origin.run_seconds if resumption else 0.0
        if restarts or resumption is not None:
            self._take_back(attempt.origin, before)
        nodes = self._begin_segment(attempt, before)
        recording.writer.write_status("running")
        if self.job.monitor:
            attempt.tasks.sample_now()
        recording.start_clock(before)
        if restarts:
            lost = max(0.0, before - attempt.origin.run_seconds)
            recording.event("run_restarted", **attempt.origin.place, **nodes, seconds_lost=lost)
            self._notices.restarted(self._failure.cause or "", self._failure.task)
        else:
            recording.event("run_started" if resumption is None else "run_resumed", **self._segments.event, **nodes)
            self._progress.start(self.job, attempt.loop.objective.infos, attempt.loop.triggers.total)
        attempt.train()

    def _begin_segment(self, attempt: Attempt, run_seconds: float) -> dict[str, Any]:
        places = attempt.training.places
        if self._resized.goes_on(places, attempt.origin):
            return {}
        self._resized.begin(places, attempt.origin, run_seconds)
        self._recording.begin_segment(run_seconds)
        self._write_job(attempt)
        return {"nodes": list(places)}

    def _take_back(self, origin: Origin, run_seconds: float) -> None:
        recording = self._recording
        origin.remove_later_checkpoints(self.path)  # first, so that records never end before the newest checkpoint
        recording.rewind(origin.start.cursor.step, run_seconds)
        self._documents.commit()
        recording.add_followers(self._command, run_seconds)
        if self.job.mllog:
            recording.add_mllog(self._training.data.info.sizes, run_seconds)
        for error in origin.damaged:
            recording.event("checkpoint_damaged", path=f"{CHECKPOINTS}/{error.path.name}", file=error.file, problem=error.problem)

    def _finish(self, attempt: Attempt, nodes: Nodes) -> None:
        recording = self._recording
        recording.stop_clock()
        recording.event("run_ended")
        if self.job.monitor:
            with nodes.interrupts_deferred():  # the run is complete: an interrupt only ends its calibration
                attempt.tasks.sample_now()
        if attempt.totals.interrupted:
            kept = resume_hint(self.job, self.path)
            if attempt.saver.newest is None:
                raise InterruptedRunError(f"interrupted by the user; the last checkpoint could not be saved; {kept}")
            raise ResumableRunError(f"interrupted by the user; {kept}")
        if self.job.calibrate:
            attempt.calibrate()
        if attempt.saver.unsaved is not None:
            kept = resume_hint(self.job, self.path)
            raise RunFailedError(f"the last checkpoint, {attempt.saver.unsaved}, could not be saved; {kept}")

    @property
    def _newest_trained(self) -> Attempt | None:
        return next((attempt for attempt in reversed(self._attempts) if attempt.began), None)

    def _end_clock(self) -> None:
        self._recording.flush_pending(self._resumption.origin.run_seconds if self._resumption else 0.0)
        self._recording.stop_clock()

    def _end_attempts(self, *, politely: bool) -> None:
        for attempt in self._attempts:
            attempt.end(politely=politely)

    def _leave_to_starter(self, ending: Ending, nodes: Nodes) -> None:
        if nodes.violation is None:  # a restart would break again
            leave_to_starter(ending.failure, saved=any(attempt.saver.newest for attempt in self._attempts))

    def _summary(self, state: RunState) -> dict[str, Any] | None:
        attempt = self._newest_trained
        if attempt is None:
            return None
        spent = self._spent(attempt)
        clock = Clock(
            run_seconds=self._recording.run_seconds,
            total_seconds=self._segments.total_before + time.time() - self._recording.began,
            translate_seconds=attempt.totals.translate_seconds,
            earlier=self._resized.earlier or self._segments.earlier,
            **{**spent, "train_seconds_by_node": tuple(spent["train_seconds_by_node"])},
        )
        machines = None if self._hosts is None else [machine_of(host) for host in self._hosts]
        facts = DriverFacts(
            nodes_sharing_cores=attempt.nodes_sharing_cores,
            precision_used=attempt.precision_used,
            device_used=attempt.device_used,
            compiled=attempt.compiled,
            machines=machines,
        )
        return self._training.summary(self.path, clock, state, attempt.totals, facts)

    def _done(self) -> tuple[int, float]:
        if (attempt := self._newest_trained) is not None:
            return attempt.totals.updates_reported, self._recording.run_seconds
        origin = self._resumption.origin if self._resumption else Origin()
        return origin.start.cursor.step, origin.run_seconds

    def _spent(self, attempt: Attempt) -> dict[str, Any]:
        totals = attempt.totals
        return {
            "init_seconds": self._segments.earlier_init_seconds + self._recording.init_seconds,
            "train_seconds": totals.train_seconds,
            "eval_seconds": totals.eval_seconds,
            "checkpoint_seconds": totals.checkpoint_seconds,
            "train_seconds_by_node": attempt.train_seconds_by_node,
        }

    def _end_in_good_order(self) -> None:
        stopping = next((attempt for attempt in self._attempts if attempt.interrupt()), None)
        if stopping is not None:
            translates = stopping.loop.only_translates
            what = "ending the translation; the run is complete" if translates else "saving a checkpoint and ending the run"
            note(f"trainer: {what} (once more to end it at once)")
            return
        note("trainer: ending the run (once more to end it at once)")
        for interrupt in self._interrupts:
            interrupt()

    def _end_at_once(self) -> NoReturn:
        self._launcher.kill()
        cause = "interrupted twice by the user"
        note(f"error: {cause}; ended at once; {resume_hint(self.job, self.path)}")
        code = InterruptedRunError.exit_code
        try:
            self._recording.writer.write_status("interrupted", cause=cause, exit_code=code)
        except DiskError as error:
            note(f"trainer: the status (interrupted, exit code {code}) could not be written: {error}")
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
