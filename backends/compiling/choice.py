"""`--compile auto`: a task times a step as it is and compiled, and what all tasks have found decides for all of them.

How long a task may take for that is bounded: what is not compiled by then is given up (`DECISION_SECONDS`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...core.errors import UsageError
from ...core.job import Job
from ...data.base import Dataset
from ...models.base import ModelSpec

__all__ = [
    "DECISION_SECONDS",
    "TIMED_SECONDS",
    "CompileChoice",
    "Timing",
    "compiled_sizes",
    "decide_by",
    "pays",
    "settle",
    "timed",
    "to_be_chosen",
]

DECISION_SECONDS = 5.0
"""How long a task compiles before it gives that up; timing either kind of steps takes `TIMED_SECONDS` besides, or a step."""

TIMED_SECONDS = 0.3
"""For so long a step is repeated, of either kind; once at least."""

GAIN = 0.95
"""Of the time as it is: what compiling does not save more than is no more than chance."""

MOST_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a step on one task, as it is and compiled; `reason` says why there are none of the second."""

    plain_seconds: float
    compiled_seconds: float | None
    reason: str | None = None


Decide = Callable[[Timing, int], bool]
"""From a task's timing, and how many tasks find one, to whether all of them compile."""


def pays(timings: Iterable[Timing]) -> bool:
    """Return whether compiling pays, by the timings of all tasks: where it works on each, and they take less time together."""
    every = list(timings)
    compiled = [timing.compiled_seconds for timing in every if timing.compiled_seconds is not None]
    return len(compiled) == len(every) and sum(compiled) <= GAIN * sum(timing.plain_seconds for timing in every)


@dataclass(frozen=True, slots=True)
class CompileChoice:
    """What all tasks have found: whether they compile, the mean seconds of a step of either kind, and why where none could be timed."""

    compiled: bool
    plain_seconds: float
    compiled_seconds: float | None
    reason: str | None

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> CompileChoice:
        """Return what follows from the timings of all tasks."""
        compiled = [timing.compiled_seconds for timing in timings if timing.compiled_seconds is not None]
        mean = sum(compiled) / len(compiled) if len(compiled) == len(timings) else None
        reason = next((timing.reason for timing in timings if timing.reason is not None), None)
        return cls(pays(timings), sum(timing.plain_seconds for timing in timings) / len(timings), mean, reason)


_deciding: list[Decide] = []


def decide_by(decide: Decide) -> None:
    """Have `decide`, which may wait for other tasks, settle what this process asks from now on."""
    _deciding[:] = [decide]


def settle(timing: Timing, tasks: int) -> bool:
    """Return whether to compile, the same for each of the `tasks` of a job that time it; a process by itself decides for itself."""
    return _deciding[0](timing, tasks) if _deciding else pays([timing])


def timed(
    plain: Callable[[], float],
    compile_step: Callable[[], object],
    compiled: Callable[[], float],
    give_up: Callable[[], object] = lambda: None,
    limit_seconds: float = DECISION_SECONDS,
) -> Timing:
    """Time a step as it is and compiled.

    `plain` and `compiled` return the seconds of one. `compile_step` runs in a thread of its own, changes nothing that training uses, and
    may go on there after it was given up, which `give_up` is told. An error that it or `compiled` raises is the reason; what `compiled` has
    set for compiled steps the caller takes back, as for whatever does not pay.
    """
    plain_seconds = plain()
    failures: list[Exception] = []

    def run() -> None:
        try:
            compile_step()
        except Exception as error:  # noqa: BLE001 — whatever a compiler raises: it is told as the reason
            failures.append(error)

    thread = threading.Thread(target=run, name="compile", daemon=True)
    thread.start()
    thread.join(limit_seconds)
    if thread.is_alive():
        give_up()
        return Timing(plain_seconds, None, f"it was not compiled within {limit_seconds:g} s")
    if failures:
        return Timing(plain_seconds, None, _reason(failures[0]))
    try:
        return Timing(plain_seconds, compiled())
    except Exception as error:  # noqa: BLE001 — as above: what cannot be compiled does not end a run that only asked whether it pays
        return Timing(plain_seconds, None, _reason(error))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_REASON_CHARACTERS]


def compiled_sizes(size: int, *parts: int) -> frozenset[int]:
    """Return how many examples what is compiled has: a batch of `size`, and half of it (`StepComponent`), each cut into so many parts.

    Of several numbers each part is cut again. They are cut as micro-batches are (`Batches.in_micro_batches`).
    """
    found = {size, size // 2}
    for most in parts:
        found = {after - before for whole in found for before, after in pairwise(_borders(whole, most))}
    return frozenset(found - {0})


def _borders(size: int, most: int) -> list[int]:
    count = min(most, max(size, 1))
    return [size * number // count for number in range(count + 1)]


def to_be_chosen(job: Job, model: ModelSpec, data: Dataset) -> bool:
    """Return whether a task has to time both kinds of steps.

    Steps on examples that vary in length are not compiled, as every length would be compiled anew. Raises UsageError where they are to be.
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
