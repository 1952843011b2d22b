"""Sources of an update's gradients.

`scale` is a source's `factor` / (weight of the global batch).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch

from ...data.sampler import Batches
from .data import Columns, Tensors
from .model import Context, MicroBatch, Model, cut_batch, in_separate_memory
from .optimizers import LossScale

Computed = tuple[torch.Tensor, Tensors]  # loss, gradients in the order of the model's leaves


class LocalGradients:
    """Gradients of a single process, or with `slices` of one rank's slice, which may be empty.

    A subclass sums over all ranks.
    """

    factor = 1.0  # or the number of ranks for a mean over them

    def __init__(self, model: Model, loss_scale: LossScale | None, *, slices: bool) -> None:
        self._model, self._loss_scale, self._slices = model, loss_scale, slices

    def compute_batch(self, x: Columns, y: Columns, scale: float, context: Context) -> Computed:
        """Compute a batch: its mean loss, or this rank's part of it, times the factor."""
        model = self._model
        loss = model.summed_loss(x, y, context) * scale if self._slices else model.mean_loss(x, y, context, scale)
        gradients = model.gradients(_scaled(loss, self._loss_scale))
        model.keep_updated(context)
        return loss.detach(), gradients

    def compute_micro_batches(self, micro_batches: Iterable[MicroBatch], count: int, scale: float) -> Computed:
        """Compute `count` micro-batches in turn, with one's gradients and their sum in memory.

        Ranks exchange once.
        """
        total: list[torch.Tensor] = []
        losses = []
        for x, y, context in micro_batches:
            loss = self._model.summed_loss(x, y, context) * scale
            gradients = self._model.gradients(_scaled(loss, self._loss_scale))
            if total:
                torch._foreach_add_(total, gradients)
            else:
                total = gradients
            self._model.keep_updated(context)
            losses.append(loss.detach())
        return torch.stack(losses).sum(), total

    def compute_gathered(self, x: Columns, y: Columns, batch: Batches, accumulate: int, scale: float) -> Computed:
        """Compute a gathered batch by itself, in at most `accumulate` micro-batches."""
        if accumulate == 1:
            return self.compute_batch(x, y, scale, self._model.passes.training(0, batch, 0))
        micro_batches = cut_batch(self._model, x, y, batch, accumulate)
        return self.compute_micro_batches(micro_batches, 0, scale)  # how many there are is of no importance without DDP


class DdpGradients(LocalGradients):
    """The mean over all ranks, by DistributedDataParallel."""

    def __init__(
        self, model: Model, loss_scale: LossScale | None, distributed: torch.nn.parallel.DistributedDataParallel, ranks: int
    ) -> None:
        super().__init__(model, loss_scale, slices=True)
        self._distributed, self.factor = distributed, float(ranks)

    def compute_batch(self, x: Columns, y: Columns, scale: float, context: Context) -> Computed:
        """Compute; see `LocalGradients`."""
        self._forget()
        loss = self._backward(x, y, scale, context)
        return loss, [leaf.grad for leaf in self._model.leaves]

    def compute_micro_batches(self, micro_batches: Iterable[MicroBatch], count: int, scale: float) -> Computed:
        """Compute; see `LocalGradients`: DDP sums a rank's ``grad`` before it exchanges that."""
        leaves, losses = self._model.leaves, []
        self._forget()
        for number, (x, y, context) in enumerate(micro_batches, 1):
            with nullcontext() if number == count else self._distributed.no_sync():
                losses.append(self._backward(x, y, scale, context))
            if number == 1 < count:  # what follows is added to these, in place
                for leaf, gradient in zip(leaves, in_separate_memory([leaf.grad for leaf in leaves]), strict=True):
                    leaf.grad = gradient
        return torch.stack(losses).sum(), [leaf.grad for leaf in leaves]

    def _forget(self) -> None:
        for leaf in self._model.leaves:
            leaf.grad = None

    def _backward(self, x: Columns, y: Columns, scale: float, context: Context) -> torch.Tensor:
        loss = self._distributed(x, y, scale, context)
        _scaled(loss, self._loss_scale).backward()
        self._model.keep_updated(context)
        return loss.detach()


def _scaled(loss: torch.Tensor, loss_scale: LossScale | None) -> torch.Tensor:
    return loss if loss_scale is None else loss * loss_scale.scale


# DDP without importing torch._dynamo, of which it reads two settings: that takes 1.2 s of a core and 150 MB per rank (torch 2.14).

COMPILER = "torch._dynamo"


class _Deferred(ModuleType):
    """Substitute for a compiler's module.

    It has the given attributes, and imports the real module for any other.
    """

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name)
        vars(self).update(attributes)

    def __getattr__(self, attribute: str) -> Any:
        _import_when_used()
        return getattr(importlib.import_module(self.__name__), attribute)


def data_parallel(module: torch.nn.Module, device_ids: list[torch.device] | None) -> torch.nn.parallel.DistributedDataParallel:
    """Return a module in DDP; its own forward pass runs without the compiler's substitute."""
    with compiler_deferred():
        wrapped = torch.nn.parallel.DistributedDataParallel(module, device_ids=device_ids, gradient_as_bucket_view=True)
        around_forward = getattr(wrapped, "_inside_ddp_forward", None)  # what its first forward pass needs of the compiler
        if around_forward is not None:
            with around_forward():
                pass
    return wrapped


@contextmanager
def compiler_deferred() -> Iterator[None]:
    """Make and first call DDP within the block without importing the compiler.

    A compiler that is imported already stays.
    """
    if COMPILER in sys.modules:
        yield
        return
    utils = _Deferred(f"{COMPILER}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # its default
    sys.modules[COMPILER] = torch._dynamo = _Deferred(COMPILER, disable=lambda function, *_, **__: function, utils=utils)
    try:
        yield
    finally:
        _import_when_used()


def _import_when_used() -> None:
    if isinstance(sys.modules.get(COMPILER), _Deferred):
        del sys.modules[COMPILER], torch._dynamo
