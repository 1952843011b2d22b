"""A run's time as fractions, in the terms of docs/where-the-time-goes.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...records.time_shares import COMPONENTS

STEP_COMPONENTS = ("compute", "data", "peers", "network")  # all of a step
TRAINING_COMPONENTS = (*STEP_COMPONENTS, "idle")  # async workers may be idle
BESIDE_TRAINING = {
    "evaluating": "eval_seconds",
    "translating": "translate_seconds",
    "saving": "checkpoint_seconds",
    "profiling": "profile_seconds",
}  # other components of a run's clock, and their figures in a summary
SELDOM = ("translating", "profiling")  # most runs have none


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker's step: seconds per update, and the relative spread of its calibration."""

    worker: int
    node: int
    step_seconds: float
    data_seconds: float
    compute_seconds: float
    peers_seconds: float
    communicate_seconds: float
    spread: float
    updates: int | None = None

    @property
    def own_seconds(self) -> float:
        """The worker's own work in a step."""
        return self.data_seconds + self.compute_seconds

    @property
    def fractions(self) -> dict[str, float]:
        """The components of its step as fractions."""
        seconds = (self.compute_seconds, self.data_seconds, self.peers_seconds, self.communicate_seconds)
        return {component: value / self.step_seconds for component, value in zip(STEP_COMPONENTS, seconds, strict=True)}


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the time went, as fractions."""

    step: Mapping[str, float]  # of training, by `STEP_COMPONENTS`; sync: of a median worker, its wait for the slowest, and the rest
    run: Mapping[str, float]  # of the run clock: those, `idle`, and all others; their sum is 1
    uncertainty: Mapping[str, float]  # of each component of `run`, from the spread of the calibration
    slowest: Worker  # worker with the most own time
    slowness: float  # its own time over the median worker's
    slowness_uncertainty: float


def read_workers(summary: Mapping[str, Any]) -> list[Worker]:
    """Return the workers of ``time_shares`` with updates and all components."""
    counts = summary.get("updates_by_worker") or []
    found = []
    for entry in summary["time_shares"]["workers"]:
        if not entry["step_seconds"] or None in [entry[name] for name in COMPONENTS]:
            continue
        known = {name: entry[name] for name in ("worker", "node", "step_seconds", "data_seconds", "compute_seconds", "peers_seconds")}
        updates = counts[entry["worker"]] if entry["worker"] < len(counts) else None
        found.append(Worker(**known, communicate_seconds=entry["communicate_seconds"], spread=entry["spread"] or 0.0, updates=updates))
    return found


def calibrated_segment(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a summary with the clock and updates of the calibrated segment."""
    shares = summary.get("time_shares")
    if not shares or not (shares.get("part_began_seconds") or summary.get("profiled_updates")):
        return summary
    clock = {name: seconds for name, seconds in shares["run"].items() if name != "other_seconds"}
    updates = {worker["worker"]: worker["updates"] for worker in shares["workers"]}
    by_worker = [updates.get(worker) or 0 for worker in range(summary["workers"])] if summary["mode"] == "async" else None
    return {**summary, **clock, "run_seconds": sum(shares["run"].values()), "updates_by_worker": by_worker}


