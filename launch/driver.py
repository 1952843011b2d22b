"""The driver: the process of the ``trainer run`` that the user typed. It owns the run directory and takes a job from start to end."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil

from ..backends.base import Backend
from ..core.cluster import Cluster, Placed, Task
from ..core.console import note
from ..core.errors import InterruptedRunError, RunFailedError, StalledRunError, TrainerError, UsageError
from ..core.job import Job
from ..core.plugins import find, forward_plugin, load
from ..data.base import DataInfo
from ..data.store import open_dataset
from ..engine.loop import Outcome, TrainingLoop
from ..engine.progress import Progress
from ..metrics.records import Clock, EvalRecord, EventRecord, StepRecord, SystemRecord, TaskSample
from ..metrics.rundir import RunReader, RunState, RunWriter
from ..metrics.summary import summarise
from ..metrics.tensorboard import TensorBoardWriter
from .channel import read_secret
from .contract import Place
from .control import AddressInUseError, Control
from .external import ExternalLauncher, apply_contract, join
from .local import Launcher, LocalLauncher, NodeChannel

__all__ = ["Driver", "run"]

CLOSE_GRACE_SECONDS = 10.0
MOST_START_ATTEMPTS = 3


class Records:
    """Writes each record to the run directory, to TensorBoard, and onto the screen."""

    def __init__(self, writer: RunWriter, progress: Progress, event: Callable[..., None]) -> None:
        self._writer = writer
        self._event = event
        self._tensorboard: TensorBoardWriter | None = None
        self._progress = progress

    def add_tensorboard(self) -> None:
        """Write TensorBoard's events too, from now on. Loading its writer takes a while: call it while the tasks load theirs."""
        if self._tensorboard is None:
            self._tensorboard = TensorBoardWriter(self._writer.path)

    def step(self, record: StepRecord) -> None:
        """Record a group of updates."""
        self._writer.step(record)
        if self._tensorboard is not None:
            self._tensorboard.step(record)

    def evaluation(self, record: EvalRecord) -> None:
        """Record an evaluation."""
        self._writer.evaluation(record)
        if self._tensorboard is not None:
            self._tensorboard.evaluation(record)

    def system(self, record: SystemRecord) -> None:
        """Record a node's resources."""
        self._writer.system(record)
        self._progress.node(record)
        if self._tensorboard is not None:
            self._tensorboard.system(record)

    def event(self, event: str, **detail: Any) -> None:
        """Record an event now."""
        self._event(event, **detail)

    def close(self) -> None:
        """Flush and close."""
        if self._tensorboard is not None:
            self._tensorboard.close()


