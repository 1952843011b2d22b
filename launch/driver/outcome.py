"""How a run ended: in its records, in words, and on its clock."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...checkpoint import list_checkpoints
from ...core.errors import InterruptedRunError, ResumableRunError, RunFailedError, StalledRunError, TrainerError
from ...core.job import Job
from ...core.untrusted.console import note, one_line
from ...records.store.run_directory import RunState, RunWriter
from ..resume.trust import trust_flag
from ..stacks.places import STACKS, describe_places, odd_one_out
from .first_failure import NodeLostError, TaskDiedError
from .recorder import Recording
from .task_group import ClusterState

T = TypeVar("T")

__all__ = [
    "Ending",
    "Outcome",
    "add_resume_hint",
    "add_to_first_line",
    "finalize_records",
    "leave_to_starter",
    "resume_hint",
    "task_states",
    "with_newest_checkpoint",
    "with_task_states",
]


MOST_UNKNOWN = 4
"""Of tasks whose place is not known: why is told of so many; the file of the stacks has all."""

MOST_TOLD = 300
"""Characters of each."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: the state and exit code that are recorded; where it failed, the cause in one line, and the task that did first."""

    state: RunState
    exit_code: int
    cause: str | None = None
    task: str | None = None

    @classmethod
    def of(cls, failure: BaseException | None) -> Outcome:
        """Return what a run has come to that `failure` ended; None is a success."""
        if failure is None:
            return cls("succeeded", 0)
        cause = (str(failure) or type(failure).__name__).splitlines()[0]  # what follows are the last lines of a log, which is there
        code = failure.exit_code if isinstance(failure, TrainerError) else None
        if isinstance(failure, InterruptedRunError | KeyboardInterrupt):
            return cls("interrupted", InterruptedRunError.exit_code if code is None else code, cause)
        return cls("failed", 1 if code is None else code, cause, getattr(failure, "task", None))


class Ending:
    """Ends a run in steps, each of which is done whatever became of those before. `failure` is what ended the run, the first cause."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self._steps: list[Callable[[], None]] = []
        self._refused: dict[str, BaseException] = {}

    @property
    def outcome(self) -> Outcome:
        """What the run has come to as far as is known."""
        return Outcome.of(self.failure)

    def blame(self, failure: BaseException | None) -> None:
        """Something has gone wrong, or nothing: that is what ended the run where nothing did before."""
        self.failure = self.failure or failure

    def later(self, step: Callable[[], None]) -> None:
        """Remember a step for `run_steps`: how what has just been begun is ended."""
        self._steps.append(step)

    def run_steps(self) -> None:
        """Do what is remembered, the last first: what was begun last is ended first."""
        while self._steps:
            self.do(self._steps.pop())

    def do(self, step: Callable[[], None]) -> None:
        """Do a step. What it raises is what ended the run where nothing did before, and is told where something did."""
        try:
            step()
        except BaseException as error:  # noqa: BLE001 — raised in the end by whoever ends the run, or told
            if self.failure is None:
                self.failure = error
            else:
                note("trainer: while the run was being ended: " + "".join(traceback.format_exception(error)).rstrip())

    def write(self, what: str, write: Callable[[], T]) -> T | None:
        """Write something about the end; return what `write` does. Why it cannot be written, mostly the disk's refusal, is kept."""
        try:
            made = write()
        except Exception as error:  # noqa: BLE001 — it is told, and raised where nothing else ended the run
            self._refused[what] = error
            self.blame(error)
            return None
        self._refused.pop(what, None)
        return made

    def report_unwritten(self) -> None:
        """Say what could not be written, and why where that is not what ended the run."""
        why = {what: "" if str(error) == str(self.failure) else f": {_described(error)}" for what, error in self._refused.items()}
        for reason in dict.fromkeys(why.values()):
            parts = " and ".join(what for what, own in why.items() if own == reason)
            note(f"trainer: {parts} could not be written{reason}")


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, TrainerError) else "".join(traceback.format_exception(error)).rstrip()


def finalize_records(
    recording: Recording,
    ending: Ending,
    summarised: Callable[[RunState], dict[str, Any] | None],
    status_before: Mapping[str, Any] | None,
) -> None:
    """Write summary and status of a run that has ended, and close its records. What the disk refuses of that ends it where nothing did.

    `summarised` returns the summary of a run that ended in a state, or none where training had not begun. `status_before` is that of a
    run that was to go on and never did, which is what it was.
    """
    recording.write_waiting_samples()
    recording.check(at_once=True)
    ending.blame(recording.refused)
    writer, outcome = recording.writer, ending.outcome
    if outcome.cause is not None:
        recording.event("run_failed" if outcome.state == "failed" else "run_interrupted", cause=outcome.cause)
    summary = ending.write("the summary", partial(summarised, outcome.state)) if writer.there else None
    if summary is not None:
        ending.write("the summary", partial(writer.write_summary, summary))
    ending.write("the last records", lambda: recording.ended(ending.outcome.state, summary))
    _write_status(writer, ending, status_before)
    ending.write("the last records", recording.close)
    ending.blame(recording.refused)
    if ending.outcome != outcome:  # the disk refused part of that, so what it took of it is put right
        if summary is not None:
            ending.write("the summary", partial(writer.write_summary, {**summary, "state": ending.outcome.state}))
        _write_status(writer, ending, status_before)
    ending.report_unwritten()


