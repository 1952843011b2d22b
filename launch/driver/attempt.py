"""One attempt at a run, and the restart after a failed one.

Each attempt has new tasks, ports and a new secret, so nothing is reset and tasks of two attempts cannot be confused.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ...checkpoint import list_checkpoints
from ...core.cluster import Task
from ...core.errors import InterruptedRunError, ResumableRunError, RunFailedError, StalledRunError, TrainerError
from ...engine.calibration import calibrate
from ...engine.loop import Outputs, Subject, TrainingLoop
from ...engine.loop_interfaces import TrainingTotals
from ...engine.protocol.messages import Message, PreparedJson
from ..launchers.base import NodeChannel
from ..node.stacks import STACKS, TaskStack, describe_places
from ..preflight.findings import asked_device
from .checkpoint_saver import CheckpointSaver
from .cluster_setup import (
    GpuAssignment,
    Hosts,
    assign_gpus,
    check_devices,
    cluster_document,
    infer_isolation,
    make_cluster,
    make_tasks,
    nodes_sharing_cores,
    threads_per_task,
)
from .first_failure import TaskDiedError
from .nodes import Nodes
from .outcome import add_to_first_line, resume_hint, task_states, with_newest_checkpoint, with_task_states
from .position import Origin
from .recorder import Recording
from .restart_policy import (
    AttemptSummary,
    Decision,
    Failure,
    LoneRestarts,
    Resize,
    Restart,
    RestartPolicy,
    RestartTask,
    Stop,
    cause_of,
    failure_of,
)
from .task_group import TaskGroup, load_state
from .training_job import TrainingJob

CLOSE_GRACE_SECONDS = 10.0  # limit for tasks to leave the cluster gracefully
REPLACEMENT_SECONDS = 15.0  # wait for replacements if the run may resume with fewer nodes; other runs wait --start-timeout


class Attempt:
    """Trains a job on `nodes`, from `origin`.

    Call `form_cluster`, `start_tasks`, `await_ready`, `load_origin` and `train` in this order; whatever they raise, `end` ends every task.
    """

    def __init__(
        self,
        training: TrainingJob,
        nodes: Nodes,
        recording: Recording,
        origin: Origin,
        spent: Callable[[Attempt], Mapping[str, Any]],  # returns the run's seconds, for checkpoints
        restarts: Restarts,
        notify: Callable[[str, str], None],
        compiled: bool | None,  # None until ``--compile auto`` has chosen
    ) -> None:
        self.origin = origin
        self.training = training
        self.there = frozenset(nodes.answering)  # when the attempt was made
        self.tasks = TaskGroup(nodes, training.placed, training.survives, training.places, training.rejoins)
        self.began = self.trains = False  # `trains`: from the beginning of training until its end or graceful stop
        self.precision_used: str = training.job.precision
        self.device_used: str | None = None
        self.compiled = compiled
        self._described = PreparedJson({})
        self.cluster: Mapping[str, Any] = {}
        self.nodes_sharing_cores: int | None = None
        self._gpus = GpuAssignment({})
        self._nodes = nodes
        self._recording = recording
        self._restarts = restarts
        self._clustered: Sequence[Task] = ()
        self._made_at = time.monotonic()
        self._ended = self._regroups = False
        self.saver = CheckpointSaver(
            training,
            recording,
            lambda kind: self.tasks.send_to_first(Message(kind)),
            lambda: spent(self),
            same_machine=self.tasks.first_is_on_this_machine,
        )
        self.loop = TrainingLoop(
            training.job,
            Subject(training.data.info, training.model.objective, training.lengths, training.model.width),
            self.tasks,
            Outputs(recording, recording.progress, self.saver, recording.clock),
            start=origin.start,
            on_silent=self._on_silent,
        )
        worker = {task.name: task.index for task in training.placed if task.role == "worker"}
        self._lone_restarts = LoneRestarts(
            recording,
            replace=lambda task, seconds: self.tasks.replace(task, seconds, training.job.start_timeout),
            on_absent=lambda task: self.loop.worker_absent(worker[task]),
            on_back=lambda task: self.loop.worker_back(worker[task]),
            notify=notify,
        )
        self.tasks.on_loss, self.tasks.on_rejoined = self._replaced, self._on_rejoined
        self.tasks.inquiries.on_answer = self._tell_places

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
        longest: list[float | None] = [None] * training.asked.nodes
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
        self._gpus = assign_gpus(asked_device(training.job), training.placed, training.places, hosts, self._nodes.name)
        self._tell_of_gpus(self._gpus.notice)
        counts = dict.fromkeys(training.places, 0) | Counter(task.node for task in training.placed)
        cluster = make_cluster(training.placed, channels, self.tasks.reserve_ports(counts, deadline - time.monotonic()))
        threads = threads_per_task(training.job, training.model, channels, hosts, training.placed)
        self._clustered = make_tasks(cluster, threads)
        self.nodes_sharing_cores = nodes_sharing_cores([channels[place] for place in training.places], hosts)
        described = cluster_document(cluster, [count if node in training.places else None for node, count in enumerate(threads)])
        self.cluster = {**described, **self._gpus.document}

    def start_tasks(self, deadline: float) -> None:
        """Have every node start its tasks."""
        self._described = PreparedJson(self._job_of_tasks)
        self.tasks.start_tasks(self._clustered, lambda node: self._start_request(self._nodes.channels[node], deadline))

    @property
    def _job_of_tasks(self) -> dict[str, Any]:
        chosen = {} if self.compiled is None else {"compile": "on" if self.compiled else "off"}
        return {**self.training.job.model_dump(mode="json"), **chosen}

    def _start_request(self, channel: NodeChannel, deadline: float) -> dict[str, Any]:
        job = self.training.job
        logs = self._recording.writer.log_path(channel.node, "task").parent.absolute()
        return {
            "job": self._described,
            "log_folder": str(logs) if channel.shares_files else None,
            "sample_interval_seconds": job.sample_interval if job.monitor else None,
            "isolated": channel.isolated,
            "cores_available": channel.cores,
            "gpu_of_task": self._gpus.on_node(channel.node, self.training.placed),
            "start_seconds": deadline - time.monotonic(),
        }

    def await_ready(self, deadline: float) -> None:
        """Wait until every task is warm. Raises UsageError if kinds of devices differ."""
        ready = self.tasks.await_ready(deadline - time.monotonic())
        workers = {task.name: ready[task.name] for task in self.training.placed if task.role == "worker"}
        precisions = sorted({worker.precision_used for worker in workers.values() if worker.precision_used})
        self.precision_used = ", ".join(precisions) or self.training.job.precision
        devices = {name: worker.device_used for name, worker in workers.items()}
        self.device_used, notice = check_devices(devices, self._gpus, self.training.gpu_advice)
        self._tell_of_gpus(notice)
        self._keep_choice()

    def _keep_choice(self) -> None:
        choice = self.tasks.compile_choice
        if choice is None:
            self.compiled = bool(self.compiled)
            return
        self.compiled = choice.compiled
        found = {"plain_seconds": choice.plain_seconds, "compiled_seconds": choice.compiled_seconds, "reason": choice.reason}
        self._recording.event("compile_chosen", compiled=choice.compiled, **found)
        self._described = PreparedJson(self._job_of_tasks)

    def _tell_of_gpus(self, notice: str | None) -> None:
        if notice is not None:
            self._recording.event("gpus_not_used", why=notice)
            self._recording.progress.message(notice)

    def keep_spares(self, places: Collection[int] | None = None) -> None:
        """Have all or these nodes keep a standby process per task, if the job says so."""
        job = self.training.job
        if job.spare_processes:
            self.tasks.keep_spares(job.model_dump(mode="json"), places)

    def load_origin(self) -> None:
        """Load the state of the origin into the tasks."""
        if self.origin.state is not None:
            load_state(self.tasks, self.origin.state, self.training.job.stall_timeout)

    def train(self) -> TrainingTotals:
        """Train until the end or an interrupt. A stall is raised with the tasks' states."""
        self.began = self.trains = True
        try:
            totals = self.loop.run()
        except StalledRunError as error:
            standing = self.tasks.standing()
            self._recording.stacks(str(error), standing.stacks)
            raise with_task_states(error, standing) from error
        except TaskDiedError as error:
            if error.stalled:  # the chief noticed the stall first
                standing = self.tasks.standing()
                self._recording.stacks(str(error).split("\n", 1)[0], standing.stacks)
                add_to_first_line(error, task_states(standing))
            raise
        self.trains = False
        return totals

    def _on_silent(self, worker: int) -> None:
        task = f"worker-{worker}"
        self.tasks.find_stacks(task)
        if not self._replaced(StalledRunError(f"stalled: {task} has finished no step for --stall-timeout, while others have", task)):
            self._restarts.forget()

    def _replaced(self, error: TrainerError) -> bool:
        """Return whether the failed task restarts alone."""
        task = getattr(error, "task", None)
        if not self.trains or task is None or not self.tasks.can_replace(task):
            return False
        decision = self._restarts.alone(error, self)
        if decision is None:
            return False
        self._lone_restarts.begin(task, cause_of(error), decision.after_seconds)
        return True

    def _on_rejoined(self, task: str) -> None:
        self._lone_restarts.end(task)
        self.keep_spares([self.tasks.node_of[task]])

    def _tell_places(self, stacks: Mapping[str, TaskStack]) -> None:
        self._recording.stacks("no step was finished for too long", stacks)
        self._recording.progress.message(f"{describe_places(stacks) or 'where that worker stands is not known'}; {STACKS} has all of it")

    def calibrate(self) -> None:
        """Calibrate and write ``calibration.json``; a failure is only reported."""
        recording, training = self._recording, self.training
        try:
            seconds, batch = self.totals.train_seconds, training.mean_worker_batch
            compiling = self.tasks.warming_up_seconds if self.compiled else None
            of_run = training.node_of_worker, batch, training.exchanges
            document = calibrate(training.job, training.model, self.tasks, seconds, *of_run, compiling_seconds=compiling)
        except (RunFailedError, InterruptedRunError) as error:
            cause = str(error).splitlines()[0]
            recording.event("calibration_failed", cause=cause)
            recording.progress.message(f"the run is complete, but was not calibrated ({cause})")
            return
        recording.writer.write_calibration(document)

    def regroup(self, answering: Collection[int]) -> bool:
        """Stop training with a checkpoint if more nodes answer; return whether it stops."""
        if self._ended:
            return False  # the next attempt decides that
        if not self._regroups and frozenset(answering) > frozenset(self.training.places):
            self._regroups = self.loop.pause()
        return self._regroups

    @property
    def regrouped(self) -> bool:
        """Whether training has stopped to continue with more nodes."""
        return self._regroups and self.totals.interrupted

    def interrupt(self) -> bool:
        """Stop training with a checkpoint; return False if it cannot. Safe in a signal handler."""
        if self._ended or not self.loop.interrupt():
            return False
        self._nodes.wake()
        return True

    def end(self, *, politely: bool) -> None:
        """End every task in bounded time; idempotent. `politely`: the cluster is intact."""
        if self._ended:
            return
        self._ended = True
        try:
            self.saver.abandon()
        finally:
            self.tasks.end_tasks(CLOSE_GRACE_SECONDS, politely=politely)
        for death in self.tasks.deaths:
            known = ("task", "pid", "code", "signal", "cpu_seconds", "max_rss_bytes")
            self._recording.event("task_ended", **{key: death[key] for key in known})


