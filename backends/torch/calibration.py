"""Repetition of a step's components after training, and traces of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ...core.cluster import Task
from ...core.job import Job
from ...data.sampler import Batches
from ..timing import Calibrator, Exchange, StepTracer
from .data import Columns, ResidentSplit, Tensors

SMALL_ELEMENTS = 16  # gloo skips messages of vectors too short to cut: 1 element takes 0.3 ms, 8 or 1000 take 1.2 ms (two ranks)
Compute = Callable[[Columns, Columns, Batches], object]  # (inputs, target, the same as a `Batches`)


def make_calibrator(data: ResidentSplit, batches: Batches, compute: Compute, exchange: Exchange | None, device: torch.device) -> Calibrator:
    """Return what repeats the components; see `Calibrator`."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return Calibrator(
        batches,
        lambda some: (batch for block in data.blocks(some) for batch in block),
        lambda gathered, batch: compute(gathered[0], gathered[1], batch),
        exchange,
        settle,
    )


class DdpExchange:
    """Exchange of a sync step: DDP's buckets with the gradients, averaged over `world` ranks."""

    def __init__(self, gradients: Tensors, world: int) -> None:
        """Find the buckets.

        With ``gradient_as_bucket_view`` each gradient is a view of one, so that no memory is needed.
        """
        storages = {gradient.untyped_storage().data_ptr(): gradient for gradient in gradients}
        self._buckets = [torch.empty(0, device=view.device).set_(view.untyped_storage()) for view in storages.values()]
        self._small = [torch.zeros(min(len(bucket), SMALL_ELEMENTS * world), device=bucket.device) for bucket in self._buckets]
        self._world = world

    def whole(self) -> None:
        """Average every bucket, all at the same time as in DDP."""
        self._reduce(self._buckets)

    def small(self) -> None:
        """Average as many buckets of a few bytes."""
        self._reduce(self._small)

    def _reduce(self, tensors: Tensors) -> None:
        started = []
        for tensor in tensors:
            tensor.div_(self._world)
            started.append(dist.all_reduce(tensor, async_op=True))
        for work in started:
            work.wait()


def reducer_figures(distributed: torch.nn.Module | None) -> Mapping[str, float]:
    """Return DDP's own measurements of the steps that it sampled, in seconds, if there are any."""
    if distributed is None:
        return {}
    logged = distributed._get_ddp_logging_data()
    figures = {
        "ddp_forward_seconds": "avg_forward_compute_time",
        "ddp_backward_seconds": "avg_backward_compute_time",
        "ddp_communicate_seconds": "avg_backward_comm_time",
        "ddp_overlap_seconds": "avg_backward_compute_comm_overlap_time",
    }
    return {name: int(logged[key]) / 1e9 for name, key in figures.items() if int(logged.get(key, 0)) > 0}


class StepProfiler(StepTracer):
    """The trace of a task's first updates after warm-up."""

    def __init__(self, task: Task, job: Job, device: torch.device) -> None:
        super().__init__(job.profile, here=task.rank == 0)
        self._task, self._device = task.name, device

    def _start(self, folder: str) -> None:
        self._path = Path(folder) / f"{self._task}.{time.time_ns() // 10**6}.pt.trace.json"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def _write(self) -> None:
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
