"""Dropout masks of ``--deterministic`` runs, independent of backend and number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError

Numbers = NDArray[np.uint64] | np.uint64
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10  # Philox 4×32 (Salmon et al. 2011)
LOW_WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
FEATURES_OF_BLOCK = 8  # neighbouring features that share one counter
BLOCKS_PER_CHUNK = 1 << 15  # their words fit a second-level cache
MAX_RATE = 1.0 - 2.0**-15  # higher rates would keep nothing, and their scale overflows fp16


def drawn_rate(rate: float) -> float:
    """Limit `rate` (below 1) to `MAX_RATE`."""
    return min(rate, MAX_RATE)


def refused_dropout(name: str) -> Callable[[Any, float, int], Any]:
    """Return a dropout that raises UsageError for rates above 0, for specs that declare none."""

    def dropout(x: Any, rate: float, layer: int) -> Any:
        if rate > 0:
            raise UsageError(
                f"model: {name!r} drops with the rate {rate:g} (dropout number {layer}) while it trains,"
                " but its ModelSpec does not set dropout=True"
            )
        return x

    return dropout


def keep_mask_of_shape(
    seed: int, step: int, layer: int, indices_b: NDArray[np.integer], shape: Sequence[int], rate: float
) -> NDArray[np.bool_]:
    """Return the mask of a shape [batch, features], [batch, positions, features] or attention.

    An attention's shape is [batch, heads, queries, keys]. The query is the position, and key · heads + head the feature, so padding does
    not change the rest.
    """
    if len(shape) == 2:
        return keep_mask(seed, step, layer, indices_b, shape[1], rate)
    if len(shape) == 3:
        return keep_mask_of_positions(seed, step, layer, indices_b, shape[1], shape[2], rate)
    batch, heads, queries, keys = shape
    mask = keep_mask_of_positions(seed, step, layer, indices_b, queries, keys * heads, rate)
    return mask.reshape(batch, queries, keys, heads).transpose(0, 3, 1, 2)


def keep_mask_of_positions(
    seed: int, step: int, layer: int, indices_b: NDArray[np.integer], positions: int, width: int, rate: float
) -> NDArray[np.bool_]:
    """Return a mask, bool [batch, positions, width], that keeps elements at random.

    The probability is 1 − `rate`. An element depends only on (seed, step, layer, example, position, feature). The generator is Philox 4×32;
    its key is drawn from seed and step, its counter is (feature / 8, position, example, layer). An element takes half a word, so `rate` is
    exact to 2⁻¹⁷.
    """
    blocks = -(-width // FEATURES_OF_BLOCK)
    mask = np.empty((len(indices_b), positions, width), np.bool_)
    key = np.random.SeedSequence([seed, step]).generate_state(2, np.uint32).tolist()
    threshold = np.uint16(round(drawn_rate(rate) * 2**16))
    features_f, positions_t1 = np.arange(blocks, dtype=np.uint64), np.arange(positions, dtype=np.uint64)[:, None]
    rows = max(1, BLOCKS_PER_CHUNK // max(1, positions * blocks))
    for first in range(0, len(indices_b), rows):
        examples_b11 = np.asarray(indices_b[first : first + rows]).astype(np.uint64)[:, None, None]
        random = np.empty((len(examples_b11), positions, blocks, 4), np.dtype("<u4"))
        for number, word in enumerate(philox_4x32((features_f, positions_t1, examples_b11, np.uint64(layer)), key)):
            random[..., number] = word
        halves_btf = random.view("<u2").reshape(len(examples_b11), positions, blocks * FEATURES_OF_BLOCK)
        np.greater_equal(halves_btf[:, :, :width], threshold, out=mask[first : first + rows])
    return mask


def philox_4x32(counter: Sequence[Numbers], key: Sequence[int]) -> Sequence[Numbers]:
    """Return four numbers below 2³² per counter of four such numbers; arrays are broadcast."""
    first, second, third, fourth = counter
    for number in range(ROUNDS):
        left, right = (np.uint64((word + number * increment) % 2**32) for word, increment in zip(key, KEY_STEPS, strict=True))
        product, second_product = first * MULTIPLIERS[0], third * MULTIPLIERS[1]
        first, second, third, fourth = (
            (second_product >> HALF) ^ second ^ left,
            second_product & LOW_WORD,
            (product >> HALF) ^ fourth ^ right,
            product & LOW_WORD,
        )
    return first, second, third, fourth


def keep_mask(seed: int, step: int, layer: int, indices_b: NDArray[np.integer], width: int, rate: float) -> NDArray[np.bool_]:
    """Return a mask, bool [batch, width], that keeps elements with probability 1 − `rate`.

    `step` counts updates, `layer` dropout layers, `indices_b` are positions in the training split. The generator is Philox 4×64 (Salmon et
    al. 2011) with key (seed, step) and counter (0, 0, layer, example).
    """
    words = -(-width // 2)
    random_bw = np.empty((len(indices_b), words), np.dtype("<u8"))
    for row, index in enumerate(indices_b):
        random_bw[row] = np.random.Philox(key=[seed, step], counter=[0, 0, layer, int(index)]).random_raw(words)
    mask: NDArray[np.bool_] = random_bw.view("<u4")[:, :width] >= np.uint32(round(drawn_rate(rate) * 2**32))
    return mask
