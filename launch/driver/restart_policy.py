"""Policies that decide what follows a failure; the driver carries out the decision.

They decide on failures that another attempt could fix: a lost task or node, a stall, a taken port. Failures that the job itself causes (a
non-finite loss, a full disk) end the run without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, Protocol

from ...core.errors import StalledRunError, TrainerError
from ...core.job import Job
from ..virtual.namespaces import NetworkLostError
from .first_failure import AddressInUseError, NodeLostError, TaskDiedError

MAX_PORT_CLASHES = 3  # a port may be taken between its reservation and its use
MAX_PAUSE_SECONDS = 30.0  # upper bound of the pause, which doubles with each failure without progress


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of an attempt."""

    kind: Literal["task", "node", "stall", "port", "network"]  # died task, lost node, stall, taken port, lost nodes' network
    task: str | None  # that failed first, if known
    node: int | None  # that failed first, if known
    cause: str  # one line
    step: int  # updates done
    rejoins: bool = False  # the task can restart alone (`RestartTask`)


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """A failed attempt: its first step, seconds and failure."""

    first_step: int
    seconds: float
    failure: Failure


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run with the failure, after the text `because`."""

    because: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart all tasks on the same nodes after a pause, from the newest checkpoint, if any.

    A lost node ends the run, except: with `replaces_nodes` the launcher replaces it if it can; with `min_nodes` the run resumes on the
    nodes that answer, at least this many, as with `Resize`, and on all as soon as they are back. Raises ValueError for negative seconds.
    """

    after_seconds: float = 0.0
    replaces_nodes: bool = False
    min_nodes: int | None = None

    def __post_init__(self) -> None:
        if not self.after_seconds >= 0:
            raise ValueError(f"a restart after {self.after_seconds:g} seconds")


@dataclass(frozen=True, slots=True)
class RestartTask:
    """Restart only the failed task, if it `rejoins`. Raises ValueError for negative seconds."""

    after_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.after_seconds >= 0:
            raise ValueError(f"a restart after {self.after_seconds:g} seconds")


@dataclass(frozen=True, slots=True)
class Resize:
    """Restart all tasks after a pause on this many nodes, from the newest checkpoint, if any.

    The run uses the lowest-numbered nodes that answer, or ends if there are too few. The order of examples and the size of an update stay
    the same: the global batch in sync mode, a worker's in async mode. Raises ValueError for nodes below 1 or negative seconds.
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
    """Decides what follows a failure; `PortClashRetry` adds retries with other ports."""

    def decide(self, failure: Failure, attempts: Sequence[AttemptSummary], nodes: int) -> Decision:
        """Return the decision after a failure and earlier `attempts`, with `nodes` answering."""
        ...


class FailFast:
    """Ends the run at the first failure."""

    def decide(self, failure: Failure, attempts: Sequence[AttemptSummary], nodes: int) -> Decision:
        """Stop."""
        return Stop()


@dataclass(frozen=True)
class PortClashRetry:
    """Repeats a start whose ports were taken, with others; else as `otherwise` decides."""

    otherwise: RestartPolicy

    def decide(self, failure: Failure, attempts: Sequence[AttemptSummary], nodes: int) -> Decision:
        """Restart after a port clash, unless it is the third in a row."""
        if failure.kind != "port":
            return self.otherwise.decide(failure, attempts, nodes)
        clashes = 1 + sum(1 for _ in takewhile(lambda attempt: attempt.failure.kind == "port", reversed(attempts)))
        if clashes >= MAX_PORT_CLASHES:
            return Stop(f"{MAX_PORT_CLASHES} times a port was taken before a task could listen")
        return Restart()


@dataclass
class LimitedRestarts:
    """Restarts up to `most` times (within `window_seconds`), and replaces lost nodes.

    Failures without progress double the pause before the next start. A task that can restart alone does, with a pause after failures in
    quick succession.
    """

    most: int
    window_seconds: float | None = None
    min_nodes: int | None = None  # as in `Restart`
    clock: Callable[[], float] = time.monotonic
    _restarted_at: list[float] = field(default_factory=list, init=False)
    _of_task: dict[str | None, tuple[float, int]] = field(default_factory=dict, init=False)

    def decide(self, failure: Failure, attempts: Sequence[AttemptSummary], nodes: int) -> Decision:
        """Restart all tasks or only the failed one, unless the limit is reached."""
        now, window = self.clock(), self.window_seconds
        if window is not None:
            self._restarted_at = [at for at in self._restarted_at if now - at < window]
        if len(self._restarted_at) >= self.most:
            times = "once" if self.most == 1 else f"{self.most} times"
            within = "" if window is None else f" within {window:g} s (--restart-window)"
            return Stop(f"restarted {times}{within}, as often as --max-restarts allows")
        self._restarted_at.append(now)
        if failure.rejoins:
            return RestartTask(self._pause_of_task(failure.task, now))
        return Restart(self._pause_seconds(failure, attempts), replaces_nodes=True, min_nodes=self.min_nodes)

    def _pause_of_task(self, task: str | None, now: float) -> float:
        """Return 0 s, or 1 s doubled with each failure in quick succession."""
        before, soon = self._of_task.get(task, (now - 2 * MAX_PAUSE_SECONDS, 0))
        soon = soon + 1 if now - before < 2 * MAX_PAUSE_SECONDS else 0
        self._of_task[task] = now, soon
        return min(MAX_PAUSE_SECONDS, 2.0 ** (soon - 1)) if soon else 0.0

    @staticmethod
    def _pause_seconds(failure: Failure, attempts: Sequence[AttemptSummary]) -> float:
        """Return 0 s after progress, else 1 s doubled with each failure."""
        steps = [attempt.failure.step for attempt in attempts]
        without = sum(1 for _ in takewhile(lambda step: failure.step <= step, reversed(steps)))
        return min(MAX_PAUSE_SECONDS, 2.0 ** (without - 1)) if without else 0.0


def policy_for_job(job: Job) -> RestartPolicy:
    """Return the policy of a job's settings, with retries on other ports."""
    if not job.max_restarts:
        return PortClashRetry(FailFast())
    return PortClashRetry(LimitedRestarts(job.max_restarts, job.restart_window, job.min_nodes))


def first_line_of(error: BaseException) -> str:
    """Return the first line of an error, which a log may follow."""
    return (str(error) or type(error).__name__).splitlines()[0]


def failure_from_error(error: BaseException, step: int, *, rejoins: bool = False) -> Failure | None:
    """Return the failure behind an error after `step` updates, if another attempt may fix it."""
    if not isinstance(error, TrainerError):
        return None
    cause = first_line_of(error)
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
