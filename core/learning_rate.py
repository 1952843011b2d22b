"""What a job's learning rate starts from, and in words the course that its schedule gives it; `engine.learning_rate` has the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from .job import Job

__all__ = ["base_learning_rate", "explained_schedule"]


def base_learning_rate(job: Job) -> float:
    """Return the learning rate after ``--scale-lr``: lr · (global batch / base batch), its square root, or lr itself.

    The linear rule is that of Goyal et al. 2017 ("Accurate, Large Minibatch SGD"), the square-root rule that of Krizhevsky 2014
    ("One weird trick for parallelizing convolutional neural networks"). In async mode an update sees one worker's batch, so that the
    batch of an update is what the rate is scaled with.
    """
    batch = job.global_batch if job.mode == "sync" else job.per_worker_batch
    ratio = batch / job.base_batch_size
    return job.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[job.scale_lr]


def explained_schedule(job: Job, total_steps: int | None) -> str:
    """Return in words why the learning rate has its shape: its peak and where that is, the warm-up, and what the schedule does after it.

    `total_steps` is the planned number of updates, None where it is not known. Raises KeyError for a schedule without words in `_COURSES`.
    """
    base = f"{base_learning_rate(job):.3g}"
    if job.scale_lr != "none":
        batch = job.global_batch if job.mode == "sync" else job.per_worker_batch
        base += f" (--lr {job.lr:.3g} scaled {job.scale_lr} from batch {job.base_batch_size} to {batch})"
    rest = _COURSES[job.schedule](job, base, total_steps)
    if not job.warmup_steps or job.schedule == "noam":
        return rest
    return f"warm-up (--warmup-steps) raises it evenly over the first {job.warmup_steps:,} updates; {rest}"


def _constant_course(_job: Job, base: str, _total_steps: int | None) -> str:
    return f"constant at {base}"


def _step_course(job: Job, base: str, _total_steps: int | None) -> str:
    every = "epoch" if job.schedule_step_epochs == 1 else f"{job.schedule_step_epochs:g} epochs"
    return f"steps down (--schedule step) from {base}, times {job.schedule_gamma:g} every {every}"


def _cosine_course(_job: Job, base: str, total_steps: int | None) -> str:
    until = "the planned last update" if total_steps is None else f"the planned last update, {total_steps:,}"
    return f"half a cosine (--schedule cosine) from {base} down to 0 at {until}"


def _noam_course(job: Job, base: str, _total_steps: int | None) -> str:
    return (
        f"rises evenly over the first {job.warmup_steps:,} updates (--schedule noam, --warmup-steps), then falls with the root of their "
        f"number; {base} is multiplied by {job.schedule_coefficient:g} and divided by the root of the model's width"
    )


_COURSES: Mapping[str, Callable[[Job, str, int | None], str]] = {
    "constant": _constant_course,
    "step": _step_course,
    "cosine": _cosine_course,
    "noam": _noam_course,
}
"""Each schedule in words: from the job, the rate that it starts from, and the planned number of updates."""
