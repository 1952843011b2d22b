"""Decision of `--compile auto`, from timings of a plain and a compiled step on all tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from ..core.cluster import split_evenly
from ..core.errors import UsageError
from ..core.job import Job
from ..data.base import Dataset
from ..models.base import ModelSpec

Result = TypeVar("Result")
DECISION_SECONDS = 5.0  # limit for compiling
TIMED_SECONDS = 0.3  # per kind of step; at least one step
GAIN = 0.95  # a smaller gain may be chance
MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a plain and of a compiled step on one task.

    `reason` explains a missing `compiled_seconds`.
    """

    plain_seconds: float
    compiled_seconds: float | None
    reason: str | None = None


Decide = Callable[[Timing, int], bool]  # (timing, number of tasks that time) -> whether all compile


def compile_is_faster(timings: Iterable[Timing]) -> bool:
    """Return whether compiling is faster: it works on each task, and saves time in total."""
    return CompileChoice.from_timings(list(timings)).compiled


@dataclass(frozen=True, slots=True)
class CompileChoice:
    """Decision of all tasks, with the mean seconds of either kind of step.

    `reason` explains a missing `compiled_seconds`.
    """

    compiled: bool
    plain_seconds: float
    compiled_seconds: float | None
    reason: str | None

    @classmethod
    def from_timings(cls, timings: Sequence[Timing]) -> CompileChoice:
        """Decide by the timings of all tasks."""
        plain = [timing.plain_seconds for timing in timings]
        compiled = [timing.compiled_seconds for timing in timings if timing.compiled_seconds is not None]
        complete = len(compiled) == len(plain)
        reason = next((timing.reason for timing in timings if timing.reason is not None), None)
        faster = complete and sum(compiled) <= GAIN * sum(plain)
        return cls(faster, sum(plain) / len(plain), sum(compiled) / len(compiled) if complete else None, reason)


_deciding: list[Decide] = []


def decide_by(decide: Decide) -> None:
    """Have `decide`, which may wait for other tasks, answer this process's `settle` from now on."""
    _deciding[:] = [decide]


def settle(timing: Timing, tasks: int) -> bool:
    """Return whether to compile, the same for each of the `tasks` that time.

    A single process decides without others.
    """
    return _deciding[0](timing, tasks) if _deciding else compile_is_faster([timing])


def call_in_thread(call: Callable[[], Result], name: str) -> Future[Result]:
    """Start a call in a daemon thread, which does not keep the process alive; return its future."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def timed(
    plain: Callable[[], float],
    compile_step: Callable[[], object],
    compiled: Callable[[], float],
    give_up: Callable[[], object] = lambda: None,
    limit_seconds: float = DECISION_SECONDS,
) -> Timing:
    """Time both kinds of step.

    `compile_step` runs in its own thread, may outlast `give_up`, and its error is the reason.
    """
    plain_seconds = plain()
    compiling = call_in_thread(compile_step, "compile")
    if wait([compiling], limit_seconds).not_done:
        give_up()
        return Timing(plain_seconds, None, f"it was not compiled within {limit_seconds:g} s")
    try:
        compiling.result()
        return Timing(plain_seconds, compiled())
    except Exception as error:  # noqa: BLE001 — whatever a compiler raises is the reason: the run only asked whether compiling pays
        return Timing(plain_seconds, None, f"{type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS])


def compiled_sizes(size: int, *parts: int) -> frozenset[int]:
    """Return the batch sizes to compile for.

    They are those of a batch and half of it (`StepComponent`), cut into `parts` like micro-batches, in turn.
    """
    sizes = {size, size // 2}
    for most in parts:
        sizes = {stop - start for whole in sizes for start, stop in split_evenly(whole, min(most, max(whole, 1)))}
    return frozenset(sizes - {0})


def should_time(job: Job, model: ModelSpec, data: Dataset) -> bool:
    """Return whether to time both kinds of steps.

    Examples of varying length are not timed; for them ``on`` raises UsageError.
    """
    columns = [data.info.column(name) for name in dict.fromkeys((*model.inputs, model.target))]
    if not any(column.varies for column in columns):
        return job.compile == "auto"
    if job.compile != "on":
        return False
    raise UsageError(
        f"compile: got {job.compile!r}, but the examples of {data.info.name!r} vary in length, and every length would need compiling; "
        "allowed there: off, auto (which does not compile them)."
    )
