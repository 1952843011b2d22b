"""Upper bound of a GPU: the time of a training step if it were only bf16 matrix products.

A step is one large square product of about as many operations; its time is scaled to exactly as many. For text, source and target count
as of one length, and products of attention without weights do not count.
"""

from __future__ import annotations

import torch
from text_batches import text_batches
from workload import Timer, read_workload

MULTIPLE = 256
"""Sides are multiples of it, which the fast kernels like."""

MIN_SIZE = 8192


class Scaled(Timer):
    """A clock whose time is that of the step's own number of operations."""

    factor = 1.0

    def end(self) -> None:
        """The last product is done."""
        super().end()
        self._ended = self._began + (self._ended - self._began) * self.factor


def main() -> None:
    """Multiply."""
    work, timer = read_workload(), Scaled()
    tokens = sum(batch.tokens for batch in text_batches(work)[work.warmup :]) if work.batch_tokens else None
    operations = work.spec.training_flops * (work.batch_size if tokens is None else tokens / work.steps)
    side = max(MIN_SIZE, round((operations / 2) ** (1 / 3) / MULTIPLE) * MULTIPLE)
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
    timer.report_mean(work, 0.0, work.steps, **({} if tokens is None else {"target_tokens": tokens}))


main()
