"""Calibration: after a run every worker repeats each component of a step by itself, so that the run's time can be divided among them.

The state is no longer needed then, and the cluster is still up and warm. All workers repeat a component at the same time, so that those
which share cores or a link contend for them as they do while training.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backends.base import DIRECT_COMPONENTS, CalibrationOrder, CalibrationResult, StepComponent
from ..backends.capabilities import Exchange
from ..core.direct_exchange import MOST_RANKS
from ..core.errors import RunFailedError
from ..core.job import Job
from ..models.base import ModelSpec
from .loop_interfaces import TaskGroup
from .protocol.codec import calibrated_from_message, calibration_to_message
from .protocol.messages import Message

__all__ = ["CalibrationRun", "calibrate", "component_seconds", "spread"]

MOST_COMPONENT_SECONDS, LEAST_COMPONENT_SECONDS = 0.2, 0.06
"""How long a component is repeated: long enough for hundreds of a small model's steps, and not to be noticed behind a run."""

LIMITED_SECONDS = 0.4
"""How long a component is repeated at least where nodes have a CPU quota: the system hands it out in periods of 20 ms, and a short try
would get by with what it finds."""

RUN_FRACTION = 1 / 20
"""A component takes no more than this fraction of the training time, within those bounds."""

LONG_SECONDS = 0.5
"""A component of which one repetition takes longer is not repeated beyond that and one more."""

FAR_APART = 0.25
"""Relative distance of two tries from which on they are not trusted: something else had the machine."""

MOST_TRIES = 6

MOST_REPETITIONS = 100_000

MOST_TRIED_SECONDS = 1.0
"""The direct exchange is not tried where the native one takes longer: it saves messages, and such an exchange is one of many bytes. So
trying it takes seconds at most."""

MOST_COMPILING_SECONDS = 10.0
"""Half a batch is computed by compiled steps only where the whole one's were compiled within that time: it is compiled after the run, and
takes as long once more. The compiler cannot be interrupted."""

TRIED_STEP_SECONDS = 1.0
"""How long steps with the direct exchange are tried: an estimate rests on them alone, and a tenth of a second may be an unusual one."""


def component_seconds(train_seconds: float, *, limited: bool) -> float:
    """Return how long a component is to be repeated after so much training, on nodes whose CPU is `limited` or not."""
    seconds = min(MOST_COMPONENT_SECONDS, max(LEAST_COMPONENT_SECONDS, RUN_FRACTION * train_seconds))
    return max(seconds, LIMITED_SECONDS) if limited else seconds


@dataclass
class Figures:
    """A component on one worker: the seconds of a repetition, try by try."""

    tries: list[float] = field(default_factory=list)

    @property
    def middle_pair(self) -> tuple[float, float]:
        """The two tries in the middle (of a single one that one twice)."""
        ordered = sorted(self.tries)
        return ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]

    @property
    def seconds(self) -> float:
        """Seconds of one repetition: the median of the tries."""
        return sum(self.middle_pair) / 2


ByWorker = Mapping[int, Figures]
"""A component's figures by worker."""


