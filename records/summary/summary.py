"""``summary.json``: the comparable figures of a run, computed from its records and its clock alone."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.job import Job
from ...core.units import Target
from ...metrics import LOSS, MetricInfo
from ...metrics.ranking import Improvements
from ...metrics.recorded import read_metrics
from ..schema import Clock, EvalRecord, EventRecord, StepRecord
from ..store.run_directory import RunReader, RunState
from ..store.summary_schema import training_rates
from .node_usage import Lines, network_source, per_node
from .segments import last_segment, resumed_seconds
from .time_shares import StepTimes, time_shares

__all__ = ["FINAL_LOSS_UPDATES", "job_fields", "quantile", "read_job", "summarise"]

FINAL_LOSS_UPDATES = 20
"""`final_train_loss` is the mean over this many last updates (or all, where there are fewer): a single batch's loss is mostly noise."""

LEAST_ASYNC_GROUPS = 10
"""An async run that was profiled has a speed where each worker made so many groups of updates beside: then it is a tenth off at most."""


def quantile(values: NDArray[np.float64], weights: NDArray[np.int64], share: float) -> float:
    """Return the smallest value that at least `share` (0 to 1) of the weighted sample does not exceed (nearest rank; no interpolation).

    `values` and `weights` have one length, at least 1.
    """
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    position = int(np.searchsorted(reached, math.ceil(share * int(reached[-1]) - 1e-9), side="left"))
    return float(values[order][position])


class _Steps:
    """Running figures over the step records, in memory that does not grow with the losses."""

    def __init__(self, workers: int) -> None:
        self.steps = self.examples = self.non_finite = 0
        self.profiled_steps = self.profiled_examples = 0
        self.profile_seconds = 0.0
        self._newest = self._newest_finite = -1  # updates; those of several workers arrive in any order
        self._seconds, self._counts = array("d"), array("q")
        self._last: deque[float] = deque(maxlen=FINAL_LOSS_UPDATES)
        self._staleness: dict[int, int] = {}
        self.by_worker = [0] * workers
        self.data_wait_seconds: float | None = None
        self.network_wait_seconds: float | None = None

    def add(self, record: StepRecord) -> None:
        self.steps += record.count
        self.examples += record.examples
        if record.profiled_seconds is None:
            self._add_times(record)
        else:
            self.profiled_steps += record.count
            self.profiled_examples += record.examples
            self.profile_seconds += record.profiled_seconds
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
            self.by_worker += [0] * (record.worker + 1 - len(self.by_worker))  # a segment of the run may have had more workers
            self.by_worker[record.worker] += record.count

    def _add_times(self, record: StepRecord) -> None:
        self._seconds.append(record.seconds / record.count)
        self._counts.append(record.count)
        if record.data_wait_seconds is not None:
            self.data_wait_seconds = (self.data_wait_seconds or 0.0) + record.data_wait_seconds
        if record.network_wait_seconds is not None:
            self.network_wait_seconds = (self.network_wait_seconds or 0.0) + record.network_wait_seconds

    def has_speed(self, job: Job) -> bool:
        """Whether the updates that were not profiled, if any were, are enough to tell a speed.

        Async workers are in the midst of a group each when the trace is written: what they have done of these would count for too much.
        """
        least = LEAST_ASYNC_GROUPS * job.workers if job.mode == "async" else 1
        return not self.profiled_steps or len(self._counts) >= least

    def non_finite_from(self) -> int | None:
        """Return the update from which on no loss was finite; None where the last one was."""
        return self._newest_finite + 1 if self._newest > self._newest_finite else None

    def final_loss(self) -> float | None:
        return sum(self._last) / len(self._last) if self._last else None

    def step_seconds(self) -> dict[str, float] | None:
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
    """Return the evaluation that is best by the headline metric; of equals, that with the lowest loss, then the earliest."""
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
    """Return the scores of the translations at the run's end; those that an earlier end had are of other weights."""
    found = [dict(record.detail) for record in events if record.event == "translated" and record.detail.get("step") == steps]
    return found[-1] if found else None


