"""The direct exchange: ranks without a process group; large models' gradients are on their way while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ....exchange.mesh.bucket_layout import buckets_of
from ....exchange.mesh.mesh import Mesh
from ..calibration import SMALL_ELEMENTS
from ..data import ColumnTensors
from ..model import Context, MicroBatch, Model
from ..precision import LossScale
from .gradients import Computed, OneRank

__all__ = ["DirectGradients", "DirectRanks"]


class DirectRanks:
    """The ranks of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def add_up(self, tensor: torch.Tensor) -> None:
        """Add up in the order of the ranks."""
        self.mesh.add_up(tensor.detach().view(-1).numpy())

    def spread(self, tensor: torch.Tensor) -> None:
        """Take over the first rank's values."""
        own = tensor.detach().numpy()
        tensor.copy_(torch.from_numpy(self.mesh.spread(own if self.mesh.rank == 0 else None, own.shape, own.dtype)))

    def barrier(self) -> None:
        """Wait until all are here."""
        self.mesh.barrier()

    def leave(self, *, healthy: bool) -> None:
        """Close the connections; see `Ranks`."""
        try:
            if healthy:
                self.mesh.barrier()
        finally:
            self.mesh.close()


class DirectGradients:
    """The sums over all ranks. `factor`, and the methods: see `GradientSource`.

    Gradients are copied into buckets, one flat vector each, in the order in which a backward pass finishes them: about the reverse of the
    order of the parameters. Several buckets are added up in the background, while the pass goes on.
    """

    factor = 1.0

    def __init__(self, model: Model, loss_scale: LossScale | None, ranks: DirectRanks) -> None:
        self._model, self._loss_scale, self._ranks = model, loss_scale, ranks
        self._alone = OneRank(model, loss_scale, slices=True)
        self._buckets = _Buckets([tuple(leaf.shape) for leaf in model.leaves])
        self._small = torch.zeros(SMALL_ELEMENTS)
        self._backward = None if len(self._buckets.flat) == 1 else _OverlappedBackward(model.leaves, self._buckets, self._submit)

    def of_batch(self, x: ColumnTensors, y: ColumnTensors, scale: float, context: Context) -> Computed:
        """Compute and exchange."""
        if self._backward is None:
            loss, gradients = self._alone.of_batch(x, y, scale, context)
            return loss, self._added_up(gradients)
        loss = self._model.summed_loss(x, y, context) * scale
        self._backward.run(loss if self._loss_scale is None else loss * self._loss_scale.scale)
        self._ranks.mesh.wait()
        self._model.keep_updated(context)
        return loss.detach(), self._buckets.views

    def of_micro_batches(self, micro_batches: Iterable[MicroBatch], count: int, scale: float) -> Computed:
        """Compute all, then exchange."""
        loss, gradients = self._alone.of_micro_batches(micro_batches, count, scale)
        return loss, self._added_up(gradients)

    def _added_up(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        torch._foreach_copy_(self._buckets.views, list(gradients))
        self.whole()
        return self._buckets.views

    def exchange_alone(self) -> DirectGradients:
        """Return itself as the exchange of a step, to be repeated: of zeros, whose sums stay what they are."""
        for flat in self._buckets.flat:
            flat.zero_()
        return self

    def whole(self) -> None:
        """Exchange what lies in the buckets."""
        if self._backward is None:
            self._ranks.add_up(self._buckets.flat[0])
            return
        for bucket in range(len(self._buckets.flat)):
            self._submit(bucket)
        self._ranks.mesh.wait()

    def small(self) -> None:
        """Exchange a few bytes in the place of each bucket."""
        for _ in self._buckets.flat:
            self._ranks.add_up(self._small)

    def _submit(self, bucket: int) -> None:
        self._ranks.mesh.submit(self._buckets.flat[bucket].numpy())


class _Buckets:
    """Flat vectors for gradients of given shapes. `views` are the gradients in them, `of` the bucket of each, both in the order given."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        buckets = buckets_of([4 * size for size in sizes])
        self.flat = [torch.zeros(sum(sizes[place] for place in bucket)) for bucket in buckets]
        self.of = [0] * len(shapes)
        views: list[torch.Tensor] = [torch.empty(0)] * len(shapes)
        for number, bucket in enumerate(buckets):
            for place, view in zip(bucket, self.flat[number].split([sizes[place] for place in bucket]), strict=True):
                self.of[place], views[place] = number, view.view(shapes[place])
        self.views = views
        self.counts = [len(bucket) for bucket in buckets]


class _OverlappedBackward:
    """A backward pass that hands in each bucket, in their order, as soon as all of its gradients are there."""

    def __init__(self, leaves: Sequence[torch.Tensor], buckets: _Buckets, submit: Callable[[int], None]) -> None:
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
        """Run the pass. Raises RuntimeError where a parameter has no part in the loss."""
        self._missing, self._next = list(self._buckets.counts), 0
        loss.backward()
        left, self._missing = sum(self._missing), []
        if left:
            raise RuntimeError(f"{left} parameters have no part in the loss, so that they have no gradient")
