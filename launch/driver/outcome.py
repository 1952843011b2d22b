"""The end of a run: outcome, shutdown, last records and messages."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...checkpoint import list_checkpoints
from ...core.console import note, one_line
from ...core.errors import InterruptedRunError, ResumableRunError, RunFailedError, StalledRunError, TrainerError
from ...core.job import Job
from ...records.store.run_directory import RunState, RunWriter
from ..node.stacks import STACKS, describe_places, odd_one_out
from .first_failure import NodeLostError, TaskDiedError
from .recorder import RunRecorder
from .restart_policy import first_line_of
from .resumption import trust_flag
from .task_group import ClusterState

T = TypeVar("T")
MAX_UNKNOWN = 4  # reported tasks without a stack; the file of the stacks has all
MAX_REASON_CHARACTERS = 300  # characters of each reason


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state and exit code of a run; the cause in one line, and the task that failed first."""

    state: RunState
    exit_code: int
    cause: str | None = None
    task: str | None = None

    @classmethod
    def from_failure(cls, failure: BaseException | None) -> Outcome:
        """Return the outcome of a run that `failure` ended; None: success."""
        if failure is None:
            return cls("succeeded", 0)
        cause = first_line_of(failure)
        code = failure.exit_code if isinstance(failure, TrainerError) else None
        if isinstance(failure, InterruptedRunError | KeyboardInterrupt):
            return cls("interrupted", InterruptedRunError.exit_code if code is None else code, cause)
        return cls("failed", 1 if code is None else code, cause, getattr(failure, "task", None))


