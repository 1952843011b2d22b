"""The batches of sentences that `trainer` trains on, in its order, for peers that translate; padded before their clock starts.

Shapes: source_bs and target_bt [batch, time], int64, with zeros behind each sentence; the decoder reads the target a place later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from workload import Workload

from crosstrain.data.batching import BucketedTokens
from crosstrain.data.bucketing import example_lengths
from crosstrain.data.sampler import Sampler
from crosstrain.data.text import BEGIN

__all__ = ["Batch", "indices_of_updates", "padded_batches"]

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """One update's sentences. `decoder_bt` is the target behind the piece that begins it."""

    source_bs: Tokens
    decoder_bt: Tokens
    target_bt: Tokens


def indices_of_updates(work: Workload) -> list[NDArray[np.int32]]:
    """Return which sentences each update sees, on a single worker."""
    lengths = example_lengths(work.data)
    assert lengths is not None, "sentences"
    assert work.batch_tokens is not None, "batches by tokens"
    sampler = Sampler(work.data.info.sizes["train"], work.seed, BucketedTokens(work.batch_tokens, 1, "sync"), 1, lengths=lengths)
    return list(_first(sampler, work.updates))


def _first(sampler: Sampler, updates: int) -> Iterator[NDArray[np.int32]]:
    epoch = 0
    while updates:
        count = min(updates, sampler.steps_in_epoch(epoch=epoch))
        whole = sampler.whole(epoch, 0, count)
        yield from (whole.batch(step) for step in range(count))
        epoch, updates = epoch + 1, updates - count


def padded_batches(work: Workload) -> list[Batch]:
    """Return the batch of every update."""
    source, target = (work.data.column("train", name) for name in ("source", "target"))
    taken = ((source.take(indices).padded(), target.take(indices).padded()) for indices in indices_of_updates(work))
    return [_batch(source_bs.astype(np.int64), target_bt.astype(np.int64)) for source_bs, target_bt in taken]


def _batch(source_bs: Tokens, target_bt: Tokens) -> Batch:
    return Batch(source_bs, np.concatenate([np.full((len(target_bt), 1), BEGIN), target_bt[:, :-1]], axis=1), target_bt)