class Restarts:
    """Carries out the policy's decisions. `training` is for all nodes of the run."""

    def __init__(
        self, policy: RestartPolicy, training: TrainingJob, nodes: Nodes, recording: Recording, interrupted: Callable[[], bool]
    ) -> None:
        self._policy = policy
        self._training = training
        self._nodes = nodes
        self._recording = recording
        self._progress = recording.progress
        self._interrupted = interrupted
        self._earlier: list[AttemptSummary] = []
        self._trained = False
        self._decided: tuple[Attempt, Decision] | None = None

    def alone(self, error: TrainerError, attempt: Attempt) -> RestartTask | None:
        """Return a decision to restart the task alone; any other decision is kept for `prepare`."""
        failure = failure_of(error, attempt.totals.updates_reported, rejoins=True)
        if failure is None or self._nodes.violation is not None:
            return None
        decision = self._decision(failure)
        if isinstance(decision, RestartTask):
            return decision
        self._decided = attempt, decision
        return None

    def forget(self) -> None:
        """Discard the decision of `alone`: the attempt continues without the task."""
        self._decided = None

    def prepare(self, error: TrainerError, attempt: Attempt) -> TrainingJob:
        """End a failed attempt; return what the next one trains, or raise the run's failure."""
        try:
            return self._prepare(error, attempt)
        except (RunFailedError, InterruptedRunError) as ends_run:
            job, run = self._recording.job, self._recording.path
            if isinstance(ends_run, InterruptedRunError) and (ends_run is not error or not attempt.began):
                ends_run = with_newest_checkpoint(ends_run, job, run)
            if not isinstance(ends_run, ResumableRunError) and (attempt.trains or (self._trained and not attempt.began)):
                add_to_first_line(ends_run, resume_hint(job, run))
            raise ends_run from ends_run.__cause__

    def _prepare(self, error: TrainerError, attempt: Attempt) -> TrainingJob:
        failure = failure_of(error, attempt.totals.updates_reported)
        if failure is None or self._nodes.violation is not None:  # no message of the node can be trusted
            raise error
        decided, self._decided = self._decided, None
        decision = decided[1] if decided is not None and decided[0] is attempt else self._decision(failure)
        if isinstance(decision, RestartTask):
            decision = self._broken_policy(f"decided {decision!r} although no task can restart alone")
        if isinstance(decision, Stop):
            if not decision.because:
                raise error
            raise RunFailedError(f"{decision.because}: {error}", failure.task) from error
        replaces_nodes = isinstance(decision, Restart) and decision.replaces_nodes
        if failure.kind == "network" and not replaces_nodes:
            raise error  # no nodes are left
        if self._interrupted():  # during training, before a checkpoint was saved
            raise InterruptedRunError(f"interrupted by the user, before a failure: {failure.cause}") from error
        seconds = attempt.seconds
        self._tell(failure, attempt)
        attempt.end(politely=False)
        if failure.kind == "network":
            self._nodes.lose_all()
        self._nodes.wait(decision.after_seconds)
        if isinstance(decision, Restart) and replaces_nodes:
            self._replace_lost(decision)
        if self._nodes.violation is not None:
            raise self._nodes.violation from error
        training = self._another(decision, error, attempt)
        self._trained = self._trained or attempt.began
        self._earlier.append(AttemptSummary(attempt.origin.start.cursor.step, seconds, failure))
        return training

    def regroup(self, attempt: Attempt) -> TrainingJob:
        """End an attempt that stopped for returned nodes; return what the next one trains."""
        attempt.end(politely=True)
        infer_isolation(self._nodes.channels, self._nodes.hosts)
        answering = sorted(self._nodes.answering)
        self._tell_replaced(node for node in answering if node not in attempt.training.places)
        self._seek_others(answering)
        return self._on(answering, attempt.training)

    def _seek_others(self, answering: Collection[int]) -> None:
        asked = self._training.asked
        self._nodes.keep_restoring(asked.start_timeout if len(answering) < asked.nodes else None)

    def _replace_lost(self, decision: Restart) -> None:
        lost, limit = list(self._nodes.lost), self._training.asked.start_timeout
        if not lost:
            return
        self._nodes.restore(limit if decision.min_nodes is None else min(limit, REPLACEMENT_SECONDS))
        infer_isolation(self._nodes.channels, self._nodes.hosts)
        self._tell_replaced(node for node in lost if node in self._nodes.answering)

    def _tell_replaced(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self._recording.event("node_replaced", node=node, host=self._nodes.hosts[node]["hostname"])
            self._progress.message(f"{self._nodes.name(node)} is back")

    def _tell(self, failure: Failure, attempt: Attempt) -> None:
        self._recording.event("attempt_failed" if attempt.began else "start_repeated", cause=failure.cause)
        if not attempt.began:
            onwards = "starts again"
        elif list_checkpoints(self._recording.path):
            onwards = "restarts from its newest checkpoint"
        else:
            onwards = "restarts from its beginning, as no checkpoint was saved"
        self._progress.message(f"{failure.cause}; the run {onwards}")

    def _another(self, decision: Restart | Resize, error: TrainerError, attempt: Attempt) -> TrainingJob:
        nodes, before = self._nodes, attempt.training
        answering = sorted(nodes.answering)
        fewest = decision.min_nodes if isinstance(decision, Restart) else None
        if fewest is not None and fewest <= len(answering):
            self._seek_others(answering)
            return self._on(answering, before)
        enough = set(before.places) <= nodes.answering if isinstance(decision, Restart) else decision.nodes <= len(answering)
        if not enough:
            gone = attempt.there.union(before.places) - nodes.answering
            if gone:
                raise nodes.loss(next(node for node in (*nodes.lost, *sorted(gone)) if node in gone)) from error
            wanted = decision.nodes if isinstance(decision, Resize) else len(before.places)
            raise RunFailedError(f"the restart policy wants {wanted} nodes, and there are {len(answering)}: {error}") from error
        if isinstance(decision, Restart):
            return before
        return self._on(answering[: decision.nodes], before)

    def _on(self, places: Sequence[int], before: TrainingJob) -> TrainingJob:
        training = self._training.resized(places)
        if training.places != before.places:
            self._recording.event("run_resized", nodes=places)
            on = "node" if len(places) == 1 else "nodes"
            self._progress.message(f"training continues with {on} {', '.join(map(str, places))} of the run's {self._training.asked.nodes}")
        return training

    def _decision(self, failure: Failure) -> Decision:
        try:
            decision = self._policy.decide(failure, tuple(self._earlier), len(self._nodes.answering))
        except Exception as broken:  # noqa: BLE001 — third-party code; reported, and the run ends
            return self._broken_policy(f"failed with {broken!r}")
        return decision if isinstance(decision, Decision) else self._broken_policy(f"decided {decision!r}")

    def _broken_policy(self, what: str) -> Stop:
        self._recording.event("restart_policy_failed", why=what)
        self._progress.message(f"the restart policy {what}, which is no decision, so the run ends")
        return Stop()
