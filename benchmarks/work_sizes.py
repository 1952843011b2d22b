"""How large a work is: the target tokens of its updates, which data and order determine for all contestants alike, and its parameters."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from crosstrain.data.batching import BucketedTokens
from crosstrain.data.bucketing import example_lengths
from crosstrain.data.sampler import Sampler
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.models.build import build_model

from .workload import SEED, Work

__all__ = ["target_tokens", "trained_numbers"]


@lru_cache(maxsize=32)
def target_tokens(work: Work, workers: int, updates: int) -> NDArray[np.int64]:
    """Return the target tokens of each of the first updates, of all workers together, int64 [updates]."""
    assert work.batch_tokens is not None, "batches by tokens"
    data = open_dataset(work.data)
    lengths = example_lengths(data)
    assert lengths is not None, "text"
    weights = data.weights("train", "target_tokens")
    rule = BucketedTokens(work.batch_tokens, workers, "sync")
    sampler = Sampler(data.info.sizes["train"], SEED, rule, workers, weights=weights, lengths=lengths)
    found: list[NDArray[np.float64]] = []
    epoch = done = 0
    while done < updates:
        count = min(updates - done, sampler.steps_in_epoch(epoch=epoch))
        found.append(sampler.whole(epoch, 0, count).weights)
        epoch, done = epoch + 1, done + count
    return np.concatenate(found).astype(np.int64)


@lru_cache(maxsize=32)
def trained_numbers(work: Work) -> int:
    """Return how many numbers the model's parameters are."""
    return sum(parameter.size for parameter in build_model(work.model, open_dataset(work.data).info).parameters)
