"""What a job's learning rate starts from, and in words the course that its schedule gives it; `engine.learning_rate` has the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .job import Job

__all__ = ["base_learning_rate", "explained_schedule", "warms_up_itself"]


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
    """Return in words why the learning rate has its shape: its peak and where that is, the warm-up, and what follows it.

    `total_steps` is the planned number of updates, None where it is not known. Raises KeyError for a schedule without a row in `_COURSES`.
    """
    base = f"{base_learning_rate(job):.3g}"
    if job.scale_lr != "none":
        batch = job.global_batch if job.mode == "sync" else job.per_worker_batch
        base += f" (--lr {job.lr:.3g} scaled {job.scale_lr} from batch {job.base_batch_size} to {batch})"
    course = _COURSES[job.schedule]
    rest = course.words(job, base, total_steps)
    if not job.warmup_steps or course.warms_up_itself:
        return rest
    return f"linear warm-up over the first {job.warmup_steps:,} updates (--warmup-steps); {rest}"


def warms_up_itself(schedule: str) -> bool:
    """Return whether a schedule's own formula has the warm-up, so that none comes before it. Raises KeyError for one that there is not."""
    return _COURSES[schedule].warms_up_itself


def _constant_course(_job: Job, base: str, _total_steps: int | None) -> str:
    return f"constant {base}"


def _step_course(job: Job, base: str, _total_steps: int | None) -> str:
    every = "epoch" if job.schedule_step_epochs == 1 else f"{job.schedule_step_epochs:g} epochs"
    return f"step decay (--schedule step) from {base}, times {job.schedule_gamma:g} every {every}"


def _cosine_course(_job: Job, base: str, total_steps: int | None) -> str:
    until = "the planned last update" if total_steps is None else f"the planned last update, {total_steps:,}"
    return f"cosine decay (--schedule cosine) from {base} to 0 at {until}"


def _noam_course(job: Job, base: str, _total_steps: int | None) -> str:
    return (
        f"linear warm-up over the first {job.warmup_steps:,} updates (--schedule noam, --warmup-steps), then inverse-square-root decay; "
        f"{base} is multiplied by {job.schedule_coefficient:g} and divided by the square root of the model's width"
    )


@dataclass(frozen=True, slots=True)
class _Course:
    """A schedule: in words from the job, the rate that it starts from and the planned number of updates; and whether it warms up itself."""

    words: Callable[[Job, str, int | None], str]
    warms_up_itself: bool = False


_COURSES: Mapping[str, _Course] = {
    "constant": _Course(_constant_course),
    "step": _Course(_step_course),
    "cosine": _Course(_cosine_course),
    "noam": _Course(_noam_course, warms_up_itself=True),
}
