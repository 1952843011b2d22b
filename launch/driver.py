"""The driver: the process of the ``trainer run`` that the user typed. It takes a job from its start to its end, whatever the end is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ..backends.base import Backend
from ..core.cluster import Cluster, Placed
from ..core.console import note
from ..core.errors import InterruptedRunError, RunFailedError, StalledRunError, TrainerError, UsageError
from ..core.job import Job
from ..core.plugins import find, forward_plugin, load
from ..data.base import DataInfo
from ..data.store import open_dataset
from ..engine.loop import Outcome, TrainingLoop
from ..engine.progress import Progress
from ..metrics.records import Clock
from ..metrics.rundir import RunReader, RunState
from ..metrics.summary import summarise
from ..models.base import ModelSpec
from .control import AddressInUseError, Control
from .local import Launcher, NodeChannel
from .placing import Hosts, make_cluster, make_tasks, nodes_sharing_cores, settle_isolation, threads_per_task
from .recording import Recording

__all__ = ["Driver", "run"]

CLOSE_GRACE_SECONDS = 10.0
"""How long tasks may take to leave the cluster in good order."""

MOST_START_ATTEMPTS = 3
"""A port may be taken by another program between its reservation and its use."""


class Driver:
    """Runs one job. `sources` says where each value of the job came from; `command` is what the user typed."""

    def __init__(self, job: Job, sources: Mapping[str, str], progress: Progress, command: Sequence[str]) -> None:
        self.job = job
        self._sources = dict(sources)
        self._progress = progress
        self._command = list(command)
        self._signals = 0
        self._loop: TrainingLoop | None = None
        self._run_seconds: float | None = None
        self._nodes_sharing_cores: int | None = None
        self._control: Control | None = None
        self._recording: Recording
        self._launcher: Launcher
        self._data: DataInfo

    @property
    def path(self) -> Path:
        """The run directory, once `execute` has been called."""
        return self._recording.path

    def execute(self, launcher: Launcher) -> dict[str, Any]:
        """Run the job; return the summary. Raises what ended the run, after everything has been written and every process ended."""
        self._launcher = launcher
        self._data = open_dataset(self.job.data, self.job.data_dir).info
        self._spec: ModelSpec = load(find("model", self.job.model), "model")(self._data)
        forward_plugin(self.job.model, self.job.backend)
        backend: Backend = load(find("backend", self.job.backend), "backend")
        if self.job.mode not in backend.modes:
            raise UsageError.of("mode", self.job.mode, f"on backend {backend.name}: {', '.join(sorted(backend.modes))}")
        placed = backend.placement(self.job)
        self._recording = Recording(self.job, self._progress)
        self._recording.writer.write_job(self._described())
        self._recording.writer.write_status("starting")
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            return self._supervised(placed)
        finally:
            for number, handler in previous.items():  # once interrupted, a late second signal must not change the exit code
                signal.signal(number, signal.SIG_IGN if self._signals else handler)

    def _supervised(self, placed: Sequence[Placed]) -> dict[str, Any]:
        failure: BaseException | None = None
        try:
            control = self._start(placed)
            self._train(control)
        except BaseException as error:  # noqa: BLE001 — recorded in the run directory, then raised again below
            failure = error
        self._end_processes(failure)
        self._write_end(failure)
        if failure is not None:
            raise failure
        summary = RunReader(self.path).summary()
        if summary is None:
            raise RuntimeError("a run that succeeded has no summary")
        return summary

    # Start ----------------------------------------------------------------------------------------------------------

    def _start(self, placed: Sequence[Placed]) -> Control:
        """Bring the cluster to life, warm."""
        deadline = time.monotonic() + self.job.start_timeout
        channels = self._launcher.start()
        self._control = control = Control(channels, self._recording.sample, self._recording.log)
        if self._signals:
            raise InterruptedRunError("interrupted by the user")
        hosts = control.hello(deadline - time.monotonic())
        settle_isolation(channels, hosts)
        self._nodes_sharing_cores = nodes_sharing_cores(channels, hosts)
        self._recording.writer.write_env(hosts)
        for attempt in range(1, MOST_START_ATTEMPTS + 1):
            try:
                self._start_tasks(control, placed, hosts, deadline)
                break
            except AddressInUseError as error:
                if attempt == MOST_START_ATTEMPTS:
                    raise RunFailedError(f"{MOST_START_ATTEMPTS} times a port was taken before a task could listen: {error}") from error
                self._recording.event("start_repeated", cause=str(error))
                control.end_tasks(0.0, politely=False)
                control.restartable()
        return control

    def _start_tasks(self, control: Control, placed: Sequence[Placed], hosts: Hosts, deadline: float) -> None:
        counts = {channel.node: sum(task.node == channel.node for task in placed) for channel in control.channels}
        cluster = make_cluster(placed, control.channels, control.reserve_ports(counts, deadline - time.monotonic()))
        threads = threads_per_task(self.job, self._spec, control.channels, hosts, placed)
        tasks = make_tasks(cluster, threads)
        self._recording.writer.write_job({**self._described(), **_described_cluster(cluster, threads)})
        control.start_tasks(tasks, lambda node: self._start_request(control.channels[node]))
        self._recording.event("tasks_started", tasks=[task.name for task in tasks])
        if self.job.tensorboard:
            self._recording.add_tensorboard()
        control.await_ready(deadline - time.monotonic())
        self._recording.event("cluster_ready")

    def _start_request(self, channel: NodeChannel) -> dict[str, Any]:
        logs = self._recording.writer.log_path(channel.node, "task").parent.absolute()
        return {
            "job": self.job.model_dump(mode="json"),
            "log_folder": str(logs) if channel.shares_files else None,
            "sample_interval_seconds": self.job.sample_interval if self.job.monitor else None,
            "isolated": channel.isolated,
            "cores_available": channel.cores,
        }

    def _described(self) -> dict[str, Any]:
        """The job as ``job.json`` has it before the cluster is known."""
        return {
            **self.job.model_dump(mode="json"),
            "global_batch_size_resolved": self.job.global_batch,
            "sources": self._sources,
            "command": self._command,
        }

    # Train ----------------------------------------------------------------------------------------------------------

    def _train(self, control: Control) -> None:
        recording = self._recording
        recording.writer.write_status("running")
        if self.job.monitor:
            control.sample_now()
        recording.start_clock()
        recording.event("run_started")
        self._loop = TrainingLoop(self.job, self._data, control, recording, self._progress, recording.clock)
        self._progress.start(self.job, self._loop.stop.total)
        try:
            outcome = self._loop.run()
        except StalledRunError as error:
            raise _explained(error, control.states()) from error
        self._run_seconds = recording.clock()
        recording.event("run_ended")
        if self.job.monitor:
            control.sample_now()
        if outcome.final_state is not None:
            recording.weights(outcome.final_state)

    # End ------------------------------------------------------------------------------------------------------------

    def _end_processes(self, failure: BaseException | None) -> None:
        """End every process that this one started or commands, within a bound."""
        self._recording.start_clock()
        if self._run_seconds is None:
            self._run_seconds = self._recording.clock()
        _, code = _verdict(failure)
        if self._control is not None:
            self._control.end_tasks(CLOSE_GRACE_SECONDS, politely=failure is None)
            for death in self._control.deaths:
                known = ("task", "pid", "code", "signal", "cpu_seconds", "max_rss_bytes")
                self._recording.event("task_ended", **{key: death[key] for key in known})
            self._control.finish(code)
        self._launcher.ended(code)
        self._launcher.close()

    def _write_end(self, failure: BaseException | None) -> None:
        """Write summary and status; the summary only where training had begun."""
        state, code = _verdict(failure)
        writer = self._recording.writer
        cause = None
        if failure is not None:
            cause = (str(failure) or type(failure).__name__).splitlines()[0]  # the log's last lines are in the log
            self._recording.event("run_failed" if state == "failed" else "run_interrupted", cause=cause)
        if self._loop is not None:
            writer.write_summary(self._summary(self._loop.outcome, state))
        writer.write_status(state, cause=cause, exit_code=code, task=getattr(failure, "task", None))
        self._recording.close()

    def _summary(self, outcome: Outcome, state: RunState) -> dict[str, Any]:
        clock = Clock(
            init_seconds=self._recording.init_seconds,
            run_seconds=self._run_seconds or 0.0,
            train_seconds=outcome.train_seconds,
            eval_seconds=outcome.eval_seconds,
            checkpoint_seconds=outcome.checkpoint_seconds,
            total_seconds=time.time() - self._recording.began,
            train_seconds_by_node=_train_seconds_by_node(self.job, outcome),
        )
        return summarise(
            self.path,
            clock,
            state=state,
            updates_scheduled=outcome.updates_scheduled,
            updates_applied=outcome.updates_applied,
            examples_per_epoch=self._data.sizes["train"],
            nodes_sharing_cores=self._nodes_sharing_cores,
        )

    # Signals --------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal ends the run in good order, a second one at once: tasks follow their agents, agents follow this process."""
        self._signals += 1
        if self._signals > 1:
            self._launcher.kill()
            cause = "interrupted twice by the user"
            self._recording.writer.write_status("interrupted", cause=cause, exit_code=InterruptedRunError.exit_code)
            os._exit(InterruptedRunError.exit_code)
        note("trainer: ending the run (once more to end it at once)")
        if self._control is not None:
            self._control.interrupt()