def _write_status(writer: RunWriter, ending: Ending, before: Mapping[str, Any] | None) -> None:
    """Write how the run ended."""
    outcome = ending.outcome if before is None else Outcome(before["state"], before["exit_code"], before["cause"], before["task"])
    write = partial(writer.write_status, outcome.state, cause=outcome.cause, exit_code=outcome.exit_code, task=outcome.task)
    ending.write(f"the status ({outcome.state}, exit code {outcome.exit_code})", write)


def leave_to_starter(failure: BaseException | None, *, saved: bool) -> None:
    """Have a run end with the code of one to go on with, where a loss has ended it and its processes are going to be started again.

    `saved`: this start has got as far as a checkpoint. One that has not may lose the same for ever: then its code remains that of a
    failure, which whoever starts it counts. So it is with a node too, which may have no end of its own to be counted: one that was cut off
    for a while ends with the code of the others.
    """
    if saved and isinstance(failure, NodeLostError | TaskDiedError | StalledRunError):
        failure.exit_code = ResumableRunError.exit_code


def resume_hint(job: Job, run: Path) -> str:
    """Say what a run that was interrupted can go on from."""
    if saved := list_checkpoints(run):
        return f"saved last: {saved[0].name}. To go on: trainer run --resume {shlex.quote(str(run))}{trust_flag(job.model_dump())}"
    remedy = " (--checkpoint-every saves some on the way)" if not job.saves_on_the_way else ""
    return f"no checkpoint was saved{remedy}. Run directory: {str(run)!r}"


def with_newest_checkpoint(error: InterruptedRunError, job: Job, run: Path) -> InterruptedRunError:
    """Return the error that ends a run which was interrupted while nothing was trained: with a checkpoint it can go on from all it has."""
    if isinstance(error, ResumableRunError) or not list_checkpoints(run):
        return error
    return ResumableRunError(f"{error}; {resume_hint(job, run)}")


def with_task_states(error: StalledRunError, standing: ClusterState) -> StalledRunError:
    """Return the error with how the cluster stands (`task_states`), and with whom that shows to be to blame."""
    stopped = _stopped(standing)
    alone = odd_one_out(standing.stacks)
    to_blame = [*(f"agent-{node}" for node in standing.silent), *stopped, *([] if alone is None else [alone])]
    return StalledRunError(f"{error}; {task_states(standing)}", to_blame[0] if to_blame else None)


def _stopped(standing: ClusterState) -> list[str]:
    return [task for task, state in standing.states.items() if state in "Tt"]


def task_states(standing: ClusterState) -> str:
    """Say which nodes do not answer, which tasks are stopped, and where each stands, or else each task's state."""
    stopped = _stopped(standing)
    named = list(standing.silent.values())
    if stopped:
        named.append(f"stopped by a signal: {', '.join(stopped)}")
    if standing.stacks:
        named += filter(None, [describe_places(standing.stacks), *_unknown_places(standing), f"{STACKS} has all stacks"])
    if not named:
        named.append(f"states of the tasks: {dict(standing.states)}")
    return "; ".join(named)


def _unknown_places(standing: ClusterState) -> list[str]:
    """Say of which tasks it is not known where they stand, and why; that a task is stopped is said elsewhere."""
    unknown = {
        task: stack.problem for task, stack in standing.stacks.items() if stack.problem and standing.states.get(task) not in ("T", "t")
    }
    return [f"{task} {one_line(why)[:MOST_TOLD]}" for task, why in list(unknown.items())[:MOST_UNKNOWN]]


def add_resume_hint(error: RunFailedError | InterruptedRunError, job: Job, run: Path) -> None:
    """Put what a run can go on from into the first line of the error that ended its training."""
    add_to_first_line(error, resume_hint(job, run))


def add_to_first_line(error: TrainerError, more: str) -> None:
    """Put more into the first line of an error; what follows are the last lines of a log."""
    first, *rest = str(error).split("\n", 1)
    error.args = ("\n".join([f"{first}; {more}", *rest]),)