def _target(until: str | None, evals: Iterable[EvalRecord]) -> dict[str, Any]:
    """Return when the job's target was first reached: the run clock at the end of the evaluation that showed it."""
    if until is None:
        return {"target": None, "target_reached": None, "time_to_target_seconds": None}
    target = Target.parse(until)
    first = next((record for record in evals if target.reached(record.figure(target.metric))), None)
    return {"target": until, "target_reached": first is not None, "time_to_target_seconds": first.time_seconds if first else None}


def _patience(job: Job, infos: Sequence[MetricInfo], evals: Iterable[EvalRecord]) -> dict[str, Any] | None:
    """Return how long a run of limited patience has not improved, and whether that ended it."""
    if not job.patience:
        return None
    info = next((info for info in infos if info.name == job.keep_best), infos[0])
    found = Improvements(info, ((record.step, record.figure(info.name)) for record in evals))
    return {
        "metric": info.name,
        "evaluations": job.patience,
        "without_improvement": found.since,
        "exhausted": found.since >= job.patience,
        "best": found.best,
        "best_step": found.best_step,
    }


def _rate(amount: int, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def job_fields(job: Job, name: str) -> dict[str, Any]:
    """Return what a summary says of the job itself; `name` is the run's."""
    return {
        "run": name,
        "backend": job.backend,
        "mode": job.mode,
        "model": job.model,
        "data": job.data,
        "nodes": job.nodes,
        "workers": job.workers,
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


def _times(clock: Clock) -> dict[str, float]:
    names = ("init_seconds", "train_seconds", "eval_seconds", "checkpoint_seconds", "translate_seconds", "run_seconds", "total_seconds")
    return {name: getattr(clock, name) for name in names}


def read_job(values: Mapping[str, Any]) -> Job:
    """Return the job of a ``job.json``, which may hold more. Raises ValueError where its fields are not those of a job."""
    return Job.model_validate({name: values[name] for name in Job.model_fields if name in values})


def summarise(
    run: RunReader | Path,
    clock: Clock,
    *,
    state: RunState,
    updates_scheduled: int,
    updates_applied: int | None,
    examples_per_epoch: int | None = None,
    nodes_sharing_cores: int | None = None,
    precision_used: str | None = None,
    device_used: str | None = None,
    compiled: bool | None = None,
    synthetic: bool | None = None,
    machines: Sequence[str] | None = None,
    padding_share: float | None = None,
) -> dict[str, Any]:
    """Return what goes into ``summary.json`` (docs/run-directory.md explains each field).

    `updates_scheduled` were handed out, `updates_applied` counted where updates are applied (None where the run ended before they
    could be asked for). `examples_per_epoch` is the size of the training split; without it `epochs` is null. `nodes_sharing_cores` is the
    size of the largest group of nodes that compute on the same cores. `precision_used` is the number format that the workers say they
    computed in, `device_used` the kind of device (``cpu``, ``gpu``) that the workers say they computed on, `compiled` whether they
    compiled what they computed.
    `padding_share` is the padding among the positions that are computed, of text. `synthetic`
    says whether images and labels are random (`DataInfo.synthetic`). `machines` tells apart the machines of the
    nodes, in node order.
    """
    reader = run if isinstance(run, RunReader) else RunReader(run)
    described = reader.job()
    job = read_job(described)
    steps, times = _Steps(job.workers), StepTimes()
    began_seconds, first_step = last_segment(described)
    for record in reader.steps():
        steps.add(record)
        if record.step >= first_step:  # a calibration is of the last segment
            times.add(record)
    events = list(reader.events())
    evals = [record for record in reader.evals() if record.split == "test"]
    train_seconds, known = max(0.0, clock.train_seconds - steps.profile_seconds), steps.has_speed(job)
    lines = Lines()
    nodes = per_node(lines.counted(reader.system()), job.nodes, clock, resumed_seconds(described), machines)
    summary = {
        "state": state,
        **job_fields(job, reader.name),
        "padding_share": padding_share,
        "synthetic": synthetic,
        "precision_used": precision_used,
        "device_used": device_used,
        "compiled": compiled,
        "resumed": len(resumed_seconds(described)),
        "network_source": network_source(nodes),
        "nodes_sharing_cores": nodes_sharing_cores,
        "steps": steps.steps,
        "updates_scheduled": updates_scheduled,
        "updates_applied": updates_applied,
        "examples": steps.examples,
        "epochs": steps.examples / examples_per_epoch if examples_per_epoch else None,
        **_times(clock),
        "train_seconds": train_seconds,
        "profile_seconds": steps.profile_seconds,
        "profiled_updates": steps.profiled_steps,
        "steps_per_second": _rate(steps.steps - steps.profiled_steps, train_seconds) if known else None,
        "examples_per_second": _rate(steps.examples - steps.profiled_examples, train_seconds) if known else None,
        "step_seconds": steps.step_seconds(),
        "data_wait_seconds": steps.data_wait_seconds,
        "network_wait_seconds": steps.network_wait_seconds,
        "final_train_loss": steps.final_loss(),
        "non_finite_losses": steps.non_finite,
        "non_finite_from_step": steps.non_finite_from(),
        "eval": _evaluation(evals[-1] if evals else None),
        "best_eval": _evaluation(_best(evals, read_metrics(described)[0])),
        "translated": _translated(events, steps.steps),
        **_target(job.until, evals),
        "patience": _patience(job, read_metrics(described), evals),
        "staleness": steps.staleness(),
        "updates_by_worker": steps.by_worker if job.mode == "async" else None,
        "checkpoints": _checkpoints(events),
        **_restarts(events),
        "time_shares": time_shares(reader.calibration(), job.mode, times, clock, began_seconds),
        "samples_thinned": lines.thinned,
    }
    rates = training_rates(summary, nodes)
    return {**summary, "per_node": [{**node, **own} for node, own in zip(nodes, rates, strict=True)]}


def _restarts(events: Sequence[EventRecord]) -> dict[str, Any]:
    """Return how often the run went on by itself, and the seconds of its clock that this took: of work done anew, and of starting.

    A worker that is started anew alone takes none of them, as the others go on: for how long workers were away is a figure of its own.
    """
    lost = [record.detail.get("seconds_lost") or 0.0 for record in events if record.event == "run_restarted"]
    alone, absent_seconds = _absences(events)
    return {
        "restarts": len(lost) + alone,
        "restart_seconds_lost": sum(lost),
        "worker_restarts": alone,
        "worker_absent_seconds": absent_seconds,
    }


def _absences(events: Iterable[EventRecord]) -> tuple[int, float]:
    """Return how often a worker was started anew alone, and the seconds from such losses until it, or all, took part again."""
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


def _checkpoints(events: Iterable[EventRecord]) -> dict[str, Any]:
    """Return how many checkpoints were saved and how many saves failed; the pause of training and the writing of each, the last's bytes."""
    known = list(events)
    saved = [record.detail for record in known if record.event == "checkpoint_saved"]
    stalls, writes = (
        [value for detail in saved if isinstance(value := detail.get(name), int | float)] for name in ("stall_seconds", "seconds")
    )
    return {
        "saved": len(saved),
        "failed": sum(record.event == "checkpoint_failed" for record in known),
        "stall_seconds": {"mean": sum(stalls) / len(stalls), "max": max(stalls)} if stalls else None,
        "write_seconds": {"mean": sum(writes) / len(writes), "max": max(writes)} if writes else None,
        "bytes": saved[-1]["bytes"] if saved else None,
    }
