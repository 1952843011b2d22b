"""Whether a task's model computes compiled: as the job says, or as all tasks together find that it pays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
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
        raise UsageError(
            f"compile: got 'on', as typed or as 'auto' has chosen for this run before, but {lacking}. Allowed without it: off, and for a "
            "new run auto (which does not compile then)."
        )
    if lacking is not None:
        settle(Timing(step(), None, lacking), tasks)  # the others hear of it, and no task compiles
        return
    if job.compile == "on":
        set_up()
        model.compiled = _loss(job, model, first)
        _compute_apart(model, _copied(data, first, job.accumulate), model.compiled)
        return
    made: list[CompiledLoss] = []
    compiling: list[threading.Thread] = []
    given_up = threading.Event()
    batches = _copied(data, first, job.accumulate)

    def compile_loss() -> None:
        compiling.append(threading.current_thread())
        set_up()
        made.append(_loss(job, model, first))
        if given_up.is_set():
            made[0].give_up()
        _compute_apart(model, batches, made[0])

    def give_up() -> None:
        given_up.set()
        for loss in made:
            loss.give_up()
        for thread in compiling:
            end_children_of(thread)

    def compiled() -> float:
        model.compiled = made[0]
        return step()

    pays = settle(timed(step, compile_loss, compiled, give_up), tasks)
    model.compiled = made[0] if pays else None  # also where the timing itself failed


def _loss(job: Job, model: Model, first: Batches) -> CompiledLoss:
    size = int(first.offsets[-1] - first.offsets[0])
    return CompiledLoss(model.loss_of, compiled_sizes(size, job.accumulate))


def _copied(data: ResidentSplit, first: Batches, accumulate: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a copy of a micro-batch of each size that a batch is cut into; the split's own memory is overwritten by the next batch."""
    ((x, y),) = next(iter(data.blocks(first)))
    parts, _ = first.in_micro_batches(accumulate)
    sizes = {int(size) for size in np.diff(parts.offsets)} - {0}
    cut = [(part_of(x, 0, size), part_of(y, 0, size)) for size in sorted(sizes)]
    return [(x.clone(), y.clone()) for x, y in cut if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)]


def _compute_apart(model: Model, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], loss: CompiledLoss) -> None:
    """Compute a gradient of each, which compiles it, and keep nothing of it."""
    for x, y in batches:
        torch.autograd.grad(loss(model.named, x, y, model.passes.training_apart(), apart=True), model.leaves)
