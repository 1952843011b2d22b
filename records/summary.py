"""``summary.json``: comparable figures of a run, from its records and clock."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.job import Job
from ..core.units import Target
from ..metrics import LOSS, MetricInfo
from ..metrics.base import Improvements, read_metrics
from .node_usage import Lines, network_source, per_node
from .store.run_directory import RunReader, RunState
from .store.schema import Clock, EvalRecord, EventRecord, StepRecord
from .store.summary_schema import training_rates
from .time_shares import StepTimes, last_segment, resumed_seconds, time_shares

FINAL_LOSS_UPDATES = 20  # last updates in `final_train_loss`: a single batch's loss is mostly noise
MIN_ASYNC_GROUPS = 10  # groups per worker for the speed of a profiled async run, within a tenth


def quantile(values: NDArray[np.float64], weights: NDArray[np.int64], share: float) -> float:
    """Return a quantile of a weighted, non-empty sample by nearest rank; `share` is 0 to 1."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    position = int(np.searchsorted(reached, math.ceil(share * int(reached[-1]) - 1e-9), side="left"))
    return float(values[order][position])


class _Steps(StepTimes):
    """Figures over step records, in bounded memory."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.steps = self.examples = self.non_finite = 0
        self.profiled_steps = self.profiled_examples = 0
        self._newest = self._newest_finite = -1  # updates, which arrive in any order of workers
        self._seconds, self._counts = array("d"), array("q")
        self._last: deque[float] = deque(maxlen=FINAL_LOSS_UPDATES)
        self._staleness: dict[int, int] = {}
        self.by_worker = [0] * workers

    def add(self, record: StepRecord) -> None:
        super().add(record)
        self.steps += record.count
        self.examples += record.examples
        if record.profiled_seconds is None:
            self._seconds.append(record.seconds / record.count)
            self._counts.append(record.count)
        else:
            self.profiled_steps += record.count
            self.profiled_examples += record.examples
        self._last.extend(record.losses)
        self._newest = max(self._newest, record.step + record.count - 1)
        if math.isfinite(sum(record.losses)):
            self._newest_finite = max(self._newest_finite, record.step + record.count - 1)
        else:
            finite = [math.isfinite(loss) for loss in record.losses]
            self.non_finite += finite.count(False)
            self._newest_finite = max([self._newest_finite, *(record.step + index for index, known in enumerate(finite) if known)])
        if record.staleness is not None:
            for stale in record.staleness:
                self._staleness[stale] = self._staleness.get(stale, 0) + 1
        if record.worker is not None:
            self.by_worker += [0] * (record.worker + 1 - len(self.by_worker))  # earlier segments may have had more workers
            self.by_worker[record.worker] += record.count

    def figures(self, job: Job, clock: Clock) -> dict[str, Any]:
        """Return the figures of the steps alone.

        Short async runs have no speed, as groups begun before a trace would distort it.
        """
        train_seconds = max(0.0, clock.train_seconds - self.profile_seconds)
        least = MIN_ASYNC_GROUPS * job.workers if job.mode == "async" else 1
        known = train_seconds > 0 and (not self.profiled_steps or len(self._counts) >= least)
        return {
            "train_seconds": train_seconds,
            "profile_seconds": self.profile_seconds,
            "profiled_updates": self.profiled_steps,
            "steps_per_second": (self.steps - self.profiled_steps) / train_seconds if known else None,
            "examples_per_second": (self.examples - self.profiled_examples) / train_seconds if known else None,
            "step_seconds": self._step_seconds(),
            **self.waited,
            "final_train_loss": sum(self._last) / len(self._last) if self._last else None,
            "non_finite_losses": self.non_finite,
            "non_finite_from_step": self._newest_finite + 1 if self._newest > self._newest_finite else None,
        }

    def _step_seconds(self) -> dict[str, float] | None:
        if not self._counts:
            return None
        seconds, counts = np.array(self._seconds), np.array(self._counts)
        return {
            "p50": quantile(seconds, counts, 0.5),
            "p95": quantile(seconds, counts, 0.95),
            "max": float(seconds.max()),
            "group_size": quantile(counts.astype(np.float64), counts, 0.5),
        }

    def staleness(self) -> dict[str, float] | None:
        if not self._staleness:
            return None
        values = np.array(list(self._staleness.keys()), dtype=np.float64)
        counts = np.array(list(self._staleness.values()), dtype=np.int64)
        return {"mean": float(values @ counts / counts.sum()), "p95": quantile(values, counts, 0.95), "max": float(values.max())}


def _evaluation(record: EvalRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    names = ("split", "step", "epoch", "time_seconds", "examples", "loss")
    return {**{name: getattr(record, name) for name in names}, **record.metrics}


def _best(evals: Iterable[EvalRecord], headline: MetricInfo) -> EvalRecord | None:
    """Return the best evaluation by the headline metric, then lowest loss, then earliest."""
    best: EvalRecord | None = None
    for record in evals:
        figure = record.figure(headline.name)
        if not math.isfinite(figure):
            continue
        before = None if best is None else best.figure(headline.name)
        if headline.improves(figure, before) or (best is not None and figure == before and LOSS.improves(record.loss, best.loss)):
            best = record
    return best


def _translated(events: Sequence[EventRecord], steps: int) -> dict[str, Any] | None:
    details = [dict(record.detail) for record in events if record.event == "translated" and record.detail.get("step") == steps]
    return details[-1] if details else None


def _target(until: str | None, evals: Iterable[EvalRecord]) -> dict[str, Any]:
    """Return when the target was first reached, on the run clock at the end of that evaluation."""
    if until is None:
        return {"target": None, "target_reached": None, "time_to_target_seconds": None}
    target = Target.parse(until)
    first = next((record for record in evals if target.reached(record.figure(target.metric))), None)
    return {"target": until, "target_reached": first is not None, "time_to_target_seconds": first.time_seconds if first else None}


def _patience(job: Job, infos: Sequence[MetricInfo], evals: Iterable[EvalRecord]) -> dict[str, Any] | None:
    if not job.patience:
        return None
    info = next((info for info in infos if info.name == job.keep_best), infos[0])
    improvements = Improvements(info, ((record.step, record.figure(info.name)) for record in evals))
    return {
        "metric": info.name,
        "evaluations": job.patience,
        "without_improvement": improvements.since,
        "exhausted": improvements.since >= job.patience,
        "best": improvements.best,
        "best_step": improvements.best_step,
    }


def job_fields(job: Job, name: str) -> dict[str, Any]:
    """Return the summary's fields about the job; `name` is the run's."""
    return {
        "run": name,
        **{field: getattr(job, field) for field in ("backend", "mode", "model", "data", "nodes", "workers")},
        "parameter_servers": job.ps if job.mode == "async" else None,
        "batch_size": job.per_worker_batch,
        "global_batch_size": job.global_batch,
        "batch_tokens": job.batch_tokens,
        "optimizer": job.optimizer,
        "learning_rate": job.lr,
        "seed": job.seed,
        "precision": job.precision,
        "exchange": job.exchange if job.mode == "sync" and job.workers > 1 else None,
    }


_TIMES = ("init_seconds", "train_seconds", "eval_seconds", "checkpoint_seconds", "translate_seconds", "run_seconds", "total_seconds")


def read_job(values: Mapping[str, Any]) -> Job:
    """Return a ``job.json``'s job, ignoring other fields. Raises ValueError for invalid ones."""
    return Job.model_validate({name: values[name] for name in Job.model_fields if name in values})


