"""Calibration: timing of each step component after training, on all workers concurrently."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backends.base import DIRECT_COMPONENTS, CalibrationOrder, CalibrationResult, StepComponent
from ..backends.capabilities import Exchange
from ..core.cluster import MAX_RANKS
from ..core.errors import RunFailedError
from ..core.job import Job
from ..models.base import ModelSpec
from .loop_interfaces import TaskGroup
from .protocol.task_messages import Calibrate, Calibrated, Done

MAX_COMPONENT_SECONDS, MIN_COMPONENT_SECONDS = 0.2, 0.06  # per component: hundreds of a small model's steps, unnoticed after a run
LIMITED_SECONDS = 0.4  # minimum with a CPU quota: a short try would use up one period (20 ms)
RUN_FRACTION = 1 / 20  # of the training time per component, within those bounds
LONG_SECONDS = 0.5  # a longer component is repeated only once more
FAR_APART = 0.25  # relative distance of two tries above which other programs disturbed them
MAX_TRIES = 6
MAX_REPETITIONS = 100_000
MAX_TRIED_SECONDS = 1.0  # a longer native exchange is bandwidth-bound: the direct one saves only latency
MAX_COMPILING_SECONDS = 10.0  # compilation of half a batch is uninterruptible and takes as long as the whole batch's
TRIED_STEP_SECONDS = 1.0  # an estimate rests only on these steps, and 0.1 s may be unusual


def component_seconds(train_seconds: float, *, limited: bool) -> float:
    """Return how long to repeat a component, in seconds; nodes with a `limited` CPU need longer."""
    seconds = min(MAX_COMPONENT_SECONDS, max(MIN_COMPONENT_SECONDS, RUN_FRACTION * train_seconds))
    return max(seconds, LIMITED_SECONDS) if limited else seconds


@dataclass
class Figures:
    """Seconds per repetition of a component on one worker, by try."""

    tries: list[float] = field(default_factory=list)

    @property
    def middle_pair(self) -> tuple[float, float]:
        """The two median tries; a single one counts twice."""
        ordered = sorted(self.tries)
        return ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]

    @property
    def seconds(self) -> float:
        """Median of the tries."""
        return sum(self.middle_pair) / 2


ByWorker = Mapping[int, Figures]


@dataclass
class CalibrationRun:
    """Calibration of `workers` workers.

    `seconds` per component, `timeout_seconds` per answer.
    """

    leaders: TaskGroup
    seconds: float
    timeout_seconds: float
    workers: int
    native: dict[str, list[float]] = field(default_factory=dict)
    _sequence: int = 0

    def measure(self, component: StepComponent, *, lockstep: bool, seconds: float | None = None) -> ByWorker:
        """Time a component in two tries, and in up to four more while the medians are far apart.

        A first repetition warms up, unless it is slow. `lockstep`: workers meet in each repetition and repeat it equally often;
        otherwise each repeats for the same time.
        """
        self._order(CalibrationOrder(component, 0))
        first = self._order(CalibrationOrder(component, 1))
        longest = _longest(first)
        if longest > LONG_SECONDS:
            return _figures([first, self._order(CalibrationOrder(component, 1))])
        repeat, wanted = self._for_equal_count if lockstep else self._for_equal_time, seconds or self.seconds
        tries = repeat(component, longest, wanted)
        by_worker = _figures(tries)
        while len(tries) < MAX_TRIES and any(spread(figures) > FAR_APART for figures in by_worker.values()):
            tries = [*tries, *repeat(component, _longest(tries[-1]), wanted)]
            by_worker = _figures(tries)
        return by_worker

    def refusal(self, component: StepComponent) -> str | None:
        """Give the first order for a component; return why it is impossible, or None."""
        reasons = [result.refused for result in self._order(CalibrationOrder(component, 0)) if result.refused is not None]
        return next((reason for reason in reasons if reason), "it could not be opened") if reasons else None

    def _for_equal_time(self, component: StepComponent, _guess: float, seconds: float) -> list[Sequence[CalibrationResult]]:
        once = self._order(CalibrationOrder(component, 1, seconds / 2))
        count = 1 if min(result.count for result in once) > 1 else 2
        return [once, self._order(CalibrationOrder(component, count, seconds / 2))]

    def _for_equal_count(self, component: StepComponent, guess: float, seconds: float) -> list[Sequence[CalibrationResult]]:
        """Repeat a first try that was too short: the guess may be from a cold repetition."""
        tries: list[Sequence[CalibrationResult]] = []
        while len(tries) < 2:
            count = max(2, min(MAX_REPETITIONS, round(seconds / 2 / max(guess, 1e-9))))
            results = self._order(CalibrationOrder(component, count))
            guess = _longest(results)
            if tries or guess * count >= seconds / 8 or count == MAX_REPETITIONS:
                tries.append(results)
        return tries

    def _order(self, order: CalibrationOrder) -> Sequence[CalibrationResult]:
        """Send an order to all leading tasks and return all answers.

        Raises RunFailedError on time-out.
        """
        self._sequence += 1
        self.leaders.send(Calibrate(order, sequence=self._sequence))
        results: list[CalibrationResult] = []
        waiting, deadline = len(self.leaders), time.monotonic() + self.timeout_seconds
        while waiting:
            answer = self.leaders.receive(1.0)
            if answer is not None and isinstance(answer[1], Calibrated):
                results.append(self._checked(answer[0], answer[1].result, results))
            elif answer is not None and isinstance(answer[1], Done):
                waiting -= 1
            elif time.monotonic() > deadline:
                raise RunFailedError(f"calibrating {order.component!r} took more than {self.timeout_seconds:g} s (--stall-timeout)")
        if order.count and (not results or any(result.count < order.count or result.seconds <= 0 for result in results)):
            raise RunFailedError(f"calibrating {order.component!r} gave no figures")
        for name, value in ((name, value) for result in results for name, value in result.native.items()):
            self.native.setdefault(name, []).append(value)
        return results

    def _checked(self, leader: int, result: CalibrationResult, before: Sequence[CalibrationResult]) -> CalibrationResult:
        strange = result.worker >= self.workers or (len(self.leaders) > 1 and result.worker != leader)
        if strange or any(result.worker == earlier.worker for earlier in before):
            self.leaders.refuse(leader, f"figures of worker {result.worker}, of which none are awaited")
        return result


def spread(*figures: Figures) -> float:
    """Return the relative distance of the median tries of a sum of components."""
    return sum(high - low for low, high in (part.middle_pair for part in figures)) / sum(part.seconds for part in figures)


def _longest(results: Sequence[CalibrationResult]) -> float:
    return max(result.seconds / result.count for result in results)


def _figures(tries: Sequence[Sequence[CalibrationResult]]) -> dict[int, Figures]:
    """Group tries by worker; ignore workers missing in one, which were lost."""
    figures: dict[int, Figures] = {}
    for result in (result for results in tries for result in results):
        figures.setdefault(result.worker, Figures()).tries.append(result.seconds / result.count)
    return {worker: entry for worker, entry in figures.items() if len(entry.tries) == len(tries)}


def calibrate(
    job: Job,
    model: ModelSpec,
    leaders: TaskGroup,
    train_seconds: float,
    node_of_worker: Mapping[int, int],
    batch_size: int | None = None,
    exchanges: Collection[Exchange] = frozenset({"native"}),
    compiling_seconds: float | None = None,
) -> dict[str, Any]:
    """Calibrate; return the content of ``calibration.json``.

    docs/run-directory.md explains each field. `batch_size` overrides the job's; `compiling_seconds`: the longest compilation, None without
    one. Raises RunFailedError where a task fails or does not answer, InterruptedRunError on an interrupt.
    """
    began = time.monotonic()
    batch_size = batch_size or job.per_worker_batch
    conductor = CalibrationRun(
        leaders, component_seconds(train_seconds, limited=job.cores_per_node is not None), job.stall_timeout, job.workers
    )
    components: dict[str, ByWorker] = {component: conductor.measure(component, lockstep=False) for component in ("data", "compute")}
    half_untried = _reason_not_to_halve(batch_size, compiling_seconds)
    if half_untried is None:
        components["half"] = conductor.measure("half", lockstep=False)
    if job.workers > 1 or job.mode == "async":
        for meeting in ("communicate", "message"):
            components[meeting] = conductor.measure(meeting, lockstep=job.mode == "sync")
    untried = None
    if job.mode == "sync" and job.workers > 1 and job.exchange == "native":
        untried = _reason_not_to_try(job, exchanges, components["communicate"]) or conductor.refusal("direct")
        if untried is None:
            components |= {component: conductor.measure(component, lockstep=True) for component in DIRECT_COMPONENTS[:-1]}
            components[DIRECT_COMPONENTS[-1]] = conductor.measure(DIRECT_COMPONENTS[-1], lockstep=True, seconds=TRIED_STEP_SECONDS)
    workers = sorted(set.intersection(*(set(component) for component in components.values())))
    elements = model.size + (model.buffers_size if job.mode == "async" else 0)
    return {
        "seconds": time.monotonic() - began,
        "payload_bytes": 4 * elements,
        "batch_size": batch_size,
        "half_batch_size": batch_size // 2,
        "workers": [_described(worker, node_of_worker[worker], components) for worker in workers],
        "half_untried": half_untried,
        "direct_untried": untried,
        "native": {name: sum(values) / len(values) for name, values in conductor.native.items()},
    }


def _reason_not_to_halve(batch_size: int, compiling_seconds: float | None) -> str | None:
    if batch_size < 2:
        return "a batch of one example has no half"
    if compiling_seconds is not None and compiling_seconds > MAX_COMPILING_SECONDS:
        took = f"compiling steps for another batch may take the {compiling_seconds:.0f} s of the run's own"
        return f"{took}, and it is done where that is {MAX_COMPILING_SECONDS:g} s at most"
    return None


def _reason_not_to_try(job: Job, exchanges: Collection[Exchange], communicate: ByWorker) -> str | None:
    if "direct" not in exchanges:
        return f"backend {job.backend} does not support it"
    if job.workers > MAX_RANKS:
        return f"it is for {MAX_RANKS} workers at most, and here are {job.workers}"
    if job.device == "gpu":
        return "it is for CPUs"
    longest = max((figures.seconds for figures in communicate.values()), default=0.0)
    if longest > MAX_TRIED_SECONDS:
        return f"the exchange takes {longest:.1f} s, and it is tried where that is {MAX_TRIED_SECONDS:g} s at most"
    return None


def _described(worker: int, node: int, components: Mapping[str, ByWorker]) -> dict[str, Any]:
    def seconds(component: str) -> float | None:
        return components[component][worker].seconds if component in components else None

    return {
        "worker": worker,
        "node": node,
        "data_seconds": seconds("data"),
        "compute_seconds": seconds("compute"),
        "half_compute_seconds": seconds("half"),
        **{f"{component}_seconds": seconds(component) for component in ("communicate", "message", *DIRECT_COMPONENTS)},
        "direct_spread": spread(components["direct_step"][worker]) if "direct_step" in components else None,
        "spread": spread(components["data"][worker], components["compute"][worker]),
    }
