"""The driver: the process of the ``trainer run`` that the user typed. It takes a job from its start to its end, whatever the end is."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ...backends.capabilities import refuse_unsupported
from ...backends.loading import load_backend
from ...checkpoint import CHECKPOINTS, described_data
from ...core.cluster import TaskSpec
from ...core.errors import DiskError, InterruptedRunError, ResumableRunError, RunFailedError, StalledRunError, UsageError
from ...core.job import Job
from ...core.plugins import find, forward_plugin, load
from ...core.process import NOTICES
from ...core.units import Target
from ...core.untrusted.console import note
from ...data.augment import augmentation
from ...data.store.stored_dataset import StoredDataset, open_dataset
from ...engine.interfaces import TrainingTotals
from ...engine.loop import TrainingLoop
from ...engine.progress.base import Progress
from ...engine.protocol.messages import Message
from ...metrics.recorded import described_metrics
from ...models.base import ModelSpec
from ...records.schema import Clock
from ...records.store.run_directory import RunReader, RunState
from ...records.summary.summary import summarise
from ..launchers.base import Launcher, NodeChannel
from ..resume.attempts import Attempts, total_steps
from ..resume.deferred_writes import DeferredWrites
from ..resume.resumption import Resumption
from .checkpoint_saver import CheckpointSaver, CheckpointSource
from .cluster_setup import (
    Hosts,
    cluster_document,
    infer_isolation,
    machine_of,
    make_cluster,
    make_tasks,
    nodes_sharing_cores,
    refuse_empty_servers,
    threads_per_task,
)
from .first_failure import AddressInUseError
from .nodes import Nodes
from .outcome import Ending, add_what_is_kept, finalize_records, resume_hint, state_and_exit_code, train_seconds_by_node, with_task_states
from .recorder import PROFILE, Recording, calibrate_run
from .task_group import TaskGroup, load_state

__all__ = ["Driver", "run"]

CLOSE_GRACE_SECONDS = 10.0
"""How long tasks may take to leave the cluster in good order."""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *NOTICES)

MOST_START_ATTEMPTS = 3
"""A port may be taken by another program between its reservation and its use."""


class Driver:
    """Runs one job. `sources` says where each value of the job came from; `command` is what the user typed.

    `resumption` is the run that goes on with this job, where it is not a new one.
    """

    def __init__(
        self, job: Job, sources: Mapping[str, str], progress: Progress, command: Sequence[str], resumption: Resumption | None = None
    ) -> None:
        self.job = job
        self._sources = dict(sources)
        self._progress = progress
        self._command = job.recorded_command(command)
        self._resumption = resumption
        self._segments = Attempts(resumption, self._command)
        self._saver: CheckpointSaver | None = None
        self._precision_used: str | None = None
        self._signals = 0
        self._loop: TrainingLoop | None = None
        self._run_seconds: float | None = None
        self._nodes_sharing_cores: int | None = None
        self._machines: list[str] | None = None
        self._documents = DeferredWrites()
        self._nodes: Nodes | None = None
        self._control: TaskGroup | None = None
        self._recording: Recording
        self._launcher: Launcher
        self._data: StoredDataset

    @property
    def path(self) -> Path:
        """The run directory, once `execute` has been called."""
        return self._recording.path

    def execute(self, launcher: Launcher) -> dict[str, Any]:
        """Run the job; return the summary. Raises what ended the run, after everything has been written and every process ended."""
        self._launcher = launcher
        self._data = open_dataset(self.job.data, self.job.data_dir)
        augmentation(self.job.augment, self._data.info)  # refused here, before anything is started
        self._spec: ModelSpec = load(find("model", self.job.model), "model")(self._data.info)
        self._spec.objective.check(Target.parse(self.job.until) if self.job.until else None, self.job.keep_best)
        forward_plugin(self.job.model, self.job.backend)
        refuse_empty_servers(self.job, self._spec)
        backend = load_backend(self.job.backend)
        refuse_unsupported(self.job, self.job.backend, backend.capabilities)
        self._framework_packages = backend.capabilities.packages
        placed = backend.placement(self.job)
        self._recording = Recording(self.job, self._progress, self._resumption.path if self._resumption else None)
        if self._resumption is not None:
            self._documents = DeferredWrites(RunReader(self._resumption.path).status())
        try:
            self._begin_records()
        except DiskError:
            self._recording.close()
            if self._resumption is None:
                shutil.rmtree(self.path)
            raise
        previous = {number: signal.signal(number, self._on_signal) for number in ENDING_SIGNALS}
        try:
            return self._supervised(placed)
        finally:
            for number, handler in previous.items():  # once interrupted, a late second signal must not change the exit code
                signal.signal(number, signal.SIG_IGN if self._signals else handler)

    def _begin_records(self) -> None:
        self._documents.make(partial(self._recording.writer.write_job, self._described()))
        self._recording.writer.write_status("starting")
        if self.job.mllog and self._resumption is None:
            self._recording.add_mllog(self.job, self._data.info.sizes)
        self._report_skipped_files()

    def _report_skipped_files(self) -> None:
        """Record which files of the data are no examples, and say how many; none is dropped in silence."""
        files = self._data.left_out
        if not files:
            return
        self._recording.event("files_left_out", count=len(files), files=list(files))
        what = "1 file was" if len(files) == 1 else f"{len(files):,} files were"
        self._progress.message(f"{what} no usable picture and left out of {self.job.data}; {self.path / 'events.jsonl'} names them")

    def _supervised(self, placed: Sequence[TaskSpec]) -> dict[str, Any]:
        failure: BaseException | None = None
        try:
            started = self._start(placed)
            self._train(*started)
        except BaseException as error:  # noqa: BLE001 — recorded in the run directory, then raised again below
            failure = error
        self._recording.ending()
        failure = finalize_records(self._recording, self._end_processes(failure), self._summary, self._documents.status_to_restore)
        if isinstance(failure, DiskError):
            failure = RunFailedError(str(failure))
        if isinstance(failure, UsageError) and self._loop is None and self._resumption is None:
            shutil.rmtree(self.path)  # the message says it all, and nothing was trained
        if isinstance(failure, RunFailedError | InterruptedRunError) and self._recording.writer.there:
            failure.run = self.path
        if failure is not None:
            raise failure
        summary = RunReader(self.path).summary()
        if summary is None:
            raise RuntimeError("a run that succeeded has no summary")
        return summary

    # Start ----------------------------------------------------------------------------------------------------------

    def _start(self, placed: Sequence[TaskSpec]) -> tuple[Nodes, TaskGroup]:
        """Bring the cluster to life, warm."""
        deadline = time.monotonic() + self.job.start_timeout
        channels = self._launcher.start()
        self._nodes = nodes = Nodes(
            channels,
            self._recording.sample,
            self._recording.log,
            self._recording.trace,
            self._launcher.check,
            node_timeout_seconds=self.job.node_timeout,
        )
        if self._signals:
            raise InterruptedRunError("interrupted by the user")
        hosts = nodes.greet(deadline - time.monotonic())
        infer_isolation(channels, hosts)
        self._nodes_sharing_cores = nodes_sharing_cores(channels, hosts)
        self._machines = [machine_of(host) for host in hosts]
        self._documents.make(partial(self._recording.writer.write_env, hosts))
        for attempt in range(1, MOST_START_ATTEMPTS + 1):
            self._control = control = TaskGroup(nodes)
            try:
                self._start_tasks(nodes, control, placed, hosts, deadline)
                break
            except AddressInUseError as error:
                if attempt == MOST_START_ATTEMPTS:
                    raise RunFailedError(f"{MOST_START_ATTEMPTS} times a port was taken before a task could listen: {error}") from error
                self._recording.event("start_repeated", cause=str(error))
                control.end_tasks(0.0, politely=False)
        return nodes, control

    def _start_tasks(self, nodes: Nodes, control: TaskGroup, placed: Sequence[TaskSpec], hosts: Hosts, deadline: float) -> None:
        counts = {channel.node: sum(task.node == channel.node for task in placed) for channel in nodes.channels}
        cluster = make_cluster(placed, nodes.channels, control.reserve_ports(counts, deadline - time.monotonic()))
        threads = threads_per_task(self.job, self._spec, nodes.channels, hosts, placed)
        tasks = make_tasks(cluster, threads)
        self._documents.make(partial(self._recording.writer.write_job, {**self._described(), **cluster_document(cluster, threads)}))
        self._recording.expect({task.name: task.placed.node for task in tasks})
        control.start_tasks(tasks, lambda node: self._start_request(nodes.channels[node], deadline))
        self._recording.event("tasks_started", tasks=[task.name for task in tasks])
        if self._resumption is None:
            self._recording.add_followers(self._command)
        else:
            self._recording.load_followers()
        precisions = control.await_ready(deadline - time.monotonic())
        self._precision_used = ", ".join(sorted({used for used in precisions.values() if used})) or self.job.precision
        self._recording.event("cluster_ready")

    def _start_request(self, channel: NodeChannel, deadline: float) -> dict[str, Any]:
        logs = self._recording.writer.log_path(channel.node, "task").parent.absolute()
        return {
            "job": self.job.model_dump(mode="json"),
            "log_folder": str(logs) if channel.shares_files else None,
            "sample_interval_seconds": self.job.sample_interval if self.job.monitor else None,
            "isolated": channel.isolated,
            "cores_available": channel.cores,
            "start_seconds": deadline - time.monotonic(),
        }

    def _described(self) -> dict[str, Any]:
        """The job as ``job.json`` has it before the cluster is known."""
        return {
            **self.job.recorded(),
            "global_batch_size_resolved": self.job.global_batch,
            "total_steps": total_steps(self.job, self._data.info.sizes["train"], self._resumption),
            "dataset": described_data(self._data.info, self._data.digest, self.job.data_dir),
            "sources": self._sources,
            "command": self._command,
            "segments": self._segments.described,
            "framework_packages": sorted(self._framework_packages),
            "metrics": described_metrics(self._spec.objective.infos),
        }

    # Train ----------------------------------------------------------------------------------------------------------

    def _train(self, nodes: Nodes, control: TaskGroup) -> None:
        recording = self._recording
        resumption = self._resumption
        if resumption is not None:
            self._go_back(control, resumption)
        recording.writer.write_status("running")
        if self.job.monitor:
            control.sample_now()
        recording.start_clock(resumption.run_seconds if resumption else 0.0)
        recording.event("run_started" if resumption is None else "run_resumed", **self._segments.event)
        saver = self._saver = CheckpointSaver(
            CheckpointSource(self.job, self._spec, self._data), recording, lambda kind: control.send_to_first(Message(kind)), self._spent
        )
        start = resumption.start if resumption else None
        self._loop = TrainingLoop(
            self.job,
            data=self._data.info,
            objective=self._spec.objective,
            leaders=control,
            recorder=recording,
            progress=self._progress,
            clock=recording.clock,
            saver=saver,
            start=start,
        )
        self._progress.start(self.job, self._loop.triggers.total)
        try:
            outcome = self._loop.run()
        except StalledRunError as error:
            told = with_task_states(error, control.standing())
            add_what_is_kept(told, self.job, self.path)
            raise told from error
        except (RunFailedError, InterruptedRunError) as error:
            add_what_is_kept(error, self.job, self.path)
            raise
        self._run_seconds = recording.clock()
        recording.event("run_ended")
        if self.job.monitor:
            with nodes.interrupts_deferred():  # the run is whole; what an interrupt can still cut short is its calibration
                control.sample_now()
        if outcome.interrupted:
            raise self._interrupted(saver)
        if self.job.calibrate:
            calibrate_run(self.job, self._spec, control, recording, outcome.train_seconds)

    def _go_back(self, control: TaskGroup, resumption: Resumption) -> None:
        """Bring the state to the tasks, and only then take the run back to where that state was saved."""
        load_state(control, resumption.state, self.job.stall_timeout)
        meta = resumption.checkpoint.meta
        self._recording.writer.cut(meta.step, meta.run_seconds)
        self._documents.commit()
        self._recording.add_followers(self._command, meta.run_seconds)
        if self.job.mllog:
            self._recording.add_mllog(self.job, self._data.info.sizes, meta.run_seconds)
        resumption.remove_later_checkpoints()
        for error in resumption.damaged:
            self._recording.event("checkpoint_damaged", path=f"{CHECKPOINTS}/{error.path.name}", file=error.file, problem=error.problem)

    def _interrupted(self, saver: CheckpointSaver) -> InterruptedRunError:
        kept = resume_hint(self.job, self.path)
        if saver.newest is None:
            return InterruptedRunError(f"interrupted by the user; the last checkpoint could not be saved; {kept}")
        return ResumableRunError(f"interrupted by the user; {kept}")

    # End ------------------------------------------------------------------------------------------------------------

    def _end_processes(self, failure: BaseException | None) -> BaseException | None:
        """End every process that this one started or commands, within a bound; return what ended the run.

        An error in one part of that keeps none of the others from being done, and fails the run like any other.
        """
        ending = Ending(failure)
        ending.do(self._end_clock)
        if self._saver is not None:
            ending.do(self._saver.abandon)
        if self._control is not None:
            ending.do(partial(self._end_tasks, self._control, politely=failure is None))
        if self._nodes is not None:
            ending.failure = ending.failure or self._recording.breach or self._nodes.breach
        _, code = state_and_exit_code(ending.failure or self._recording.refused)
        if self._nodes is not None:
            ending.do(partial(self._nodes.finish, code))
        ending.do(partial(self._launcher.ended, code))
        ending.do(self._launcher.close)
        return ending.failure

    def _end_clock(self) -> None:
        self._recording.start_clock(self._resumption.run_seconds if self._resumption else 0.0)
        if self._run_seconds is None:
            self._run_seconds = self._recording.clock()

    def _end_tasks(self, control: TaskGroup, *, politely: bool) -> None:
        control.end_tasks(CLOSE_GRACE_SECONDS, politely=politely)
        for death in control.deaths:
            known = ("task", "pid", "code", "signal", "cpu_seconds", "max_rss_bytes")
            self._recording.event("task_ended", **{key: death[key] for key in known})

    def _summary(self, state: RunState) -> dict[str, Any] | None:
        """Return the summary of a run that ended so; none where training had not begun."""
        if self._loop is None:
            return None
        outcome = self._loop.outcome
        spent = self._spent()
        clock = Clock(
            run_seconds=self._run_seconds or 0.0,
            total_seconds=self._segments.total_before + time.time() - self._recording.began,
            earlier=self._segments.earlier,
            **{**spent, "train_seconds_by_node": tuple(spent["train_seconds_by_node"])},
        )
        summary = summarise(
            self.path,
            clock,
            state=state,
            updates_scheduled=outcome.updates_scheduled,
            updates_applied=outcome.updates_applied,
            examples_per_epoch=self._data.info.sizes["train"],
            nodes_sharing_cores=self._nodes_sharing_cores,
            precision_used=self._precision_used,
            synthetic=self._data.info.synthetic,
            machines=self._machines,
        )
        return {**summary, "profile": PROFILE if (self.path / PROFILE).is_dir() else None}

    def _spent(self) -> dict[str, Any]:
        """Return the seconds that the run has spent so far, with its earlier parts."""
        outcome = self._loop.outcome if self._loop is not None else TrainingTotals()
        return {
            "init_seconds": self._segments.earlier_init_seconds + self._recording.init_seconds,
            "train_seconds": outcome.train_seconds,
            "eval_seconds": outcome.eval_seconds,
            "checkpoint_seconds": outcome.checkpoint_seconds,
            "train_seconds_by_node": self._segments.add_earlier_node_seconds(train_seconds_by_node(self.job, outcome)),
        }

    # Signals --------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal ends the run in good order, a second one at once: tasks follow their agents, agents follow this process.

        A notice of a batch system, which may send several, is never the second.
        """
        if self._signals and number in NOTICES:
            return
        self._signals += 1
        if self._signals > 1:
            self._launcher.kill()
            cause = "interrupted twice by the user"
            note(f"error: {cause}; ended at once; {resume_hint(self.job, self.path)}")
            try:
                self._recording.writer.write_status("interrupted", cause=cause, exit_code=InterruptedRunError.exit_code)
            except DiskError as error:
                note(f"trainer: the status (interrupted, exit code {InterruptedRunError.exit_code}) could not be written: {error}")
            finally:
                os._exit(InterruptedRunError.exit_code)
        if self._loop is not None and self._nodes is not None and self._loop.interrupt():
            note("trainer: saving a checkpoint and ending the run (once more to end it at once)")
            self._nodes.wake()
            return
        note("trainer: ending the run (once more to end it at once)")
        self._launcher.interrupt()
        if self._nodes is not None:
            self._nodes.interrupt()


def run(
    job: Job,
    *,
    sources: Mapping[str, str],
    progress: Progress,
    command: Sequence[str],
    launcher: Launcher,
    resumption: Resumption | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Run a job on the launcher's nodes, or go on with a run; return the run directory and the summary.

    What fails is raised, after it has been recorded.
    """
    driver = Driver(job, sources, progress, command, resumption)
    summary = driver.execute(launcher)
    return driver.path, summary
