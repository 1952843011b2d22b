"""Where did the time go? A step's components on each worker and node, from the calibration, the step records and the clock.

docs/where-the-time-goes.md has the definitions in words. They are the same on every backend. All seconds are those of one update of the
worker, except in `run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..schema import Clock, StepRecord

__all__ = ["COMPONENTS", "StepTimes", "time_shares"]

COMPONENTS = ("data_seconds", "compute_seconds", "peers_seconds", "communicate_seconds")
"""What a worker's step consists of; they sum to its `step_seconds`."""

_CLOCK = ("run_seconds", "train_seconds", "eval_seconds", "checkpoint_seconds", "translate_seconds")

Shares = dict[str, Any]


class StepTimes:
    """What an update took, from the step records of one segment of a run: of each worker in async mode, of all together in sync mode.

    The first group of each is left out where there are others: that is the short plan which a run begins with. So are those that were
    profiled; `profile_seconds` are those of the segment that profiling took.
    """

    def __init__(self) -> None:
        self.profile_seconds = 0.0
        self._first: dict[int | None, tuple[float, int]] = {}
        self._later: dict[int | None, tuple[float, int]] = {}
        self._waited: dict[str, float | None] = dict.fromkeys(("data_wait_seconds", "network_wait_seconds"))

    def add(self, record: StepRecord) -> None:
        """Take account of a group of updates."""
        if record.profiled_seconds is not None:
            self.profile_seconds += record.profiled_seconds
            return
        if record.worker not in self._first:
            self._first[record.worker] = (record.seconds, record.count)
        else:
            seconds, count = self._later.get(record.worker, (0.0, 0))
            self._later[record.worker] = (seconds + record.seconds, count + record.count)
        for name, before in self._waited.items():
            if (waited := getattr(record, name)) is not None:
                self._waited[name] = (before or 0.0) + waited

    def seconds(self, worker: int) -> float | None:
        """Return the seconds of an update of a worker, None where it made none."""
        key = worker if worker in self._first else None
        found = self._later.get(key) or self._first.get(key)
        return None if found is None else found[0] / found[1]

    def updates(self, worker: int) -> int:
        """Return how many updates a worker took part in that were not profiled."""
        key = worker if worker in self._first else None
        return sum(times.get(key, (0.0, 0))[1] for times in (self._first, self._later))

    def waits(self) -> dict[str, float | None]:
        """Return the waits that the framework measured, in seconds per update."""
        made = sum(count for times in (self._first, self._later) for _, count in times.values())
        return {name: None if seconds is None or not made else seconds / made for name, seconds in self._waited.items()}


def time_shares(
    calibration: Mapping[str, Any] | None, mode: str, times: StepTimes, clock: Clock, part_began_seconds: float = 0.0
) -> Shares | None:
    """Return a summary's ``time_shares``, None without a calibration.

    They are those of the run's last segment, which is what was calibrated: `times` are of its steps, and it began at `part_began_seconds`.
    """
    if calibration is None:
        return None
    measured: Sequence[Mapping[str, Any]] = calibration["workers"]
    steps = {one["worker"]: times.seconds(one["worker"]) for one in measured}
    part = _waited_part(measured, mode, times.waits()["data_wait_seconds"])
    own = {one["worker"]: (part * one["data_seconds"], _computing(one, steps[one["worker"]], calibration)) for one in measured}
    if mode == "sync":
        slowest = max((sum(each) for each in own.values()), default=0.0)
        alone = len(measured) == 1
        components = {worker: _sync(steps[worker], *own[worker], slowest, alone=alone) for worker in own}
        overlap = _overlap(measured, steps, slowest)
    else:
        components = {worker: _async(steps[worker], *own[worker]) for worker in own}
        overlap = None
    workers = [_worker(one, steps[one["worker"]], components[one["worker"]], times) for one in measured]
    return {
        "method": "calibration",
        "part_began_seconds": part_began_seconds,
        "overlap_fraction": overlap,
        "run": _run(clock, times.profile_seconds),
        "workers": workers,
        "nodes": _nodes(workers),
        "native": {**times.waits(), **calibration.get("native", {})},
    }


def _waited_part(measured: Sequence[Mapping[str, Any]], mode: str, waited: float | None) -> float:
    """Return the part of the calibrated reading of data that the run waited for, where it measured that: rank 0 in sync mode, else all."""
    calibrated = [one["data_seconds"] for one in measured if mode == "async" or one["worker"] == 0]
    read = sum(calibrated) / len(calibrated) if calibrated else 0.0
    return 1.0 if waited is None or read <= 0 else min(1.0, waited / read)


