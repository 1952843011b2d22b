"""The product's batches for translating peers, cut and padded before the clock starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from workload import Workload

from crosstrain.data.batching import BucketedTokens, example_lengths
from crosstrain.data.columns import Column
from crosstrain.data.sampler import Batches, Sampler
from crosstrain.models.layers.formulas import position_codes

PADDING, BEGIN = 0, 1


@dataclass(frozen=True)
class TextBatch:
    """Sources [b, s] and targets [b, t], int64, padded at the end; their lengths [b].

    And the number of target tokens.
    """

    source: NDArray[np.int64]
    source_lengths: NDArray[np.int64]
    target: NDArray[np.int64]
    target_lengths: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """Target tokens without padding."""
        return int(self.target_lengths.sum())

    @property
    def shifted(self) -> NDArray[np.int64]:
        """The targets as the decoder reads them: a begin in front, and the last position gone."""
        return np.concatenate([np.full((len(self.target), 1), BEGIN), self.target[:, :-1]], axis=1)


def indices_of(work: Workload) -> list[NDArray[np.int32]]:
    """Return the examples of each update."""
    weights, lengths = work.data.weights("train", "target_tokens"), example_lengths(work.data)
    sampler = Sampler(len(weights), work.seed, BucketedTokens(work.batch_tokens, 1, "sync"), 1, weights=weights, lengths=lengths)
    indices: list[NDArray[np.int32]] = []
    epoch = 0
    while len(indices) < work.updates:
        batches: Batches = sampler.whole(epoch, 0, sampler.steps_per_epoch)
        indices += [batches.batch(position) for position in range(len(batches))]
        epoch += 1
    return indices[: work.updates]


def text_batches(work: Workload) -> list[TextBatch]:
    """Return the batch of each update."""
    columns: list[Column] = [work.data.column("train", name) for name in ("source", "target")]
    result = []
    for indices in indices_of(work):
        source, target = (column.take(indices) for column in columns)
        padded = (source.padded().astype(np.int64), source.lengths, target.padded().astype(np.int64), target.lengths)
        result.append(TextBatch(*padded))
    return result


def positions(work: Workload) -> NDArray[np.float32]:
    """Return the positional encoding for every length, float32 [positions, width]."""
    longest = max(int(work.data.column("train", name).lengths.max()) for name in ("source", "target"))
    return position_codes(longest + 1, work.spec.width)
