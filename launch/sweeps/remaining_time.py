"""How long the rest of a sweep takes, judged by the points that are done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.job import DEFAULT_EPOCHS, Job

__all__ = ["Finished", "finished", "seconds_left", "updates"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A point that is done: its job, the time of its start and end, its time on the run clock, its updates, the training examples."""

    job: Job
    around_seconds: float
    run_seconds: float
    steps: int
    examples_per_epoch: float | None


def finished(job: Job, summary: Mapping[str, Any]) -> Finished:
    """Read a run's summary."""
    epoch = summary["examples"] / summary["epochs"] if summary["epochs"] else None
    return Finished(job, summary["total_seconds"] - summary["run_seconds"], summary["run_seconds"], summary["steps"], epoch)


def updates(job: Job, examples_per_epoch: float | None) -> int | None:
    """Return how many updates a job does at most; None where it is given in epochs of unknown size, or of batches of one."""
    if job.steps is not None:
        return job.steps
    if examples_per_epoch is None or job.batch_tokens is not None:
        return None
    batch, size = job.global_batch if job.mode == "sync" else job.per_worker_batch, max(1, round(examples_per_epoch))
    epochs, rest = (job.epochs or DEFAULT_EPOCHS, 0) if job.examples is None else divmod(job.examples, size)
    return epochs * math.ceil(size / batch) + math.ceil(rest / batch)  # the last update of an epoch has what is left of it


def seconds_left(done: Sequence[Finished], missing: Sequence[Job]) -> float:
    """Return an estimate for the missing points, from at least one that is done.

    Each takes as long as the point that is most like it, the latest of such, with the time on the run clock scaled by the updates: those it
    may do over those that were done, or, where both end at the same target, over those the other might have done.
    """
    return math.fsum(_seconds(done, job) for job in missing)


def _seconds(done: Sequence[Finished], job: Job) -> float:
    like = max(reversed(done), key=lambda point: _alike(point.job, job))
    planned = updates(job, like.examples_per_epoch)
    same_target = job.until is not None and job.until == like.job.until
    did = updates(like.job, like.examples_per_epoch) if same_target else like.steps
    scale = planned / did if planned is not None and did else 1.0
    return like.around_seconds + like.run_seconds * scale


def _alike(one: Job, other: Job) -> int:
    return sum(getattr(one, name) == getattr(other, name) for name in Job.model_fields)
