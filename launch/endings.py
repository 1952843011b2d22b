"""How a run ended, in the words of its status and of its clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..core.errors import DiskError, InterruptedRunError, StalledRunError, TrainerError
from ..core.job import Job
from ..engine.parties import Outcome
from ..metrics.rundir import RunState

__all__ = ["attempted", "explained", "first_line", "train_seconds_by_node", "verdict"]


def train_seconds_by_node(job: Job, outcome: Outcome) -> tuple[float | None, ...]:
    """Return the busiest worker's training time on each node: measured by the ranks in sync mode, by the tickets in async mode."""
    by_worker = dict(enumerate(outcome.train_seconds_by_leader)) if job.mode == "sync" else outcome.seconds_by_worker
    nodes: list[float | None] = [None] * job.nodes
    for worker, seconds in by_worker.items():
        node = worker // job.procs_per_node
        nodes[node] = max(nodes[node] or 0.0, seconds)
    return tuple(nodes)


def explained(error: StalledRunError, states: Mapping[str, str]) -> StalledRunError:
    """Name the tasks that are stopped, or else tell the state of each."""
    stopped = [task for task, state in states.items() if state in "Tt"]
    named = f"stopped by a signal: {', '.join(stopped)}" if stopped else f"states of the tasks: {dict(states)}"
    return StalledRunError(f"{error}; {named}", stopped[0] if stopped else None)


def first_line(failure: BaseException) -> str:
    """Return what ended a run, in a line; what follows it are the last lines of a log, which is there."""
    return (str(failure) or type(failure).__name__).splitlines()[0]


def attempted(failure: BaseException | None, write: Callable[[], None]) -> BaseException | None:
    """Write something about a run's end; return what ended the run, which is the disk's refusal where nothing did before."""
    try:
        write()
    except DiskError as error:
        return failure or error
    return failure


def verdict(failure: BaseException | None) -> tuple[RunState, int]:
    """Return the state of a run that ended so, and the exit code of its command; None is a success."""
    if failure is None:
        return "succeeded", 0
    if isinstance(failure, InterruptedRunError | KeyboardInterrupt):
        return "interrupted", failure.exit_code if isinstance(failure, TrainerError) else InterruptedRunError.exit_code
    return "failed", failure.exit_code if isinstance(failure, TrainerError) else 1
