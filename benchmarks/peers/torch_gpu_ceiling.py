"""The card's ceiling: how fast its matrix products in bf16 would do the arithmetic of a training step, if a step were nothing else.

A step is one large square product of about as many operations; its time is scaled to exactly as many. Of a model of sentences these are
the products with weights for each target token, padding left out, and as many source tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from translation_batches import indices_of_updates
from workload import Timer, Workload, read_workload

MULTIPLE = 256
"""Sides are multiples of it, which the fast kernels like."""

SMALLEST = 8192


class Scaled(Timer):
    """A clock whose time is that of the step's own number of operations."""

    factor = 1.0

    def end(self) -> None:
        """The last product is done."""
        super().end()
        self._ended = self._began + (self._ended - self._began) * self.factor


def tokens_a_step(work: Workload) -> float:
    """Return the mean number of target tokens of the steps that count."""
    lengths = work.data.column("train", "target").lengths
    return float(np.mean([lengths[indices].sum() for indices in indices_of_updates(work)[work.warmup :]]))


def main() -> None:
    """Multiply."""
    work, timer = read_workload(), Scaled()
    operations = work.spec.training_flops * (work.batch_size if work.batch_tokens is None else tokens_a_step(work))
    side = max(SMALLEST, round((operations / 2) ** (1 / 3) / MULTIPLE) * MULTIPLE)
    timer.factor = operations / (2 * side**3)
    left, right = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(work.warmup):
        left @ right
    torch.cuda.synchronize()
    timer.begin()
    for _ in range(work.steps):
        left @ right
    torch.cuda.synchronize()
    timer.end()
    timer.report_mean(work, 0.0, work.steps)


main()
