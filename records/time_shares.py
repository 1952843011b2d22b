"""Components of a step by worker and node (docs/where-the-time-goes.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .store.schema import Clock, StepRecord, SystemRecord

COMPONENTS = ("data_seconds", "compute_seconds", "peers_seconds", "communicate_seconds")  # their sum is `step_seconds`
_CLOCK = ("run_seconds", "train_seconds", "eval_seconds", "checkpoint_seconds", "translate_seconds")
Shares = dict[str, Any]


class StepTimes:
    """Times of a segment's updates, by worker in async mode.

    Without profiled and first groups, as the first plan is short.
    """

    def __init__(self) -> None:
        self.profile_seconds = 0.0
        self._first: dict[int | None, tuple[float, int]] = {}
        self._later: dict[int | None, tuple[float, int]] = {}
        self.waited: dict[str, float | None] = dict.fromkeys(("data_wait_seconds", "network_wait_seconds"))

    def add(self, record: StepRecord) -> None:
        """Add a group of updates."""
        if record.profiled_seconds is not None:
            self.profile_seconds += record.profiled_seconds
            return
        if record.worker not in self._first:
            self._first[record.worker] = (record.seconds, record.count)
        else:
            seconds, count = self._later.get(record.worker, (0.0, 0))
            self._later[record.worker] = (seconds + record.seconds, count + record.count)
        for name, before in self.waited.items():
            if (waited := getattr(record, name)) is not None:
                self.waited[name] = (before or 0.0) + waited

    def seconds(self, worker: int) -> float | None:
        """Return the seconds per update of a worker, None without updates."""
        key = worker if worker in self._first else None
        timed = self._later.get(key) or self._first.get(key)
        return None if timed is None else timed[0] / timed[1]

    def updates(self, worker: int) -> int:
        """Return a worker's updates without profiled ones."""
        key = worker if worker in self._first else None
        return sum(times.get(key, (0.0, 0))[1] for times in (self._first, self._later))

    def waits(self) -> dict[str, float | None]:
        """Return the framework's measured waits, in seconds per update."""
        made = sum(count for times in (self._first, self._later) for _, count in times.values())
        return {name: None if seconds is None or not made else seconds / made for name, seconds in self.waited.items()}


def time_shares(
    calibration: Mapping[str, Any] | None, mode: str, times: StepTimes, clock: Clock, part_began_seconds: float = 0.0
) -> Shares | None:
    """Return a summary's ``time_shares``, of the run's last segment; None without calibration."""
    if calibration is None:
        return None
    measured: Sequence[Mapping[str, Any]] = calibration["workers"]
    steps = {worker["worker"]: times.seconds(worker["worker"]) for worker in measured}
    part = _waited_part(measured, mode, times.waits()["data_wait_seconds"])
    costs = {
        worker["worker"]: (part * worker["data_seconds"], _computing(worker, steps[worker["worker"]], calibration)) for worker in measured
    }
    slowest = max((sum(cost) for cost in costs.values()), default=0.0) if mode == "sync" else None
    alone = len(measured) == 1
    workers = [
        {
            "worker": worker["worker"],
            "node": worker["node"],
            "updates": times.updates(worker["worker"]),
            "step_seconds": steps[worker["worker"]],
            **_components(steps[worker["worker"]], *costs[worker["worker"]], slowest, alone=alone),
            "spread": worker["spread"],
        }
        for worker in measured
    ]
    return {
        "method": "calibration",
        "part_began_seconds": part_began_seconds,
        "overlap_fraction": None if slowest is None else _overlap(measured, steps, slowest),
        "run": _run(clock, times.profile_seconds),
        "workers": workers,
        "nodes": _nodes(workers),
        "native": {**times.waits(), **calibration.get("native", {})},
    }


def _waited_part(measured: Sequence[Mapping[str, Any]], mode: str, waited: float | None) -> float:
    """Return the awaited fraction of calibrated data time.

    On rank 0 in sync mode, else on all; 1 if unknown.
    """
    calibrated = [worker["data_seconds"] for worker in measured if mode == "async" or worker["worker"] == 0]
    read = sum(calibrated) / len(calibrated) if calibrated else 0.0
    return 1.0 if waited is None or read <= 0 else min(1.0, waited / read)


def _computing(worker: Mapping[str, Any], step: float | None, calibration: Mapping[str, Any]) -> float:
    """Return the computing time in a step, as calibrated.

    At most twice the half batch's where other programs disturbed it.
    """
    seconds: float = worker["compute_seconds"]
    half: float | None = worker.get("half_compute_seconds")
    if step is None or seconds <= step or not half:
        return seconds
    bound: float = half * calibration["batch_size"] / calibration["half_batch_size"]
    return min(seconds, bound)