def _computing(one: Mapping[str, Any], step: float | None, calibration: Mapping[str, Any]) -> float:
    """Return what a worker computes in a step: as it was calibrated, unless the run and the half batch both contradict that.

    Computing is a fixed cost and one that grows with the batch, so that a batch of twice the examples takes at most twice as long. Where a
    worker was calibrated at more than that, and at more than the whole step that it made so often, other programs had its core for that
    moment, and the bound stands for it.
    """
    seconds: float = one["compute_seconds"]
    half: float | None = one.get("half_compute_seconds")
    if step is None or seconds <= step or not half:
        return seconds
    bound: float = half * calibration["batch_size"] / calibration["half_batch_size"]
    return min(seconds, bound)


def _worker(one: Mapping[str, Any], step: float | None, components: Shares, times: StepTimes) -> Shares:
    updates = times.updates(one["worker"])
    return {"worker": one["worker"], "node": one["node"], "updates": updates, "step_seconds": step, **components, "spread": one["spread"]}


def _sync(step: float | None, data: float, compute: float, slowest: float, *, alone: bool) -> Shares:
    """Return the components of a sync worker's step; `slowest` is the most that any worker needs for its own work.

    What is left of the step of a worker that is `alone` is overhead of its own, and counted as computing.
    """
    if step is None:
        return dict.fromkeys(COMPONENTS)
    data, compute = _within(step, data, compute)
    if alone:
        return _components(data, max(0.0, step - data), 0.0, 0.0)
    own = data + compute
    return _components(data, compute, max(0.0, min(step, slowest) - own), max(0.0, step - max(slowest, own)))


def _async(step: float | None, data: float, compute: float) -> Shares:
    """Return the components of an async worker's step: it waits for no other worker, and for the parameter server while it communicates."""
    if step is None:
        return dict.fromkeys(COMPONENTS)
    data, compute = _within(step, data, compute)
    return _components(data, compute, 0.0, max(0.0, step - data - compute))


def _within(step: float, data: float, compute: float) -> tuple[float, float]:
    """Scale a worker's own work down to the step, where the calibrated figure is more than the step took.

    Rounded, the two together may be more than the step by the last digit.
    """
    scale = min(1.0, step / (data + compute)) if data + compute > 0 else 1.0
    return data * scale, compute * scale


def _components(*seconds: float) -> Shares:
    return dict(zip(COMPONENTS, seconds, strict=True))


def _overlap(measured: Sequence[Mapping[str, Any]], steps: Mapping[int, float | None], slowest: float) -> float | None:
    """Return the fraction of the exchange, timed by itself, that does not show in the step: it is hidden behind computing."""
    exchanges = [one["communicate_seconds"] for one in measured if one["communicate_seconds"] is not None]
    step = next((seconds for seconds in steps.values() if seconds is not None), None)
    if not exchanges or step is None:
        return None
    whole = sum(exchanges) / len(exchanges)
    return min(1.0, max(0.0, 1.0 - max(0.0, step - slowest) / whole)) if whole > 0 else None


def _run(clock: Clock, profile_seconds: float) -> dict[str, float]:
    """Return the components of the run clock, since the last segment of the run began; `profile_seconds` of it were spent on profiling."""
    spent = {name: getattr(clock, name) - clock.earlier.get(name, 0.0) for name in _CLOCK}
    run_seconds = spent.pop("run_seconds")
    spent |= {"train_seconds": max(0.0, spent["train_seconds"] - profile_seconds), "profile_seconds": profile_seconds}
    return {**spent, "other_seconds": max(0.0, run_seconds - sum(spent.values()))}


def _nodes(workers: Sequence[Shares]) -> list[Shares]:
    """Return the means over the workers of each node, by their updates; of a node without updates all null."""
    found = []
    for node in sorted({worker["node"] for worker in workers}):
        own = [worker for worker in workers if worker["node"] == node and worker["step_seconds"] is not None]
        weights = [worker["updates"] for worker in own]
        figures: Shares = {}
        for name in ("step_seconds", *COMPONENTS, "spread"):
            products = (weight * worker[name] for weight, worker in zip(weights, own, strict=True))
            figures[name] = sum(products) / sum(weights) if weights else None
        found.append({"node": node, **figures})
    return found