class CalibrationRun:
    """Gives the orders and collects the answers of `workers` workers. `timeout_seconds` bounds the wait for an answer."""

    def __init__(self, leaders: TaskGroup, seconds: float, timeout_seconds: float, workers: int) -> None:
        self._leaders = leaders
        self._seconds = seconds
        self._timeout_seconds = timeout_seconds
        self._workers = workers
        self._sequence = 0
        self.native: dict[str, list[float]] = {}

    def measure(self, component: StepComponent, *, lockstep: bool, seconds: float | None = None) -> ByWorker:
        """Have a component repeated in two tries, and in two more, and two more again, while those in the middle are far apart.

        A first repetition only warms up; where it takes long it is a try. `lockstep`: workers meet in each repetition, and have to do it
        equally often; else each repeats for the same time. `seconds`: how long in all, where that is not the calibration's own.
        """
        self._order(CalibrationOrder(component, 0))
        first = self._order(CalibrationOrder(component, 1))
        longest = _longest(first)
        if longest > LONG_SECONDS:
            return _figures([first, self._order(CalibrationOrder(component, 1))])
        repeat, wanted = self._for_equal_count if lockstep else self._for_equal_time, seconds or self._seconds
        tries = repeat(component, longest, wanted)
        found = _figures(tries)
        while len(tries) < MOST_TRIES and any(spread(figures) > FAR_APART for figures in found.values()):
            tries = [*tries, *repeat(component, _longest(tries[-1]), wanted)]
            found = _figures(tries)
        return found

    def refusal(self, component: StepComponent) -> str | None:
        """Give the first order for a component that may be impossible; return why it is, None where it is not."""
        reasons = [one.refused for one in self._order(CalibrationOrder(component, 0)) if one.refused is not None]
        return next((reason for reason in reasons if reason), "it could not be opened") if reasons else None

    def _for_equal_time(self, component: StepComponent, _guess: float, seconds: float) -> list[Sequence[CalibrationResult]]:
        once = self._order(CalibrationOrder(component, 1, seconds / 2))
        count = 1 if min(found.count for found in once) > 1 else 2
        return [once, self._order(CalibrationOrder(component, count, seconds / 2))]

    def _for_equal_count(self, component: StepComponent, guess: float, seconds: float) -> list[Sequence[CalibrationResult]]:
        """The guess comes from a repetition that was perhaps not warm, so that the first try may turn out short; it is made again then."""
        tries: list[Sequence[CalibrationResult]] = []
        while len(tries) < 2:
            count = max(2, min(MOST_REPETITIONS, round(seconds / 2 / max(guess, 1e-9))))
            found = self._order(CalibrationOrder(component, count))
            guess = _longest(found)
            if tries or guess * count >= seconds / 8 or count == MOST_REPETITIONS:
                tries.append(found)
        return tries

    def _order(self, order: CalibrationOrder) -> Sequence[CalibrationResult]:
        """Give an order to every leading task and return the answers of all. Raises RunFailedError where they do not come in time."""
        self._sequence += 1
        message = calibration_to_message(order)
        self._leaders.send(Message(message.kind, {**message.fields, "sequence": self._sequence}))
        found: list[CalibrationResult] = []
        waiting, deadline = len(self._leaders), time.monotonic() + self._timeout_seconds
        while waiting:
            answer = self._leaders.receive(1.0)
            if answer is not None and answer[1].kind == "calibrated":
                found.append(self._understood(*answer, found))
            elif answer is not None and answer[1].kind == "done":
                waiting -= 1
            elif time.monotonic() > deadline:
                raise RunFailedError(f"calibrating {order.component!r} took more than {self._timeout_seconds:g} s (--stall-timeout)")
        if order.count and (not found or any(one.count < order.count or one.seconds <= 0 for one in found)):
            raise RunFailedError(f"calibrating {order.component!r} gave no figures")
        for name, value in ((name, value) for one in found for name, value in one.native.items()):
            self.native.setdefault(name, []).append(value)
        return found

    def _understood(self, leader: int, message: Message, before: Sequence[CalibrationResult]) -> CalibrationResult:
        """Return a worker's figures: its own where every worker leads. Raises RunFailedError where they are of none that is awaited."""
        one = calibrated_from_message(message)
        strange = one.worker >= self._workers or (len(self._leaders) > 1 and one.worker != leader)
        if strange or any(one.worker == other.worker for other in before):
            self._leaders.refuse(leader, f"figures of worker {one.worker}, of which none are awaited")
        return one


def spread(*figures: Figures) -> float:
    """Return how far the middle tries of some components' sum lie apart, relative to it."""
    return sum(high - low for low, high in (each.middle_pair for each in figures)) / sum(each.seconds for each in figures)


def _longest(found: Sequence[CalibrationResult]) -> float:
    """Return the seconds of a repetition on the slowest worker."""
    return max(one.seconds / one.count for one in found)


def _figures(tries: Sequence[Sequence[CalibrationResult]]) -> dict[int, Figures]:
    """Sort tries by worker; one that is missing in any (it was lost) is left out."""
    figures: dict[int, Figures] = {}
    for one in (one for found in tries for one in found):
        figures.setdefault(one.worker, Figures()).tries.append(one.seconds / one.count)
    return {worker: each for worker, each in figures.items() if len(each.tries) == len(tries)}


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
    """Conduct a calibration; return what ``calibration.json`` holds (docs/run-directory.md explains each field).

    `node_of_worker` says on which node each of the job's workers is, `batch_size` how many examples a worker's batch
    has, where that is not the job's; `exchanges` are those of the backend. `compiling_seconds` are those that compiling steps took at
    most, where they are compiled.

    Raises RunFailedError where a task dies or does not answer, InterruptedRunError where the user wants an end.
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
    """Return why steps on half a batch are not repeated, None where they are."""
    if batch_size < 2:
        return "a batch of one example has no half"
    if compiling_seconds is not None and compiling_seconds > MOST_COMPILING_SECONDS:
        took = f"compiling steps for another batch may take the {compiling_seconds:.0f} s of the run's own"
        return f"{took}, and it is done where that is {MOST_COMPILING_SECONDS:g} s at most"
    return None


def _reason_not_to_try(job: Job, exchanges: Collection[Exchange], communicate: ByWorker) -> str | None:
    """Return why the direct exchange of a sync job is not tried, None where it is; a task may still refuse."""
    if "direct" not in exchanges:
        return f"backend {job.backend} does not support it"
    if job.workers > MOST_RANKS:
        return f"it is for {MOST_RANKS} workers at most, and here are {job.workers}"
    if job.device == "gpu":
        return "it is for CPUs"
    longest = max((figures.seconds for figures in communicate.values()), default=0.0)
    if longest > MOST_TRIED_SECONDS:
        return f"the exchange takes {longest:.1f} s, and it is tried where that is {MOST_TRIED_SECONDS:g} s at most"
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
        "communicate_seconds": seconds("communicate"),
        "message_seconds": seconds("message"),
        **{f"{component}_seconds": seconds(component) for component in DIRECT_COMPONENTS},
        "direct_spread": spread(components["direct_step"][worker]) if "direct_step" in components else None,
        "spread": spread(components["data"][worker], components["compute"][worker]),
    }
