"""The exchange of a sync run by itself, for its calibration, and what DistributedDataParallel measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ..calibration import SMALL_ELEMENTS

__all__ = ["AllReduce", "reducer_figures"]


class AllReduce:
    """The exchange of a sync step: DDP's own buckets, which the gradients lie in, averaged over `world` ranks."""

    def __init__(self, gradients: Sequence[torch.Tensor], world: int) -> None:
        """Find the buckets: with ``gradient_as_bucket_view`` each gradient is a view of one, so that no memory is needed."""
        storages = {gradient.untyped_storage().data_ptr(): gradient for gradient in gradients}
        self._buckets = [torch.empty(0, device=one.device).set_(one.untyped_storage()) for one in storages.values()]
        self._small = [torch.zeros(min(len(bucket), SMALL_ELEMENTS * world), device=bucket.device) for bucket in self._buckets]
        self._world = world

    def whole(self) -> None:
        """Average every bucket, as DDP does: all of them are on their way at once."""
        self._reduce(self._buckets)

    def small(self) -> None:
        """Average as many buckets of a few bytes."""
        self._reduce(self._small)

    def _reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        started = []
        for tensor in tensors:
            tensor.div_(self._world)
            started.append(dist.all_reduce(tensor, async_op=True))
        for work in started:
            work.wait()


def reducer_figures(distributed: torch.nn.Module | None) -> Mapping[str, float]:
    """Return what DDP itself measured of the steps that it sampled, in seconds; nothing where it has measured nothing."""
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