def _components(step: float | None, data: float, compute: float, slowest: float | None, *, alone: bool) -> Shares:
    """Return the components of a worker's step, its work scaled down to the step.

    `slowest` is the longest work of sync workers; an async worker waits for the parameter server. The rest of the step of a sync worker
    that is `alone` counts as computing. Rounded, the work may exceed the step by the last digit.
    """
    if step is None:
        return dict.fromkeys(COMPONENTS)
    scale = min(1.0, step / (data + compute)) if data + compute > 0 else 1.0
    data, compute = data * scale, compute * scale
    peers, communicate = 0.0, max(0.0, step - data - compute)
    if slowest is not None and alone:
        compute, communicate = max(0.0, step - data), 0.0
    elif slowest is not None:
        busy = data + compute
        peers, communicate = max(0.0, min(step, slowest) - busy), max(0.0, step - max(slowest, busy))
    return dict(zip(COMPONENTS, (data, compute, peers, communicate), strict=True))


def _overlap(measured: Sequence[Mapping[str, Any]], steps: Mapping[int, float | None], slowest: float) -> float | None:
    """Return the fraction of the exchange, timed by itself, that overlaps with computing."""
    exchanges = [worker["communicate_seconds"] for worker in measured if worker["communicate_seconds"] is not None]
    step = next((seconds for seconds in steps.values() if seconds is not None), None)
    if not exchanges or step is None:
        return None
    whole = sum(exchanges) / len(exchanges)
    return min(1.0, max(0.0, 1.0 - max(0.0, step - slowest) / whole)) if whole > 0 else None


def _run(clock: Clock, profile_seconds: float) -> dict[str, float]:
    spent = {name: getattr(clock, name) - clock.earlier.get(name, 0.0) for name in _CLOCK}
    run_seconds = spent.pop("run_seconds")
    spent |= {"train_seconds": max(0.0, spent["train_seconds"] - profile_seconds), "profile_seconds": profile_seconds}
    return {**spent, "other_seconds": max(0.0, run_seconds - sum(spent.values()))}


def _nodes(workers: Sequence[Shares]) -> list[Shares]:
    shares = []
    for node in sorted({worker["node"] for worker in workers}):
        members = [worker for worker in workers if worker["node"] == node and worker["step_seconds"] is not None]
        weights = [worker["updates"] for worker in members]
        figures: Shares = {}
        for name in ("step_seconds", *COMPONENTS, "spread"):
            products = (weight * worker[name] for weight, worker in zip(weights, members, strict=True))
            figures[name] = sum(products) / sum(weights) if weights else None
        shares.append({"node": node, **figures})
    return shares


def resumed_seconds(described: Mapping[str, Any]) -> list[float]:
    """Return the run times in seconds at which a ``job.json``'s run was resumed.

    Without undone resumptions.
    """
    resumptions: list[float] = []
    for segment in described.get("segments", ())[1:]:
        resumptions = [*(seconds for seconds in resumptions if seconds < segment["run_seconds"]), segment["run_seconds"]]
    return resumptions


def last_segment(described: Mapping[str, Any]) -> tuple[float, int]:
    """Return the last segment's start, on the run clock and in steps; zeros if never resumed."""
    segments = described.get("segments", ())
    return (segments[-1]["run_seconds"], segments[-1].get("step", 0)) if len(segments) > 1 else (0.0, 0)


def nodes_of_last_segment(described: Mapping[str, Any]) -> int:
    """Return the nodes of the last segment, fewer than the job's after a reduced resume."""
    changed = (described.get("segments") or [{}])[-1].get("changed", {}).get("nodes")
    now = changed[-1] if isinstance(changed, list) and changed else None
    nodes: int = described.get("nodes", 1)  # the job's default
    return now if isinstance(now, int) and 1 <= now <= nodes else nodes


class SegmentTracker:
    """Segments of the samples of a run; pass all nodes' samples in record order.

    The driver stamps samples on arrival, so times never fall in a segment. Without a named segment the next one starts for all nodes when
    time falls after the current one's start, or passes the next one's.
    """

    def __init__(self, resumed_seconds: Sequence[float]) -> None:
        """`resumed_seconds` are the run times of resumptions, rising."""
        self._next = [*resumed_seconds]
        self._began_seconds = 0.0
        self._last_seconds = -math.inf

    def began_seconds(self, time_seconds: float, recorded: float | None) -> float:
        """Return the start of the sample's segment on the run clock.

        `recorded` is that of the record.
        """
        if recorded is not None:
            self._began_seconds = recorded
            self._next = [seconds for seconds in self._next if seconds > recorded]
        elif self._next and (time_seconds < self._last_seconds > self._began_seconds or time_seconds > self._next[0]):
            self._began_seconds = self._next.pop(0)
        self._last_seconds = time_seconds
        return self._began_seconds


def with_segments(samples: Iterable[SystemRecord], resumed_seconds: Sequence[float]) -> Iterator[SystemRecord]:
    """Yield the samples with their segments, also of older records (`SegmentTracker`)."""
    segments = SegmentTracker(resumed_seconds)
    for record in samples:
        began = segments.began_seconds(record.time_seconds, record.part_began_seconds)
        yield record if record.part_began_seconds is not None else replace(record, part_began_seconds=began)