class Driver:
    """Runs one job. `sources` says where each value of the job came from; `command` is what the user typed."""

    def __init__(self, job: Job, sources: Mapping[str, str], progress: Progress, command: Sequence[str]) -> None:
        self.job = job
        self.sources = sources
        self.progress = progress
        self.command = list(command)
        self.began = psutil.Process().create_time()
        self.zero: float | None = None
        self.signals = 0
        self.control: Control | None = None
        self.launcher: Launcher | None = None
        self.loop: TrainingLoop | None = None
        self.run_seconds: float | None = None
        self._early: list[Callable[[], None]] = []

    # The one way through --------------------------------------------------------------------------------------------

    def execute(self, make_launcher: Callable[[Sequence[Placed]], Launcher]) -> dict[str, Any]:
        """Run the job; return the summary. Raises what ended the run, after everything has been written."""
        data = open_dataset(self.job.data, self.job.data_dir).info
        self.examples_per_epoch = data.sizes["train"]
        forward_plugin(self.job.model, self.job.backend)
        backend: Backend = load(find("backend", self.job.backend), "backend")
        if self.job.mode not in backend.modes:
            raise UsageError.of("mode", self.job.mode, f"on backend {backend.name}: {', '.join(sorted(backend.modes))}")
        placed = backend.placement(self.job)
        self.launcher = make_launcher(placed)
        self.writer = RunWriter.create(self.job)
        self.writer.write_status("starting")
        self.records = Records(self.writer, self.progress, self._event)
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            summary = self._supervised(placed, data)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return summary

    def _supervised(self, placed: Sequence[Placed], data: DataInfo) -> dict[str, Any]:
        """Run, and whatever happens end every process, write the summary and the status, and pass the failure on."""
        failure: BaseException | None = None
        try:
            self._start(placed)
            self._train(data)
        except BaseException as error:  # noqa: BLE001 — recorded in the run directory, then raised again below
            failure = error
        summary = self._end(failure)
        if failure is not None:
            raise failure
        if summary is None:
            raise RuntimeError("a run that succeeded has no summary")
        return summary

    # Start ----------------------------------------------------------------------------------------------------------

    def _start(self, placed: Sequence[Placed]) -> None:
        launcher = self._launcher()
        deadline = time.monotonic() + self.job.start_timeout
        channels = launcher.start()
        self.control = Control(channels, self._on_sample, self._on_log)
        self._check_signals()
        hosts = self.control.hello(deadline - time.monotonic())
        settle_isolation(channels, hosts)
        self.writer.write_env(hosts)
        for attempt in range(1, MOST_START_ATTEMPTS + 1):
            try:
                self._start_tasks(placed, channels, hosts, deadline)
                return
            except AddressInUseError as error:
                if attempt == MOST_START_ATTEMPTS:
                    raise RunFailedError(f"{MOST_START_ATTEMPTS} times a port was taken before a task could listen: {error}") from error
                self._event("start_repeated", cause=str(error))
                self.control.end_tasks(0.0, politely=False)
                self.control.restartable()

    def _start_tasks(
        self, placed: Sequence[Placed], channels: Sequence[NodeChannel], hosts: Sequence[dict[str, Any]], deadline: float
    ) -> None:
        control = self._control()
        cluster = self._cluster(placed, channels, deadline)
        threads = {channel.node: self._threads(channel, channels, hosts, placed) for channel in channels}
        tasks = _tasks(placed, cluster, threads)
        self.writer.write_job(self._resolved(cluster, threads))
        control.start_tasks(tasks, cluster, lambda node: self._start_request(channels[node]))
        self._event("tasks_started", tasks=[task.name for task in tasks])
        if self.job.tensorboard:
            self.records.add_tensorboard()
        control.await_ready(deadline - time.monotonic())
        self._event("cluster_ready")

    def _cluster(self, placed: Sequence[Placed], channels: Sequence[NodeChannel], deadline: float) -> Cluster:
        on_node = {channel.node: [task for task in placed if task.node == channel.node] for channel in channels}
        reserved = self._control().reserve_ports({node: len(tasks) for node, tasks in on_node.items()}, deadline - time.monotonic())
        ports = {task.name: port for node, tasks in on_node.items() for task, port in zip(tasks, reserved[node], strict=True)}
        ports |= {name: port for channel in channels for name, port in channel.ports.items() if name in ports}
        return Cluster(tuple(placed), tuple(channel.address for channel in channels), ports, secrets.token_hex(32))

    def _threads(
        self, own: NodeChannel, channels: Sequence[NodeChannel], hosts: Sequence[Mapping[str, Any]], placed: Sequence[Placed]
    ) -> int:
        """Threads per task: cores ÷ all tasks that share them, at least 1.

        Nodes on one machine share its cores, unless they are limited.
        """
        if self.job.threads is not None:
            return self.job.threads
        machine = hosts[own.node]["identity"]["boot"]
        sharing = {channel.node for channel in channels if channel.cores is None and hosts[channel.node]["identity"]["boot"] == machine}
        nodes = {own.node} if own.cores is not None else sharing
        cores = own.cores or hosts[own.node]["cores_available"] or os.cpu_count() or 1
        return max(1, int(cores // max(1, sum(task.node in nodes for task in placed))))

    def _start_request(self, channel: NodeChannel) -> dict[str, Any]:
        return {
            "job": self.job.model_dump(mode="json"),
            "log_folder": str(self.writer.log_path(channel.node, "task").parent.absolute()) if channel.shares_files else None,
            "sample_interval_seconds": self.job.sample_interval if self.job.monitor else None,
            "isolated": channel.isolated,
            "cores_available": channel.cores,
        }

    def _resolved(self, cluster: Cluster, threads: Mapping[int, int]) -> dict[str, Any]:
        """The job with everything that was decided for it; the secret stays out of files."""
        public = cluster.to_json()
        del public["secret"]
        return {
            **self.job.model_dump(mode="json"),
            "global_batch_size_resolved": self.job.global_batch,
            "sources": dict(self.sources),
            "command": self.command,
            "cluster": public,
            "threads_per_task": [threads[node] for node in sorted(threads)],
        }

    # Train ----------------------------------------------------------------------------------------------------------

    def _train(self, data: DataInfo) -> None:
        self.writer.write_status("running")
        self._sample_now()
        self._start_clock()
        self._event("run_started")
        self.loop = TrainingLoop(self.job, data, self._control(), self.records, self.progress, self._clock)
        self.progress.start(self.job, self.loop.stop.total)
        try:
            outcome = self.loop.run()
        except StalledRunError as error:
            raise self._explained(error) from error
        self.run_seconds = self._clock()
        self._event("run_ended")
        self._sample_now()
        if outcome.final_state is not None:
            values: dict[str, Any] = dict(outcome.final_state.parameters)
            np.savez(self.writer.path / "weights.npz", **values)

    def _explained(self, error: StalledRunError) -> StalledRunError:
        """Name the tasks that are stopped, or else those that wait in the kernel."""
        states = self._control().states()
        stopped = [task for task, state in states.items() if state in "Tt"]
        named = f"stopped by a signal: {', '.join(stopped)}" if stopped else f"states of the tasks: {states}"
        return StalledRunError(f"{error}; {named}", stopped[0] if stopped else None)

    # End ------------------------------------------------------------------------------------------------------------

    def _end(self, failure: BaseException | None) -> dict[str, Any] | None:
        """End every process within a bound, write what there is to say, and return the summary where training had begun."""
        if self.zero is None:
            self._start_clock()
        run_seconds = self.run_seconds if self.run_seconds is not None else self._clock()
        state, code = _verdict(failure)
        control, launcher = self.control, self.launcher
        if control is not None:
            control.end_tasks(CLOSE_GRACE_SECONDS, politely=failure is None)
            self._record_ends(control, failure)
            control.finish(code)
        if launcher is not None:
            launcher.ended(code)
            launcher.close()
        summary = None
        if self.loop is not None:
            self.writer.write_summary(self._summary(state, run_seconds))
            summary = RunReader(self.writer.path).summary()
        cause = str(failure) if failure is not None else None
        self.writer.write_status(state, cause=cause, exit_code=code, task=getattr(failure, "task", None))
        self.records.close()
        self.writer.close()
        self.progress.close()
        return summary

    def _record_ends(self, control: Control, failure: BaseException | None) -> None:
        for death in control.deaths:
            fields = {key: death[key] for key in ("task", "pid", "code", "signal", "cpu_seconds", "max_rss_bytes")}
            self._event("task_ended", **fields)
        if failure is not None:
            self._event("run_failed", cause=str(failure).splitlines()[0] if str(failure) else type(failure).__name__)

    def _summary(self, state: RunState, run_seconds: float) -> dict[str, Any]:
        loop = self.loop
        outcome = loop.outcome if loop is not None else Outcome()
        clock = Clock(
            init_seconds=self.ready - self.began,
            run_seconds=run_seconds,
            train_seconds=outcome.train_seconds,
            eval_seconds=outcome.eval_seconds,
            checkpoint_seconds=outcome.checkpoint_seconds,
            total_seconds=time.time() - self.began,
            train_seconds_by_node=self._train_seconds_by_node(outcome),
        )
        return summarise(
            self.writer.path,
            clock,
            state=state,
            updates_scheduled=outcome.updates_scheduled,
            updates_applied=outcome.updates_applied,
            examples_per_epoch=self.examples_per_epoch,
        )

    def _train_seconds_by_node(self, outcome: Outcome) -> tuple[float | None, ...]:
        """The busiest worker's training time on each node: measured by the ranks in sync mode, by the tickets in async mode."""
        by_worker = dict(enumerate(outcome.train_seconds_by_leader)) if self.job.mode == "sync" else outcome.seconds_by_worker
        nodes: list[float | None] = [None] * self.job.nodes
        for worker, seconds in by_worker.items():
            node = worker // self.job.procs_per_node
            nodes[node] = max(nodes[node] or 0.0, seconds)
        return tuple(nodes)

    # What happens on the side ---------------------------------------------------------------------------------------

    def _start_clock(self) -> None:
        """Start the run clock, and write what was held back because its time on this clock was not known before."""
        self.zero = time.monotonic()
        self.ready = time.time()
        for write in self._early:
            write()
        self._early.clear()

    def _clock(self) -> float:
        """Seconds on the run clock, which has to be started."""
        return self._since_zero(time.monotonic())

    def _since_zero(self, moment: float) -> float:
        if self.zero is None:
            raise RuntimeError("the run clock has not been started")
        return moment - self.zero

    def _at_its_time(self, write: Callable[[float], None]) -> None:
        """Write a record stamped with this moment: now, or as soon as the run clock starts."""
        moment = time.monotonic()
        if self.zero is None:
            self._early.append(lambda: write(self._since_zero(moment)))
        else:
            write(self._since_zero(moment))

    def _sample_now(self) -> None:
        if self.job.monitor:
            self._control().sample_now()

    def _on_sample(self, fields: dict[str, Any]) -> None:
        tasks = tuple(TaskSample(**task) for task in fields.pop("tasks"))
        self._at_its_time(lambda now: self.records.system(SystemRecord(**{**fields, "time_seconds": now}, tasks=tasks)))

    def _on_log(self, node: int, task: str, text: bytes) -> None:
        path = self.writer.log_path(node, task)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)

    def _event(self, event: str, **detail: Any) -> None:
        self._at_its_time(lambda now: self.writer.event(EventRecord(event, now, detail)))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal ends the run in good order, a second one at once."""
        self.signals += 1
        if self.signals > 1:
            self._abort()
        note("trainer: ending the run (once more to end it at once)")
        if self.control is not None:
            self.control.interrupt()

    def _check_signals(self) -> None:
        if self.signals:
            raise InterruptedRunError("interrupted by the user")

    def _abort(self) -> None:
        """End at once: the tasks follow their agents, the agents follow this process."""
        if self.launcher is not None:
            self.launcher.kill()
        self.writer.write_status("interrupted", cause="interrupted twice by the user", exit_code=InterruptedRunError.exit_code)
        os._exit(InterruptedRunError.exit_code)

    def _control(self) -> Control:
        if self.control is None:
            raise RuntimeError("the cluster has not been started")
        return self.control

    def _launcher(self) -> Launcher:
        if self.launcher is None:
            raise RuntimeError("no launcher has been made")
        return self.launcher


def settle_isolation(channels: Sequence[NodeChannel], hosts: Sequence[Mapping[str, Any]]) -> None:
    """Decide for nodes started elsewhere whether their interfaces are theirs alone: not on loopback, and no other node beside them."""
    networks = [tuple(sorted(host["identity"].items())) for host in hosts]
    for channel, network in zip(channels, networks, strict=True):
        if channel.isolated is None:
            channel.isolated = networks.count(network) == 1 and not channel.address.startswith("127.")


def _verdict(failure: BaseException | None) -> tuple[RunState, int]:
    if failure is None:
        return "succeeded", 0
    if isinstance(failure, InterruptedRunError | KeyboardInterrupt):
        return "interrupted", InterruptedRunError.exit_code
    return "failed", failure.exit_code if isinstance(failure, TrainerError) else 1


def _tasks(placed: Sequence[Placed], cluster: Cluster, threads: Mapping[int, int]) -> list[Task]:
    tasks = []
    seen: dict[tuple[str, int], int] = {}
    for task in placed:
        local = seen.get((task.role, task.node), 0)
        seen[task.role, task.node] = local + 1
        tasks.append(Task(task, cluster, threads[task.node], local))
    return tasks


def run(
    job: Job,
    *,
    sources: Mapping[str, str],
    progress: Progress,
    command: Sequence[str],
    place: Place | None = None,
    secret_file: Path | None = None,
) -> tuple[int, Path | None, dict[str, Any] | None]:
    """Run a job: on this machine's own nodes, or at this process's `place` among processes that somebody else started.

    Returns the exit code and, where this process is the driver, the run directory and the summary. What fails is raised, after it
    has been recorded.
    """
    if place is None:
        driver = Driver(job, sources, progress, command)
        summary = driver.execute(lambda placed: LocalLauncher(job, len(placed), progress.message))
        return 0, driver.writer.path, summary
    secret = read_secret(secret_file)
    job, sources = apply_contract(job, sources, place)
    if not place.is_driver:
        return join(job, place, secret), None, None
    driver = Driver(job, sources, progress, command)
    summary = driver.execute(lambda placed: ExternalLauncher(job, place, secret))
    return 0, driver.writer.path, summary
