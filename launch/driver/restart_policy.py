"""What becomes of a run when something that it is made of has failed: a policy decides, and the driver carries it out.

A policy is asked about what another attempt could mend: a task or a node that was lost, a stall, a port that was taken. What the job
itself is the cause of (a loss that is not finite, a full disk, a request that cannot be met) ends the run without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, Protocol

from ...core.errors import StalledRunError, TrainerError
from ...core.job import Job
from ..virtual.errors import NetworkLostError
from .first_failure import AddressInUseError, NodeLostError, TaskDiedError

__all__ = [
    "AttemptSummary",
    "Decision",
    "FailFast",
    "Failure",
    "LimitedRestarts",
    "PortClashRetry",
    "Resize",
    "Restart",
    "RestartPolicy",
    "RestartTask",
    "Stop",
    "cause_of",
    "failure_of",
    "policy_of",
]

MOST_PORT_CLASHES = 3
"""A port may be taken by another program between its reservation and its use."""

LONGEST_PAUSE_SECONDS = 30.0
"""A run that fails again and again without an update in between waits twice as long each time, up to this."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What an attempt has ended with.

    `kind`: a task has died; a node was lost; nothing was finished for the stall time-out; a port was taken before a task could listen; the
    network that the nodes live in was lost, and they with it.
    `task` and `node` are the first that failed, where one is known. `cause` is for people, in one line. `step`: updates done by then.
    `rejoins`: the attempt need not end with it, since the task can be started anew by itself (`RestartTask`) while others train on.
    """

    kind: Literal["task", "node", "stall", "port", "network"]
    task: str | None
    node: int | None
    cause: str
    step: int
    rejoins: bool = False


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """An attempt that is over: the step at which it began, how many seconds it lasted, and what it ended with."""

    first_step: int
    seconds: float
    failure: Failure


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run with the failure. `because`: what people are told before it, where the failure does not say it all."""

    because: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the tasks anew on the same nodes, after so many seconds, and go on from the newest checkpoint.

    A run that has saved none begins anew. Where one of these nodes is lost this cannot be done, and the run ends with that, unless more is
    said. `replaces_nodes`: the launcher is asked for another in its place. `min_nodes`: where there is none, the run goes on with the nodes
    that there are, at least so many, as `Resize` does, and with all nodes of the run as soon as they are back. Raises ValueError for
    fewer than 0 seconds.
    """

    after_seconds: float = 0.0
    replaces_nodes: bool = False
    min_nodes: int | None = None

    def __post_init__(self) -> None:
        if not self.after_seconds >= 0:
            raise ValueError(f"a restart after {self.after_seconds:g} seconds")


@dataclass(frozen=True, slots=True)
class RestartTask:
    """Start the one task anew that has failed, after so many seconds, in the attempt that goes on meanwhile.

    No other answer does that, and this one is none about a failure that does not say `rejoins`. Raises ValueError for fewer than 0 seconds.
    """

    after_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.after_seconds >= 0:
            raise ValueError(f"a restart after {self.after_seconds:g} seconds")


@dataclass(frozen=True, slots=True)
class Resize:
    """Start the tasks anew on so many of the nodes that are there, after so many seconds, and go on from the newest checkpoint.

    They are the lowest-numbered ones that answer when the time is over; where these are too few, the run ends. A run that has saved no
    checkpoint begins anew. An update is of as many examples as before, and these come in the same order: the global batch stays in sync
    mode, a worker's batch in async mode. Raises ValueError for a number that is not whole or less than 1, and for fewer than 0 seconds.
    """

    nodes: int
    after_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, int) or isinstance(self.nodes, bool) or self.nodes < 1:
            raise ValueError(f"a restart on {self.nodes!r} nodes")
        if not self.after_seconds >= 0:
            raise ValueError(f"a restart after {self.after_seconds:g} seconds")


Decision = Stop | Restart | RestartTask | Resize


class RestartPolicy(Protocol):
    """Decides what follows a failure.

    The driver asks the policy that it is given and no other: whoever wants a start repeated whose ports were taken wraps `PortClashRetry`
    around their own.
    """

    def decide(self, failure: Failure, attempts: Sequence[AttemptSummary], nodes: int) -> Decision:
        """Return what is to be done about a failure, before which there were `attempts`, oldest first; the present one is none of them.

        `nodes` is how many of the run's nodes are still there, those that the attempt did not use among them.
        """
        ...


class FailFast:
    """The first failure ends the run."""

    def decide(self, failure: Failure, attempts: Sequence[AttemptSummary], nodes: int) -> Decision:
        """Stop."""
        return Stop()


class PortClashRetry:
    """A start whose ports were taken by others is tried again at once, with other ports; what else fails is for `otherwise` to decide."""

    def __init__(self, otherwise: RestartPolicy) -> None:
        self._otherwise = otherwise

    def decide(self, failure: Failure, attempts: Sequence[AttemptSummary], nodes: int) -> Decision:
        """Restart after a clash of ports, unless it is the third in a row."""
        if failure.kind != "port":
            return self._otherwise.decide(failure, attempts, nodes)
        clashes = 1 + sum(1 for _ in takewhile(lambda attempt: attempt.failure.kind == "port", reversed(attempts)))
        if clashes >= MOST_PORT_CLASHES:
            return Stop(f"{MOST_PORT_CLASHES} times a port was taken before a task could listen")
        return Restart()


class LimitedRestarts:
    """Goes on after a failure, `most` times, or `most` times within `window_seconds`; lost nodes are replaced where they can be.

    `min_nodes` as in `Restart`. `clock` returns seconds. A failure without an update more than at the failure before makes the next start
    wait, longer each time, so that a cause that lasts does not keep the machines busy with starts. A task that can be started anew by
    itself is; there a failure that soon follows its last one makes it wait.
    """

    def __init__(
        self,
        most: int,
        window_seconds: float | None = None,
        min_nodes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._window_seconds = window_seconds
        self._min_nodes = min_nodes
        self._clock = clock
        self._restarted_at: list[float] = []
        self._of_task: dict[str | None, tuple[float, int]] = {}

    def decide(self, failure: Failure, attempts: Sequence[AttemptSummary], nodes: int) -> Decision:
        """Restart, all or the one task, unless that has been done as often as it may."""
        now, window = self._clock(), self._window_seconds
        if window is not None:
            self._restarted_at = [at for at in self._restarted_at if now - at < window]
        if len(self._restarted_at) >= self._most:
            times = "once" if self._most == 1 else f"{self._most} times"
            within = "" if window is None else f" within {window:g} s (--restart-window)"
            return Stop(f"restarted {times}{within}, as often as --max-restarts allows")
        self._restarted_at.append(now)
        if failure.rejoins:
            return RestartTask(self._pause_of_task(failure.task, now))
        return Restart(self._pause_seconds(failure, attempts), replaces_nodes=True, min_nodes=self._min_nodes)

    def _pause_of_task(self, task: str | None, now: float) -> float:
        """Return the pause before one task's next start: none after it has lasted, else 1 s, doubled with each failure that came soon."""
        before, soon = self._of_task.get(task, (now - 2 * LONGEST_PAUSE_SECONDS, 0))
        soon = soon + 1 if now - before < 2 * LONGEST_PAUSE_SECONDS else 0
        self._of_task[task] = now, soon
        return min(LONGEST_PAUSE_SECONDS, 2.0 ** (soon - 1)) if soon else 0.0

    @staticmethod
    def _pause_seconds(failure: Failure, attempts: Sequence[AttemptSummary]) -> float:
        """Return the pause before the next start: none after progress, else 1 s, doubled with each failure in a row without any."""
        steps = [attempt.failure.step for attempt in attempts]
        without = sum(1 for _ in takewhile(lambda step: failure.step <= step, reversed(steps)))
        return min(LONGEST_PAUSE_SECONDS, 2.0 ** (without - 1)) if without else 0.0


def policy_of(job: Job) -> RestartPolicy:
    """Return what becomes of a job's failures, as its settings say; a start whose ports were taken is tried again in any case."""
    if not job.max_restarts:
        return PortClashRetry(FailFast())
    return PortClashRetry(LimitedRestarts(job.max_restarts, job.restart_window, job.min_nodes))


def cause_of(error: BaseException) -> str:
    """Return what a failure's cause is for people: the first line of its error."""
    return (str(error) or type(error).__name__).splitlines()[0]


def failure_of(error: BaseException, step: int, *, rejoins: bool = False) -> Failure | None:
    """Return the failure that an error of an attempt stands for, `step` updates into the training; None where it is none of these."""
    if not isinstance(error, TrainerError):
        return None
    cause = cause_of(error)
    if isinstance(error, AddressInUseError):
        return Failure("port", None, None, cause, step)
    if isinstance(error, TaskDiedError):
        return Failure("task", error.task, error.node, cause, step, rejoins)
    if isinstance(error, NodeLostError):
        return Failure("node", None, error.node, cause, step)
    if isinstance(error, NetworkLostError):
        return Failure("network", None, None, cause, step)
    if isinstance(error, StalledRunError):
        return Failure("stall", error.task, None, cause, step, rejoins)
    return None