def ordinary(workers: Sequence[Worker]) -> Worker:
    """Return the median worker by own time; of two in the middle the faster."""
    return sorted(workers, key=lambda worker: worker.own_seconds)[(len(workers) - 1) // 2]


def around_training(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the fractions of the run clock in training, `BESIDE_TRAINING` and otherwise."""
    beside = {component: summary[name] for component, name in BESIDE_TRAINING.items()}
    seconds = {"training": summary["train_seconds"], **beside}
    whole = max(summary["run_seconds"], sum(seconds.values()))
    fractions = {component: value / whole if whole else 0.0 for component, value in seconds.items()}
    return {**fractions, "other": max(0.0, 1.0 - sum(fractions.values()))}


def read_shares(summary: Mapping[str, Any], workers: Sequence[Worker]) -> Shares:
    """Return the shares of a run from its summary and its workers (at least one)."""
    slowest = max(workers, key=lambda worker: worker.own_seconds)
    usual = ordinary(workers)
    if summary["mode"] == "sync":
        step, idle = _of_a_common_step(workers, usual, slowest), 0.0
    else:
        step, idle = _of_all_workers(summary, workers)
    around = around_training(summary)
    training = around["training"] * (1.0 - idle)
    run = {component: fraction * training for component, fraction in step.items()} | {"idle": around["training"] * idle}
    run |= {component: around[component] for component in BESIDE_TRAINING}
    run["other"] = max(0.0, 1.0 - sum(run.values()))
    uncertain = _uncertainty(step, usual, slowest, mode=summary["mode"], alone=len(workers) == 1)
    uncertainty = {component: uncertain.get(component, 0.0) * training for component in run}
    slowness = slowest.own_seconds / usual.own_seconds if usual.own_seconds else 1.0
    doubt = slowness * (slowest.spread + usual.spread) if len(workers) > 1 else 0.0
    return Shares(step, run, uncertainty, slowest, slowness, doubt)


def _uncertainty(step: Mapping[str, float], usual: Worker, slowest: Worker, *, mode: str, alone: bool) -> dict[str, float]:
    if alone and mode == "sync":
        return dict.fromkeys(("compute", "data"), usual.spread * step["data"])
    own = step["compute"] + step["data"]
    calibrated = {component: usual.spread * step[component] for component in ("compute", "data")}
    if mode == "async":
        return {**calibrated, "network": usual.spread * own}
    left = slowest.spread * (own + step["peers"])
    return {**calibrated, "peers": usual.spread * own + left, "network": left}


def _of_a_common_step(workers: Sequence[Worker], usual: Worker, slowest: Worker) -> dict[str, float]:
    seconds = {
        "compute": usual.compute_seconds,
        "data": usual.data_seconds,
        "peers": slowest.own_seconds - usual.own_seconds,
        "network": sum(worker.communicate_seconds for worker in workers) / len(workers),
    }
    return _normalised(seconds)


def _of_all_workers(summary: Mapping[str, Any], workers: Sequence[Worker]) -> tuple[dict[str, float], float]:
    seconds = dict.fromkeys(STEP_COMPONENTS, 0.0)
    busy = 0.0
    for worker in workers:
        updates = 1 if worker.updates is None else worker.updates
        busy += updates * worker.step_seconds
        for component, fraction in worker.fractions.items():
            seconds[component] += updates * worker.step_seconds * fraction
    whole = len(workers) * summary["train_seconds"]
    known = all(worker.updates is not None for worker in workers) and whole > 0
    return _normalised(seconds), max(0.0, 1.0 - busy / whole) if known else 0.0


def idle_fraction(summary: Mapping[str, Any]) -> float:
    """Return the fraction of the last segment's training without steps for async workers."""
    if summary["mode"] == "sync" or not summary.get("time_shares"):
        return 0.0
    segment = calibrated_segment(summary)
    workers = read_workers(segment)
    return _of_all_workers(segment, workers)[1] if workers else 0.0


def _normalised(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values())
    return {component: value / whole if whole else 0.0 for component, value in seconds.items()}


def node_fractions(workers: Sequence[Worker], node: int) -> dict[str, float] | None:
    """Return the fractions of a node's steps over its workers; None without updates."""
    own = [worker for worker in workers if worker.node == node]
    if not own:
        return None
    names = ("compute_seconds", "data_seconds", "peers_seconds", "communicate_seconds")
    weights = [1 if worker.updates is None else worker.updates for worker in own]
    sums = [sum(weight * getattr(worker, name) for weight, worker in zip(weights, own, strict=True)) for name in names]
    return _normalised(dict(zip(STEP_COMPONENTS, sums, strict=True)))
