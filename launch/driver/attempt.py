"""One attempt at a run.

Each attempt has new tasks, ports and a new secret, so nothing is reset and tasks of two attempts cannot be confused.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ...core.cluster import Task
from ...core.errors import InterruptedRunError, RunFailedError, StalledRunError, TrainerError
from ...engine.calibration import calibrate
from ...engine.loop import Outputs, Subject, TrainingLoop
from ...engine.loop_interfaces import TrainingTotals
from ...engine.protocol.node_messages import Start
from ...engine.protocol.state_transfer import StateAnswer
from ..launchers.base import NodeChannel
from ..node.stacks import STACKS, TaskStack, describe_places
from ..preflight.findings import requested_device
from .checkpoint_saver import CheckpointSaver
from .cluster_setup import (
    GpuAssignment,
    Hosts,
    assign_gpus,
    check_devices,
    cluster_document,
    make_cluster,
    make_tasks,
    nodes_sharing_cores,
    threads_per_task,
)
from .first_failure import TaskDiedError
from .nodes import Nodes
from .outcome import with_task_states
from .position import Origin
from .recorder import RunRecorder
from .restart_policy import Failure, first_line_of
from .task_group import TaskGroup, load_state
from .training_job import TrainingJob

CLOSE_GRACE_SECONDS = 10.0  # limit for tasks to leave the cluster gracefully


class Attempt:
    """Trains a job on `nodes`, from `origin`.

    Call `form_cluster`, `start_tasks`, `await_ready`, `load_origin` and `train` in this order; whatever they raise, `end` ends every task.
    After a failure of a task that restarts alone (`restart_task`), `train` continues.
    """

    def __init__(
        self,
        training: TrainingJob,
        nodes: Nodes,
        recording: RunRecorder,
        origin: Origin,
        spent: Callable[[Attempt], Mapping[str, Any]],  # returns the run's seconds, for checkpoints
        notify: Callable[[str, str], None],  # gets the cause and the task of a restart alone when it is ready
        compiled: bool | None,  # None until ``--compile auto`` has chosen
    ) -> None:
        self.origin = origin
        self.training = training
        self.initial_nodes = frozenset(nodes.answering)  # when the attempt was made
        self.tasks = TaskGroup(nodes, training.placed, training.survives, training.places, training.rejoins)
        self.began = False
        self.precision_used: str = training.job.precision
        self.device_used: str | None = None
        self.compiled = compiled
        self._described = ""  # the job of the tasks, as JSON
        self.cluster: Mapping[str, Any] = {}
        self.nodes_sharing_cores: int | None = None
        self._gpus = GpuAssignment({})
        self._nodes = nodes
        self._recording = recording
        self._message = recording.progress.message
        self._notify = notify
        self._clustered: Sequence[Task] = ()
        self._made_at = time.monotonic()
        self._interrupt_due = False
        self._ended = False
        self.saver = CheckpointSaver(
            training,
            recording,
            lambda answer: self.tasks.send_to_first(StateAnswer(answer)),
            lambda: spent(self),
            same_machine=self.tasks.first_is_on_this_machine,
        )
        self.loop = TrainingLoop(
            training.job,
            Subject(training.data.info, training.model.objective, training.lengths, training.model.width),
            self.tasks,
            Outputs(recording, recording.progress, self.saver, recording.clock),
            start=origin.start,
            on_silent=self.tasks.on_silent,
        )
        self.tasks.stack_requests.on_answer = self._report_places

    @property
    def totals(self) -> TrainingTotals:
        """What the run has done so far, including before the origin."""
        return self.loop.outcome

    @property
    def train_seconds_by_node(self) -> list[float | None]:
        """Training seconds of each node's busiest worker, including before the origin."""
        training, totals = self.training, self.totals
        if training.job.mode == "sync":
            busy: Iterable[tuple[int, float]] = zip(
                (task.node for task in training.placed if task.leading), totals.train_seconds_by_leader, strict=True
            )
        else:
            busy = ((training.node_of_worker[worker], seconds) for worker, seconds in totals.seconds_by_worker.items())
        longest: list[float | None] = [None] * training.requested.nodes
        for node, seconds in busy:
            longest[node] = max(longest[node] or 0.0, seconds)
        return self.origin.with_node_seconds_before(longest)

    @property
    def seconds(self) -> float:
        """Seconds since this attempt was made."""
        return time.monotonic() - self._made_at

    def form_cluster(self, hosts: Hosts, deadline: float) -> None:
        """Assign addresses and GPUs to the tasks. Raises UsageError if that is not possible."""
        channels, training = self._nodes.channels, self.training
        self._gpus = assign_gpus(requested_device(training.job), training.placed, training.places, hosts, self._nodes.name)
        self._report_gpus(self._gpus.notice)
        counts = dict.fromkeys(training.places, 0) | Counter(task.node for task in training.placed)
        cluster = make_cluster(training.placed, channels, self.tasks.reserve_ports(counts, deadline - time.monotonic()))
        threads = threads_per_task(training.job, training.model, channels, hosts, training.placed)
        self._clustered = make_tasks(cluster, threads)
        self.nodes_sharing_cores = nodes_sharing_cores([channels[place] for place in training.places], hosts)
        described = cluster_document(cluster, [count if node in training.places else None for node, count in enumerate(threads)])
        self.cluster = {**described, **self._gpus.document}

    def start_tasks(self, deadline: float) -> None:
        """Have every node start its tasks."""
        self._described = json.dumps(self._job_of_tasks)
        self.tasks.start_tasks(self._clustered, lambda node: self._start_request(self._nodes.channels[node], deadline))

    @property
    def _job_of_tasks(self) -> dict[str, Any]:
        chosen = {} if self.compiled is None else {"compile": "on" if self.compiled else "off"}
        return {**self.training.job.model_dump(mode="json"), **chosen}

    def _start_request(self, channel: NodeChannel, deadline: float) -> Start:
        job = self.training.job
        logs = self._recording.writer.log_path(channel.node, "task").parent.absolute()
        return Start(
            job=self._described,
            log_folder=os.fsencode(logs) if channel.shares_files else None,
            sample_interval_seconds=job.sample_interval if job.monitor else None,
            isolated=channel.isolated,
            cores_available=channel.cores,
            gpu_of_task=self._gpus.on_node(channel.node, self.training.placed),
            start_seconds=deadline - time.monotonic(),
            profiles=bool(job.profile),
        )

    def await_ready(self, deadline: float) -> None:
        """Wait until every task is warm. Raises UsageError if kinds of devices differ."""
        ready = self.tasks.await_ready(deadline - time.monotonic())
        workers = {task.name: ready[task.name] for task in self.training.placed if task.role == "worker"}
        precisions = sorted({worker.precision_used for worker in workers.values() if worker.precision_used})
        self.precision_used = ", ".join(precisions) or self.training.job.precision
        devices = {name: worker.device_used for name, worker in workers.items()}
        self.device_used, notice = check_devices(devices, self._gpus, self.training.gpu_advice)
        self._report_gpus(notice)
        self._record_choice()

    def _record_choice(self) -> None:
        choice = self.tasks.compile_choice
        if choice is None:
            self.compiled = bool(self.compiled)
            return
        self.compiled = choice.compiled
        timings = {"plain_seconds": choice.plain_seconds, "compiled_seconds": choice.compiled_seconds, "reason": choice.reason}
        self._recording.event("compile_chosen", compiled=choice.compiled, **timings)
        self._described = json.dumps(self._job_of_tasks)

    def _report_gpus(self, notice: str | None) -> None:
        if notice is not None:
            self._recording.event("gpus_not_used", why=notice)
            self._message(notice)

    def keep_spares(self, places: Collection[int] | None = None) -> None:
        """Have all or these nodes keep a standby process per task, if the job requires it."""
        job = self.training.job
        if job.spare_processes:
            self.tasks.keep_spares(json.dumps(job.model_dump(mode="json")), places)

    def load_origin(self) -> None:
        """Load the state of the origin into the tasks."""
        if self.origin.state is not None:
            load_state(self.tasks, self.origin.state, self.training.job.stall_timeout)

    def train(self) -> None:
        """Train until the end or an interrupt; `translate` does what is left then."""
        self.began = True
        while not self.loop.only_translates and self._advance():
            pass

    def translate(self) -> None:
        """Finish the final translations, or stop at an interrupt."""
        while self._advance():
            pass

    def _advance(self) -> bool:
        try:
            more = self.loop.advance()
        finally:
            self._report_restarted_tasks()
        if more and self._interrupt_due:
            self._interrupt_due = False
            self.loop.interrupt()
        return more

    def restart_task(self, failure: Failure, after_seconds: float) -> None:
        """Restart the failed task after a pause."""
        task = str(failure.task)
        self._recording.event("task_failed", task=task, cause=failure.cause)
        self._message(f"{failure.cause}; {task} restarts while training continues")
        self.loop.on_worker_absent(self._worker_of(task))
        self.tasks.failures.replace(task, failure.cause, after_seconds, self.training.job.start_timeout)

    def _report_restarted_tasks(self) -> None:
        restarted = self.tasks.failures.restarted
        while restarted:
            task, cause, absent_seconds = restarted.popleft()
            self._recording.event("task_restarted", task=task, absent_seconds=absent_seconds)
            self._message(f"{task} takes part again, after {absent_seconds:.1f} s")
            self.loop.on_worker_back(self._worker_of(task))
            self._notify(cause, task)
            self.keep_spares([self.tasks.node_of[task]])

    def _worker_of(self, name: str) -> int:
        return next(task.index for task in self.training.placed if task.name == name)

    def with_task_states(self, error: TrainerError) -> TrainerError:
        """Return the error of training, for a stall with the tasks' states.

        Their stacks are recorded first.
        """
        if not isinstance(error, StalledRunError) and not (isinstance(error, TaskDiedError) and error.stalled):
            return error
        cluster = self.tasks.inspect_tasks()
        self._recording.stacks(first_line_of(error), cluster.stacks)
        return with_task_states(error, cluster)

    def _report_places(self, stacks: Mapping[str, TaskStack]) -> None:
        self._recording.stacks("no step was finished for too long", stacks)
        self._message(f"{describe_places(stacks) or 'where that worker stands is not known'}; {STACKS} has all of it")

    def calibrate(self) -> None:
        """Calibrate and write ``calibration.json``; a failure is only reported."""
        recording, training = self._recording, self.training
        try:
            seconds, batch = self.totals.train_seconds, training.mean_worker_batch
            compiling = self.tasks.failures.warming_up_seconds if self.compiled else None
            of_run = training.node_of_worker, batch, training.exchanges
            document = calibrate(training.job, training.model, self.tasks, seconds, *of_run, compiling_seconds=compiling)
        except (RunFailedError, InterruptedRunError) as error:
            cause = str(error).splitlines()[0]
            recording.event("calibration_failed", cause=cause)
            recording.progress.message(f"the run is complete, but was not calibrated ({cause})")
            return
        recording.writer.write_calibration(document)

    def pause(self, answering: Collection[int]) -> bool:
        """Stop training with a checkpoint if more nodes answer; return whether it stops."""
        return frozenset(answering) > frozenset(self.training.places) and self.loop.pause()

    def interrupt(self) -> bool:
        """Stop training with a checkpoint; return False if it cannot. Safe in a signal handler."""
        if not self.loop.interrupt():
            return False
        self._nodes.wake()
        return True

    def interrupt_once_training(self) -> bool:
        """Stop as `interrupt` once training continues after a failure; return False if it cannot.

        Safe in a signal handler.
        """
        self._interrupt_due = self.loop.only_translates or self.loop.checkpoints.saves_on_interrupt
        return self._interrupt_due

    def stop(self, *, graceful: bool) -> None:
        """End every task in bounded time; idempotent. `graceful`: the cluster is intact."""
        if self._ended:
            return
        self._ended = True
        try:
            self.saver.abandon()
        finally:
            self.tasks.end_tasks(CLOSE_GRACE_SECONDS, graceful=graceful)
        for death in self.tasks.deaths:
            known = ("task", "pid", "code", "signal", "cpu_seconds", "max_rss_bytes")
            self._recording.event("task_ended", **{key: getattr(death, key) for key in known})
