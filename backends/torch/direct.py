"""Collectives and gradients of the direct exchange, without a process group.

Large models send gradients during the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ...core.cluster import Task
from ...core.job import Job
from ...exchange.all_reduce import cut_into_buckets
from ...exchange.authentication import gpu_error
from ...exchange.mesh import Mesh
from ..base import StepComponent
from ..timing import Exchange
from .calibration import SMALL_ELEMENTS, DdpExchange
from .collectives import Collectives, NativeCollectives
from .data import Columns, Tensors
from .gradients import Computed, DdpGradients, LocalGradients, data_parallel
from .model import Context, DistributedLoss, MicroBatch, Model
from .optimizers import LossScale


class TcpCollectives(Collectives):
    """Collectives of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum in the order of the ranks."""
        self.mesh.all_reduce(tensor.detach().view(-1).numpy())

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Take over the first rank's values."""
        values = tensor.detach().numpy()
        tensor.copy_(torch.from_numpy(self.mesh.broadcast(values if self.mesh.rank == 0 else None, values.shape, values.dtype)))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.mesh.barrier()

    def leave(self, *, healthy: bool) -> None:
        """Close the connections; see `Collectives`."""
        self.mesh.leave(healthy=healthy)


class TcpGradients(LocalGradients):
    """Sums of gradients over all ranks, by flat buckets.

    Buckets are filled in reverse order, and summed during the backward pass.
    """

    def __init__(self, model: Model, loss_scale: LossScale | None, ranks: TcpCollectives) -> None:
        super().__init__(model, loss_scale, slices=True)
        self._ranks = ranks
        self._buckets = _Buckets([tuple(leaf.shape) for leaf in model.leaves])
        self._small = torch.zeros(SMALL_ELEMENTS)
        self._backward = None if len(self._buckets.flat) == 1 else _OverlappedBackward(model.leaves, self._buckets, self._submit)

    def compute_batch(self, x: Columns, y: Columns, scale: float, context: Context) -> Computed:
        """Compute and exchange."""
        if self._backward is None:
            loss, gradients = super().compute_batch(x, y, scale, context)
            return loss, self._all_reduced(gradients)
        loss = self._model.summed_loss(x, y, context) * scale
        self._backward.run(loss if self._loss_scale is None else loss * self._loss_scale.scale)
        self._ranks.mesh.wait()
        self._model.keep_updated(context)
        return loss.detach(), self._buckets.views

    def compute_micro_batches(self, micro_batches: Iterable[MicroBatch], count: int, scale: float) -> Computed:
        """Compute all, then exchange."""
        loss, gradients = super().compute_micro_batches(micro_batches, count, scale)
        return loss, self._all_reduced(gradients)

    def _all_reduced(self, gradients: Tensors) -> Tensors:
        torch._foreach_copy_(self._buckets.views, list(gradients))
        self.whole()
        return self._buckets.views

    def exchange_alone(self) -> TcpGradients:
        """Return itself, to repeat the exchange: of zeros, whose sums stay zero."""
        for flat in self._buckets.flat:
            flat.zero_()
        return self

    def whole(self) -> None:
        """Exchange the buckets."""
        if self._backward is None:
            self._ranks.all_reduce(self._buckets.flat[0])
            return
        for bucket in range(len(self._buckets.flat)):
            self._submit(bucket)
        self._ranks.mesh.wait()

    def small(self) -> None:
        """Exchange a few bytes in place of each bucket."""
        for _ in self._buckets.flat:
            self._ranks.all_reduce(self._small)

    def _submit(self, bucket: int) -> None:
        self._ranks.mesh.submit(self._buckets.flat[bucket].numpy())


class _Buckets:
    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        buckets = cut_into_buckets([4 * size for size in sizes])
        self.flat = [torch.zeros(sum(sizes[place] for place in bucket)) for bucket in buckets]
        self.of = [0] * len(shapes)
        views: list[torch.Tensor] = [torch.empty(0)] * len(shapes)
        for number, bucket in enumerate(buckets):
            for place, view in zip(bucket, self.flat[number].split([sizes[place] for place in bucket]), strict=True):
                self.of[place], views[place] = number, view.view(shapes[place])
        self.views = views
        self.counts = [len(bucket) for bucket in buckets]


class _OverlappedBackward:
    def __init__(self, leaves: Tensors, buckets: _Buckets, submit: Callable[[int], None]) -> None:
        self._buckets, self._submit = buckets, submit
        self._missing: list[int] = []
        self._next = 0
        for place, leaf in enumerate(leaves):
            leaf.register_post_accumulate_grad_hook(self._hook(place))

    def _hook(self, place: int) -> Callable[[torch.Tensor], None]:
        view, bucket = self._buckets.views[place], self._buckets.of[place]

        def arrived(leaf: torch.Tensor) -> None:
            view.copy_(leaf.grad)
            leaf.grad = None
            self._missing[bucket] -= 1
            while self._next < len(self._missing) and self._missing[self._next] == 0:
                self._submit(self._next)
                self._next += 1

        return arrived

    def run(self, loss: torch.Tensor) -> None:
        """Run the pass. Raises RuntimeError if a parameter has no part in the loss."""
        self._missing, self._next = list(self._buckets.counts), 0
        loss.backward()
        left, self._missing = sum(self._missing), []
        if left:
            raise RuntimeError(f"{left} parameters have no part in the loss, so that they have no gradient")


TRIED: Mapping[StepComponent, str] = {"direct": "communicate", "direct_message": "message", "direct_step": "step"}


class CollectivesSetup(NamedTuple):
    """Collectives, source of gradients, maker of a step's exchange, and DDP if used.

    `exchange` is None for a single process.
    """

    ranks: Collectives
    source: LocalGradients
    exchange: Callable[[], Exchange] | None
    distributed: torch.nn.parallel.DistributedDataParallel | None


def init_collectives(task: Task, job: Job, model: Model, loss_scale: LossScale | None, device: torch.device) -> CollectivesSetup:
    """Connect the job's ranks.

    DDP is not promised a static graph, which gains nothing (0.9 to 1.1 times the steps per second).
    """
    if not job.wrapped:
        return CollectivesSetup(Collectives(), LocalGradients(model, loss_scale, slices=False), None, None)
    if job.exchange == "direct":
        if device.type != "cpu":
            raise gpu_error()
        ranks = TcpCollectives(Mesh(task, job.start_timeout, job.node_timeout))
        direct = TcpGradients(model, loss_scale, ranks)
        return CollectivesSetup(ranks, direct, direct.exchange_alone, None)
    group = NativeCollectives(task, job, device)
    wrapped = data_parallel(DistributedLoss(model), [device] if device.type == "cuda" else None)
    leaves, count = model.leaves, task.cluster.workers
    return CollectivesSetup(
        group, DdpGradients(model, loss_scale, wrapped, count), lambda: DdpExchange([leaf.grad for leaf in leaves], count), wrapped
    )