def _described_cluster(cluster: Cluster, threads: Sequence[int]) -> dict[str, Any]:
    """The cluster as ``job.json`` has it; the secret stays out of files."""
    public = {key: value for key, value in cluster.to_json().items() if key != "secret"}
    return {"cluster": public, "threads_per_task": list(threads)}


def _train_seconds_by_node(job: Job, outcome: Outcome) -> tuple[float | None, ...]:
    """Return the busiest worker's training time on each node: measured by the ranks in sync mode, by the tickets in async mode."""
    by_worker = dict(enumerate(outcome.train_seconds_by_leader)) if job.mode == "sync" else outcome.seconds_by_worker
    nodes: list[float | None] = [None] * job.nodes
    for worker, seconds in by_worker.items():
        node = worker // job.procs_per_node
        nodes[node] = max(nodes[node] or 0.0, seconds)
    return tuple(nodes)


def _explained(error: StalledRunError, states: Mapping[str, str]) -> StalledRunError:
    """Name the tasks that are stopped, or else tell the state of each."""
    stopped = [task for task, state in states.items() if state in "Tt"]
    named = f"stopped by a signal: {', '.join(stopped)}" if stopped else f"states of the tasks: {dict(states)}"
    return StalledRunError(f"{error}; {named}", stopped[0] if stopped else None)


def _verdict(failure: BaseException | None) -> tuple[RunState, int]:
    if failure is None:
        return "succeeded", 0
    if isinstance(failure, InterruptedRunError | KeyboardInterrupt):
        return "interrupted", InterruptedRunError.exit_code
    return "failed", failure.exit_code if isinstance(failure, TrainerError) else 1


def run(
    job: Job,
    *,
    sources: Mapping[str, str],
    progress: Progress,
    command: Sequence[str],
    launcher: Launcher,
) -> tuple[Path, dict[str, Any]]:
    """Run a job on the launcher's nodes; return the run directory and the summary.

    What fails is raised, after it has been recorded.
    """
    driver = Driver(job, sources, progress, command)
    summary = driver.execute(launcher)
    return driver.path, summary