class Shutdown:
    """Ends a run in steps, each even if others failed. `failure` is the first cause."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._steps: list[Callable[[], None]] = []
        self._refused: dict[str, BaseException] = {}

    @property
    def outcome(self) -> Outcome:
        """The outcome of the run so far."""
        return Outcome.from_failure(self.failure)

    def set_failure(self, failure: BaseException | None) -> None:
        """Set the failure, unless one is set or it is None."""
        self.failure = self.failure or failure

    def defer(self, step: Callable[[], None]) -> None:
        """Defer a cleanup step to `run_deferred`."""
        self._steps.append(step)

    def run_deferred(self) -> None:
        """Do the deferred steps, the last first."""
        while self._steps:
            self.run(self._steps.pop())

    def run(self, step: Callable[[], None]) -> None:
        """Do a step. Its error becomes the failure, or is printed if one is set."""
        try:
            step()
        except BaseException as error:  # noqa: BLE001 — raised at the end of the run, or reported
            if self.failure is None:
                self.failure = error
            else:
                note("trainer: while the run was being ended: " + "".join(traceback.format_exception(error)).rstrip())

    def write(self, what: str, write: Callable[[], T]) -> T | None:
        """Return the result of `write`; keep its error for `report_unwritten` as `what`."""
        try:
            made = write()
        except Exception as error:  # noqa: BLE001 — reported, and the failure if there is no other
            self._refused[what] = error
            self.set_failure(error)
            return None
        self._refused.pop(what, None)
        return made

    def report_unwritten(self) -> None:
        """Print what could not be written, and why unless that is the failure."""
        reasons = {what: "" if str(error) == str(self.failure) else f": {_described(error)}" for what, error in self._refused.items()}
        for reason in dict.fromkeys(reasons.values()):
            parts = " and ".join(what for what in reasons if reasons[what] == reason)
            note(f"trainer: {parts} could not be written{reason}")


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, TrainerError) else "".join(traceback.format_exception(error)).rstrip()


def finalize_records(
    recording: RunRecorder,
    shutdown: Shutdown,
    summarised: Callable[[RunState], dict[str, Any] | None],  # None: training had not begun
    status_before: Mapping[str, Any] | None,  # restored if a resume failed before it changed anything
) -> None:
    """Write summary and status of a run, and close its records; errors become its failure."""
    recording.write_waiting_samples()
    recording.check(immediately=True)
    shutdown.set_failure(recording.refused)
    writer, outcome = recording.writer, shutdown.outcome
    if outcome.cause is not None:
        recording.event("run_failed" if outcome.state == "failed" else "run_interrupted", cause=outcome.cause)
    summary = shutdown.write("the summary", partial(summarised, outcome.state)) if writer.there else None
    if summary is not None:
        shutdown.write("the summary", partial(writer.write_summary, summary))
    shutdown.write("the last records", lambda: recording.ended(shutdown.outcome.state, summary))
    _write_status(writer, shutdown, status_before)
    shutdown.write("the last records", recording.close)
    shutdown.set_failure(recording.refused)
    if shutdown.outcome != outcome:  # a write failed, so the records have the wrong outcome
        if summary is not None:
            shutdown.write("the summary", partial(writer.write_summary, {**summary, "state": shutdown.outcome.state}))
        _write_status(writer, shutdown, status_before)
    shutdown.report_unwritten()


def _write_status(writer: RunWriter, shutdown: Shutdown, before: Mapping[str, Any] | None) -> None:
    outcome = shutdown.outcome if before is None else Outcome(before["state"], before["exit_code"], before["cause"], before["task"])
    write = partial(writer.write_status, outcome.state, cause=outcome.cause, exit_code=outcome.exit_code, task=outcome.task)
    shutdown.write(f"the status ({outcome.state}, exit code {outcome.exit_code})", write)


def mark_resumable(failure: BaseException | None, *, saved: bool) -> None:
    """Give a loss the exit code of a resumable run, as its processes are started again."""
    if saved and isinstance(failure, NodeLostError | TaskDiedError | StalledRunError):  # else launchers count it: it may repeat forever
        failure.exit_code = ResumableRunError.exit_code


def resume_hint(job: Job, run: Path) -> str:
    """Describe from what an interrupted run can resume."""
    if saved := list_checkpoints(run):
        return f"saved last: {saved[0].name}. To go on: trainer run --resume {shlex.quote(str(run))}{trust_flag(job.model_dump())}"
    remedy = " (--checkpoint-every saves some on the way)" if not job.saves_intermediate_checkpoints else ""
    return f"no checkpoint was saved{remedy}. Run directory: {str(run)!r}"


def with_newest_checkpoint(error: InterruptedRunError, job: Job, run: Path) -> InterruptedRunError:
    """Return the error of an interrupt outside training; resumable if a checkpoint exists."""
    if isinstance(error, ResumableRunError) or not list_checkpoints(run):
        return error
    return ResumableRunError(f"{error}; {resume_hint(job, run)}")


def with_task_states(error: StalledRunError | TaskDiedError, cluster: ClusterState) -> RunFailedError:
    """Return the error with the cluster's state, for a stall also with its task or agent."""
    stopped = [task for task, state in cluster.states.items() if state in "Tt"]
    add_to_first_line(error, _task_states(cluster, stopped))
    if isinstance(error, StalledRunError):
        alone = odd_one_out(cluster.stacks)
        error.task = next(iter([*(f"agent-{node}" for node in cluster.silent), *stopped, *([] if alone is None else [alone])]), None)
    return error


def _task_states(cluster: ClusterState, stopped: Sequence[str]) -> str:
    """Describe silent nodes, stopped tasks, and each task's stack or state."""
    named = list(cluster.silent.values())
    if stopped:
        named.append(f"stopped by a signal: {', '.join(stopped)}")
    if cluster.stacks:
        named += filter(None, [describe_places(cluster.stacks), *_unknown_places(cluster), f"{STACKS} has all stacks"])
    if not named:
        named.append(f"states of the tasks: {dict(cluster.states)}")
    return "; ".join(named)


def _unknown_places(cluster: ClusterState) -> list[str]:
    unknown = {
        task: stack.problem for task, stack in cluster.stacks.items() if stack.problem and cluster.states.get(task) not in ("T", "t")
    }
    return [f"{task} {one_line(why)[:MAX_REASON_CHARACTERS]}" for task, why in list(unknown.items())[:MAX_UNKNOWN]]


def add_to_first_line(error: TrainerError, more: str) -> None:
    """Add to the first line of an error, which a log may follow."""
    first, *rest = str(error).split("\n", 1)
    error.args = ("\n".join([f"{first}; {more}", *rest]),)
