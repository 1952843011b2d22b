"""The context of each forward pass: the model's buffers, and dropout that depends on nothing but the step it is drawn for.

No random state is kept from step to step, so that a resumed run draws what an uninterrupted one would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.job import Job
from ...data.sampler import Batches
from ...models.base import ForwardContext, ModelSpec
from ...models.dropout_masks import drawn_rate, keep_mask_of_shape, refused_dropout
from ..tensor_functions import TensorFunctions

__all__ = ["TENSORS", "Dropout", "ForwardContexts"]

Context = ForwardContext[torch.Tensor]

TENSORS = TensorFunctions(
    lambda array: torch.from_numpy(array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array),
    lambda tensor: tensor.detach().numpy(),
)
"""Tensors as forward functions are given them, on the CPU, and back."""


class Dropout:
    """Drops for one step: by torch's generator, seeded with (seed, step, rank, layer), or with --deterministic by the shared masks."""

    def __init__(self, job: Job, rank: int) -> None:
        self._seed, self._rank, self._shared_masks = job.seed, rank, job.deterministic
        self._generators: dict[torch.device, torch.Generator] = {}
        self._step, self._micro_batch, self._indices = 0, 0, np.zeros(0, dtype=np.int32)

    def at(self, step: int, indices_b: NDArray[np.int32], micro_batch: int = 0) -> None:
        """Say which update follows, on which examples, and which of its micro-batches these are."""
        self._step, self._micro_batch, self._indices = step, micro_batch, indices_b

    def __call__(self, x: torch.Tensor, rate: float, layer: int) -> torch.Tensor:
        """Return x with elements zeroed with probability `rate` and the others divided by 1 − rate; see `ForwardContext`."""
        return x * self.factors(x, rate, layer)

    def factors(self, x: torch.Tensor, rate: float, layer: int) -> torch.Tensor:
        """Return what a tensor like x is multiplied by."""
        rate = drawn_rate(rate)
        if self._shared_masks:
            kept = keep_mask_of_shape(self._seed, self._step, layer, self._indices, x.shape, rate)
            factors = torch.from_numpy(kept).to(x.device).to(x.dtype)
        else:
            further = [self._micro_batch] if self._micro_batch else []
            mixed = np.random.SeedSequence([self._seed, self._step, self._rank, layer, *further]).generate_state(1, np.uint64)
            if x.ndim > 2 and x.device.type == "cpu":
                return _half_words(int(mixed[0]), x.shape, rate).to(x.dtype).mul_(1.0 / (1.0 - rate))
            generator = self._generators.setdefault(x.device, torch.Generator(x.device)).manual_seed(int(mixed[0]))
            factors = torch.empty_like(x).bernoulli_(1.0 - rate, generator=generator)
        return factors.div_(1.0 - rate)


def _half_words(seed: int, shape: torch.Size, rate: float) -> torch.Tensor:
    """Return what is kept, boolean: an element for each half word of SFC64, to 1 in 2¹⁷ of `rate`; an eighth of torch's time for it."""
    size = math.prod(shape)
    drawn = np.random.SFC64(seed).random_raw(-(-size // 4)).view(np.uint16)[:size]
    return torch.from_numpy(drawn >= np.uint16(round(rate * 2**16))).view(shape)


class ForwardContexts:
    """Makes the contexts of one worker. `buffers` are its values of the model's buffers, by canonical name."""

    def __init__(self, job: Job, spec: ModelSpec, rank: int, buffers: Mapping[str, torch.Tensor], low: torch.dtype | None) -> None:
        self.buffers = buffers
        self.evaluation: Context = ForwardContext(training=False, buffers=buffers, compute=low, settings=spec.settings)
        self._training: Context = ForwardContext(training=True, buffers=buffers, compute=low, settings=spec.settings)
        self._dropout = Dropout(job, rank) if spec.dropout else None
        self._training.dropout = refused_dropout(spec.name) if self._dropout is None else self._dropout

    def training_apart(self) -> Context:
        """Return a context of a training pass of its own, of which nothing is kept: not the one that `training` returns."""
        return replace(self._training, updated={})

    def training(self, step: int, batches: Batches, position: int, micro_batch: int = 0) -> Context:
        """Return the context of update `step`, on one of the batches; the same object each time, with nothing updated.

        `micro_batch` is the batch's number among those of the update, which each draw for themselves.
        """
        if self._dropout is not None:
            self._dropout.at(step, batches.batch(position), micro_batch)
        if self.buffers:
            self._training.updated = {}
        return self._training
