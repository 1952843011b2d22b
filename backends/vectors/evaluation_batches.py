"""How many examples does a pass of an evaluation take at once, at most? What bounds it is memory."""

from __future__ import annotations

import math

from ...models.base import ModelSpec

__all__ = ["evaluation_batch", "examples_at_once"]

EVALUATION_BATCH = 1024
"""Examples per forward pass of an evaluation, at most."""

EVALUATION_LOGITS_BYTES = 2**27
"""Bytes of logits per forward pass of an evaluation of sequences, padding included; the softmax of them takes as much again."""

EVALUATION_BYTES = 2**25
"""Bytes of images per forward pass of an evaluation. What a convolutional network computes from them takes some ten times as much:
for AlexNet with images of 224 × 224 (55 at once) less than training on 64 needs."""


def evaluation_batch(spec: ModelSpec) -> int:
    """Return how many examples an evaluation takes at once, at most; of sequences `examples_at_once` may take fewer."""
    return max(1, min(EVALUATION_BATCH, EVALUATION_BYTES // (4 * math.prod(spec.input_shape))))


def examples_at_once(spec: ModelSpec, longest: int, most: int) -> int:
    """Return how many of `most` examples, of which the longest has `longest` elements, an evaluation takes at once: at least one."""
    return max(1, min(most, EVALUATION_LOGITS_BYTES // max(1, 4 * spec.logits_per_position * longest)))
