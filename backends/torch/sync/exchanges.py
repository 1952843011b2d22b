"""Which exchange a job's ranks use: none, DistributedDataParallel in a process group, or our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ....core.cluster import Task
from ....core.job import Job
from ....exchange.limits import gpu_error
from ....exchange.mesh.mesh import Mesh
from ...timing import Exchange
from ..model import DistributedLoss, Model
from ..precision import LossScale
from .calibration import AllReduce
from .collectives import ProcessGroup, Ranks, SingleProcess
from .deferred_compiler import data_parallel
from .direct import DirectGradients, DirectRanks
from .gradients import DataParallel, GradientSource, OneRank

__all__ = ["Joined", "join"]


class Joined(NamedTuple):
    """The ranks, and whence gradients come.

    `exchange` makes the exchange of a step by itself, None for a single process; `distributed` is DDP where that is used.
    """

    ranks: Ranks
    source: GradientSource
    exchange: Callable[[], Exchange] | None
    distributed: torch.nn.parallel.DistributedDataParallel | None


def join(task: Task, job: Job, model: Model, loss_scale: LossScale | None, device: torch.device) -> Joined:
    """Join the other ranks of a job.

    A static graph is not promised to DDP: measured, it gains nothing here (0.9 to 1.1 times the steps per second).
    """
    if not job.wrapped:
        return Joined(SingleProcess(), OneRank(model, loss_scale, slices=False), None, None)
    if job.exchange == "direct":
        if device.type != "cpu":
            raise gpu_error()
        ranks = DirectRanks(Mesh(task, job.start_timeout, job.node_timeout))
        direct = DirectGradients(model, loss_scale, ranks)
        return Joined(ranks, direct, direct.exchange_alone, None)
    group = ProcessGroup(task, job, device)
    wrapped = data_parallel(DistributedLoss(model), [device] if device.type == "cuda" else None)
    leaves, count = model.leaves, task.cluster.workers
    return Joined(group, DataParallel(model, loss_scale, wrapped, count), lambda: AllReduce([leaf.grad for leaf in leaves], count), wrapped)