@dataclass(frozen=True)
class DriverFacts:
    """Facts that records do not have.

    The largest group of nodes on the same cores, workers' reports, machines by node, and facts of the data.
    """

    nodes_sharing_cores: int | None = None
    padding_share: float | None = None
    synthetic: bool | None = None
    precision_used: str | None = None
    device_used: str | None = None
    compiled: bool | None = None
    model_method: str | None = None
    adapter_cost: float | None = None
    machines: Sequence[str] | None = None


def summarise(
    run: RunReader | Path,
    clock: Clock,
    *,
    state: RunState,
    updates_scheduled: int,
    updates_applied: int | None,
    examples_per_epoch: int | None = None,
    facts: DriverFacts | None = None,
) -> dict[str, Any]:
    """Return the content of ``summary.json`` (docs/run-directory.md explains each field).

    `updates_applied` is None where the run ended before the query. Without `examples_per_epoch` epochs are null.
    """
    facts = facts or DriverFacts()
    reader = run if isinstance(run, RunReader) else RunReader(run)
    described = reader.job()
    job, infos = read_job(described), read_metrics(described)
    steps, times = _Steps(job.workers), StepTimes()
    began_seconds, first_step = last_segment(described)
    for record in reader.steps():
        steps.add(record)
        if record.step >= first_step:  # calibration is of the last segment
            times.add(record)
    events = list(reader.events())
    evals = [record for record in reader.evals() if record.split == "test"]
    lines = Lines()
    resumed = resumed_seconds(described)
    nodes = per_node(lines.counted(reader.system()), job.nodes, clock, resumed, facts.machines)
    summary = {
        "state": state,
        **job_fields(job, reader.name),
        **{name: value for name, value in vars(facts).items() if name != "machines"},
        "resumed": len(resumed),
        "network_source": network_source(nodes),
        "nodes_sharing_cores": facts.nodes_sharing_cores,
        "steps": steps.steps,
        "updates_scheduled": updates_scheduled,
        "updates_applied": updates_applied,
        "examples": steps.examples,
        "epochs": steps.examples / examples_per_epoch if examples_per_epoch else None,
        **{name: getattr(clock, name) for name in _TIMES},
        **steps.figures(job, clock),
        "eval": _evaluation(evals[-1] if evals else None),
        "best_eval": _evaluation(_best(evals, infos[0])),
        "translated": _translated(events, steps.steps),
        **_target(job.until, evals),
        "patience": _patience(job, infos, evals),
        "staleness": steps.staleness(),
        "updates_by_worker": steps.by_worker if job.mode == "async" else None,
        "checkpoints": _checkpoints(events),
        **_restarts(events),
        "time_shares": time_shares(reader.calibration(), job.mode, times, clock, began_seconds),
        "samples_thinned": lines.thinned,
    }
    rates = training_rates(summary, nodes)
    return {**summary, "per_node": [{**node, **node_rates} for node, node_rates in zip(nodes, rates, strict=True)]}


