"""Execution of the restart policy's decisions, and preparation of the next attempt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ...checkpoint import list_checkpoints
from ...core.errors import RunFailedError, TrainerError
from .attempt import Attempt
from .cluster_setup import infer_isolation
from .nodes import Nodes
from .recorder import RunRecorder
from .restart_policy import AttemptSummary, Decision, Failure, Resize, Restart, RestartPolicy, RestartTask, Stop
from .training_job import TrainingJob

REPLACEMENT_SECONDS = 15.0  # wait for replacements if the run may resume with fewer nodes; other runs wait --start-timeout


class RestartCoordinator:
    """Asks the policy and prepares the next attempts; `training` is for all nodes of the run."""

    def __init__(self, policy: RestartPolicy, training: TrainingJob, nodes: Nodes, recording: RunRecorder) -> None:
        self._policy = policy
        self._training = training
        self._nodes = nodes
        self._recording = recording
        self._progress = recording.progress
        self._earlier: list[AttemptSummary] = []

    def decide(self, failure: Failure) -> Decision:
        """Return the policy's decision on a failure; `Stop` if the policy is broken."""
        try:
            decision = self._policy.decide(failure, tuple(self._earlier), len(self._nodes.answering))
        except Exception as broken:  # noqa: BLE001 — third-party code; reported, and the run ends
            return self._stop_for_broken_policy(f"failed with {broken!r}")
        return decision if isinstance(decision, Decision) else self._stop_for_broken_policy(f"decided {decision!r}")

    def expect_restart(self, decision: Decision, failure: Failure, error: TrainerError) -> Restart | Resize:
        """Return a decision to restart all tasks. Raises the run's failure after any other."""
        if isinstance(decision, RestartTask):
            decision = self._stop_for_broken_policy(f"decided {decision!r} although no task can restart alone")
        if isinstance(decision, Stop):
            if not decision.because:
                raise error
            raise RunFailedError(f"{decision.because}: {error}", failure.task) from error
        if failure.kind == "network" and not (isinstance(decision, Restart) and decision.replaces_nodes):
            raise error  # no nodes are left
        return decision

    def _stop_for_broken_policy(self, what: str) -> Stop:
        self._recording.event("restart_policy_failed", why=what)
        self._progress.message(f"the restart policy {what}, which is no decision, so the run ends")
        return Stop()

    def restart(self, decision: Restart | Resize, failure: Failure, attempt: Attempt, error: TrainerError) -> TrainingJob:
        """End a failed attempt; return what the next one trains.

        Raises the `error`, or that of too few nodes.
        """
        seconds = attempt.seconds
        self._report(failure, attempt)
        attempt.stop(graceful=False)
        if failure.kind == "network":
            for node in sorted(self._nodes.peers.alive):
                self._nodes.peers.lose(node)
        self._nodes.wait(decision.after_seconds)
        if isinstance(decision, Restart) and decision.replaces_nodes:
            self._replace_lost(decision)
        if self._nodes.violation is not None:
            raise self._nodes.violation from error
        training = self._next_training(decision, error, attempt)
        self._earlier.append(AttemptSummary(attempt.origin.start.cursor.step, seconds, failure))
        return training

    def resize(self, attempt: Attempt) -> TrainingJob:
        """End an attempt that stopped for returned nodes; return the training on all nodes."""
        attempt.stop(graceful=True)
        infer_isolation(self._nodes.channels, self._nodes.hosts)
        answering = sorted(self._nodes.answering)
        self._report_replaced(node for node in answering if node not in attempt.training.places)
        self._seek_others(answering)
        return self._resized(answering, attempt.training)

    def _seek_others(self, answering: Collection[int]) -> None:
        job = self._training.requested
        self._nodes.keep_restoring(job.start_timeout if len(answering) < job.nodes else None)

    def _replace_lost(self, decision: Restart) -> None:
        lost, limit = list(self._nodes.peers.lost), self._training.requested.start_timeout
        if not lost:
            return
        self._nodes.restore(limit if decision.min_nodes is None else min(limit, REPLACEMENT_SECONDS))
        infer_isolation(self._nodes.channels, self._nodes.hosts)
        self._report_replaced(node for node in lost if node in self._nodes.answering)

    def _report_replaced(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self._recording.event("node_replaced", node=node, host=self._nodes.hosts[node]["hostname"])
            self._progress.message(f"{self._nodes.name(node)} is back")

    def _report(self, failure: Failure, attempt: Attempt) -> None:
        self._recording.event("attempt_failed" if attempt.began else "start_repeated", cause=failure.cause)
        if not attempt.began:
            onwards = "starts again"
        elif list_checkpoints(self._recording.path):
            onwards = "restarts from its newest checkpoint"
        else:
            onwards = "restarts from its beginning, as no checkpoint was saved"
        self._progress.message(f"{failure.cause}; the run {onwards}")

    def _next_training(self, decision: Restart | Resize, error: TrainerError, attempt: Attempt) -> TrainingJob:
        nodes, before = self._nodes, attempt.training
        answering = sorted(nodes.answering)
        fewest = decision.min_nodes if isinstance(decision, Restart) else None
        if fewest is not None and fewest <= len(answering):
            self._seek_others(answering)
            return self._resized(answering, before)
        enough = set(before.places) <= nodes.answering if isinstance(decision, Restart) else decision.nodes <= len(answering)
        if not enough:
            gone = attempt.initial_nodes.union(before.places) - nodes.answering
            if gone:
                raise nodes.loss(next(node for node in (*nodes.peers.lost, *sorted(gone)) if node in gone)) from error
            wanted = decision.nodes if isinstance(decision, Resize) else len(before.places)
            raise RunFailedError(f"the restart policy wants {wanted} nodes, and there are {len(answering)}: {error}") from error
        if isinstance(decision, Restart):
            return before
        return self._resized(answering[: decision.nodes], before)

    def _resized(self, places: Sequence[int], before: TrainingJob) -> TrainingJob:
        training = self._training.resized(places)
        if training.places != before.places:
            self._recording.event("run_resized", nodes=places)
            on = "node" if len(places) == 1 else "nodes"
            self._progress.message(
                f"training continues with {on} {', '.join(map(str, places))} of the run's {self._training.requested.nodes}"
            )
        return training
