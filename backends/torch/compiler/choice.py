"""Whether a task's model computes compiled: as the job says, or as all tasks together find that it pays."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ....core.errors import UsageError
from ....core.job import Job
from ....data.sampler import Batches
from ...compiling.choice import Timing, compiled_sizes, settle, timed
from ..data import ResidentSplit, part_of
from ..model import Model
from .losses import CompiledLoss
from .toolchain import end_children_of, missing, set_up

__all__ = ["choose"]


def choose(job: Job, model: Model, data: ResidentSplit, first: Batches, step: Callable[[], float], tasks: int, *, timing: bool) -> None:
    """Have a model compute its training losses compiled where the job says so, or where it pays.

    `first` is a batch as almost all are, `step` returns the seconds of one without communication, and `tasks` is how many time it
    (`timing`: whether they do). Raises UsageError where the job wants what cannot be compiled here.
    """
    if job.compile == "off" or (job.compile == "auto" and not timing):
        return
    lacking = missing()
    if job.compile == "on" and lacking is not None:
        raise UsageError(f"compile: got 'on', but {lacking}. Allowed without it: off, auto (which does not compile then).")
    if lacking is not None:
        settle(Timing(step(), None, lacking), tasks)  # the others hear of it, and no task compiles
        return
    if job.compile == "on":
        set_up()
        model.compiled = _loss(job, model, first)
        return
    made: list[CompiledLoss] = []
    compiling: list[threading.Thread] = []

    def compile_loss() -> None:
        compiling.append(threading.current_thread())
        set_up()
        made.append(_loss(job, model, first))
        _compute_apart(model, data, first, made[0], job.accumulate)

    def give_up() -> None:
        for loss in made:
            loss.give_up()
        for thread in compiling:
            end_children_of(thread)

    def compiled() -> float:
        model.compiled = made[0]
        return step()

    pays = settle(timed(step, compile_loss, compiled, give_up), tasks)
    model.compiled = made[0] if pays else None


def _loss(job: Job, model: Model, first: Batches) -> CompiledLoss:
    size = int(first.offsets[-1] - first.offsets[0])
    return CompiledLoss(model.loss_of, compiled_sizes(size, job.accumulate))


def _compute_apart(model: Model, data: ResidentSplit, first: Batches, loss: CompiledLoss, accumulate: int) -> None:
    """Compute a gradient, which compiles it, and keep nothing of it."""
    ((x, y),) = next(iter(data.blocks(first)))
    parts, _ = first.in_micro_batches(accumulate)
    stop = int(parts.offsets[1] - parts.offsets[0])
    x, y = part_of(x, 0, stop), part_of(y, 0, stop)
    if isinstance(y, torch.Tensor) and len(y):
        torch.autograd.grad(loss(model.named, x, y, model.passes.training_apart(), apart=True), model.leaves)