def _restarts(events: Sequence[EventRecord]) -> dict[str, Any]:
    """Return restarts, seconds of repeated work and starting, and absences of restarted workers."""
    lost = [record.detail.get("seconds_lost") or 0.0 for record in events if record.event == "run_restarted"]
    alone, absent_seconds = _absences(events)
    return {
        "restarts": len(lost) + alone,
        "restart_seconds_lost": sum(lost),
        "worker_restarts": alone,
        "worker_absent_seconds": absent_seconds,
    }


def _absences(events: Iterable[EventRecord]) -> tuple[int, float]:
    """Return the restarts of single workers, and the seconds of absence.

    Each is absent until it, or all, took part again.
    """
    since: dict[Any, float] = {}
    count, seconds = 0, 0.0
    for record in events:
        task = str(record.detail.get("task"))
        if record.event == "task_failed":
            count += 1
            since.setdefault(task, record.time_seconds)
        elif record.event == "task_restarted" and task in since:
            seconds += record.time_seconds - since.pop(task)
        elif record.event in ("run_restarted", "run_ended"):
            seconds += sum(record.time_seconds - moment for moment in since.values())
            since.clear()
    return count, seconds


def _checkpoints(events: Sequence[EventRecord]) -> dict[str, Any]:
    saved = [record.detail for record in events if record.event == "checkpoint_saved"]

    def mean_and_max(name: str) -> dict[str, float] | None:
        values = [value for detail in saved if isinstance(value := detail.get(name), int | float)]
        return {"mean": sum(values) / len(values), "max": max(values)} if values else None

    return {
        "saved": len(saved),
        "failed": sum(record.event == "checkpoint_failed" for record in events),
        "stall_seconds": mean_and_max("stall_seconds"),
        "write_seconds": mean_and_max("seconds"),
        "bytes": saved[-1]["bytes"] if saved else None,
    }
