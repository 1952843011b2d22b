"""How a run ended: in its records, in words, and on its clock."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...checkpoint import list_checkpoints
from ...core.errors import InterruptedRunError, RunFailedError, StalledRunError, TrainerError
from ...core.job import Job
from ...core.untrusted.console import note
from ...engine.interfaces import TrainingTotals
from ...records.store.run_directory import RunState, RunWriter
from ..resume.trust import trust_flag
from .recorder import Recording
from .task_group import ClusterState

T = TypeVar("T")

__all__ = [
    "Ending",
    "add_what_is_kept",
    "finalize_records",
    "resume_hint",
    "state_and_exit_code",
    "train_seconds_by_node",
    "with_task_states",
]


class Ending:
    """Ends a run in parts, each of which is done whatever became of those before. `failure` is what ended the run, the first cause."""

    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure

    def do(self, part: Callable[[], None]) -> None:
        """Do a part. What it raises is what ended the run where nothing did before, and is told where something did."""
        try:
            part()
        except BaseException as error:  # noqa: BLE001 — raised in the end by whoever ends the run, or told
            if self.failure is None:
                self.failure = error
            else:
                note("trainer: while the run was being ended: " + "".join(traceback.format_exception(error)).rstrip())


def finalize_records(
    recording: Recording,
    failure: BaseException | None,
    summarised: Callable[[RunState], dict[str, Any] | None],
    status_before: Mapping[str, Any] | None,
) -> BaseException | None:
    """Write summary and status of a run that `failure` ended, and close its records.

    `summarised` returns the summary of a run that ended in a state, or none where training had not begun. `status_before` is that of a
    run that was to go on and never did, which is what it was. Returns what ended the run: the disk's refusal where nothing else did.
    """
    recording.check(at_once=True)
    writer = recording.writer
    failure = before = failure or recording.refused
    state, _ = state_and_exit_code(failure)
    if failure is not None:
        recording.event("run_failed" if state == "failed" else "run_interrupted", cause=_first_line(failure))
    attempts = _Attempts(failure)
    summary = attempts.make("the summary", partial(summarised, state)) if writer.there else None
    if summary is not None:
        attempts.make("the summary", partial(writer.write_summary, summary))
    attempts.make("the last records", partial(recording.ended, state_and_exit_code(attempts.failure)[0], summary))
    _write_status(writer, attempts, status_before)
    attempts.make("the last records", recording.close)
    attempts.failure = attempts.failure or recording.refused
    if attempts.failure is not before:  # the disk refused part of that, so what it took of it is put right
        if summary is not None:
            attempts.make("the summary", partial(writer.write_summary, {**summary, "state": state_and_exit_code(attempts.failure)[0]}))
        _write_status(writer, attempts, status_before)
    attempts.tell()
    return attempts.failure


class _Attempts:
    """Attempts to write about the end of a run. `failure` is what ended it: the disk's refusal where nothing did before."""

    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure
        self._refused: dict[str, BaseException] = {}

    def make(self, what: str, write: Callable[[], T]) -> T | None:
        """Write something, and keep why it could not be: mostly what the disk refuses. Returns what `write` does, or None."""
        try:
            made = write()
        except Exception as error:  # noqa: BLE001 — it is told, and raised where nothing else ended the run
            self._refused[what] = error
            self.failure = self.failure or error
            return None
        self._refused.pop(what, None)
        return made

    def tell(self) -> None:
        """Say what could not be written, and why where that is not what ended the run."""
        why = {what: "" if str(error) == str(self.failure) else f": {_described(error)}" for what, error in self._refused.items()}
        for reason in dict.fromkeys(why.values()):
            parts = " and ".join(what for what, own in why.items() if own == reason)
            note(f"trainer: {parts} could not be written{reason}")


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, TrainerError) else "".join(traceback.format_exception(error)).rstrip()


def _write_status(writer: RunWriter, attempts: _Attempts, before: Mapping[str, Any] | None) -> None:
    """Write how the run ended."""
    if before is not None:
        state, code, cause, task = before["state"], before["exit_code"], before["cause"], before["task"]
    else:
        failure = attempts.failure
        state, code = state_and_exit_code(failure)
        cause, task = None if failure is None else _first_line(failure), getattr(failure, "task", None)
    attempts.make(f"the status ({state}, exit code {code})", partial(writer.write_status, state, cause=cause, exit_code=code, task=task))


def resume_hint(job: Job, run: Path) -> str:
    """Say what a run that was interrupted can go on from."""
    if saved := list_checkpoints(run):
        return f"saved last: {saved[0].name}. To go on: trainer run --resume {shlex.quote(str(run))}{trust_flag(job.model_dump())}"
    remedy = " (--checkpoint-every saves some on the way)" if job.checkpoint_every in (None, "end") else ""
    return f"no checkpoint was saved{remedy}. Run directory: {str(run)!r}"


def train_seconds_by_node(job: Job, outcome: TrainingTotals) -> tuple[float | None, ...]:
    """Return the busiest worker's training time on each node: measured by the ranks in sync mode, by the tickets in async mode."""
    by_worker = dict(enumerate(outcome.train_seconds_by_leader)) if job.mode == "sync" else outcome.seconds_by_worker
    nodes: list[float | None] = [None] * job.nodes
    for worker, seconds in by_worker.items():
        node = worker // job.procs_per_node
        nodes[node] = max(nodes[node] or 0.0, seconds)
    return tuple(nodes)


def with_task_states(error: StalledRunError, standing: ClusterState) -> StalledRunError:
    """Name the nodes that do not answer and the tasks that are stopped, or else tell the state of each task."""
    stopped = [task for task, state in standing.states.items() if state in "Tt"]
    named = list(standing.silent.values())
    if stopped:
        named.append(f"stopped by a signal: {', '.join(stopped)}")
    if not named:
        named.append(f"states of the tasks: {dict(standing.states)}")
    to_blame = [*(f"agent-{node}" for node in standing.silent), *stopped]
    return StalledRunError(f"{error}; {'; '.join(named)}", to_blame[0] if to_blame else None)


def add_what_is_kept(error: RunFailedError | InterruptedRunError, job: Job, run: Path) -> None:
    """Put what a run can go on from into the first line of the error that ended its training."""
    first, *rest = str(error).split("\n", 1)
    error.args = ("\n".join([f"{first}; {resume_hint(job, run)}", *rest]),)


def _first_line(failure: BaseException) -> str:
    """Return what ended a run, in a line; what follows it are the last lines of a log, which is there."""
    return (str(failure) or type(failure).__name__).splitlines()[0]


def state_and_exit_code(failure: BaseException | None) -> tuple[RunState, int]:
    """Return the state of a run that ended so, and the exit code of its command; None is a success."""
    if failure is None:
        return "succeeded", 0
    if isinstance(failure, InterruptedRunError | KeyboardInterrupt):
        return "interrupted", failure.exit_code if isinstance(failure, TrainerError) else InterruptedRunError.exit_code
    return "failed", failure.exit_code if isinstance(failure, TrainerError) else 1
