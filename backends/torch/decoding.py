"""Decodes with a model on torch, a piece at a time, with a cache of keys and values.

Shapes: padded_bs [batch, time]; logits_nv [rows, pieces].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...data.columns import LENGTHS
from ..decoding_functions import DecodingChecks, DecodingFunctions

__all__ = ["TorchStepper"]


class TorchStepper:
    """Implements `models.decoding.search.Stepper` with functions of a model that are bound to its parameters.

    `encode(inputs)` and `decode_step(tokens, position, memory, cache)` compute in the number format of the model, which has so many
    `pieces`. Its methods raise UsageError where the functions return something else than they have to (`DecodingChecks`).
    """

    def __init__(self, functions: DecodingFunctions, source: str, pieces: int, device: torch.device) -> None:
        self._functions, self._source, self._device = functions, source, device
        self._checks = DecodingChecks(_shape, pieces)
        self._memory: Any = None
        self._cache: Any = None
        self._position = 0
        self._sentence_n = np.zeros(0, np.int64)

    def begin(self, sources: Sequence[NDArray[np.integer]]) -> None:
        """See `Stepper.begin`."""
        lengths = [len(source) for source in sources]
        padded_bs = torch.zeros(len(sources), max(lengths), dtype=torch.int64)
        for row, source in zip(padded_bs, sources, strict=True):
            row[: len(source)] = torch.from_numpy(np.array(source, np.int64))
        inputs = {self._source: padded_bs.to(self._device), f"{self._source}{LENGTHS}": torch.tensor(lengths, device=self._device)}
        with torch.inference_mode():
            # It is read at every step, which takes less time of memory that lies in order.
            memory = self._checks.memory(self._functions.encode(inputs), len(sources))
            self._memory = _mapped(lambda tensor: tensor.contiguous(), memory)
            self._cache = self._checks.cache(self._functions.empty_cache(self._memory), len(sources))
        self._position, self._sentence_n = 0, np.arange(len(sources))

    def advance(self, tokens_n: NDArray[np.int64], rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Stepper.advance`."""
        with torch.inference_mode():
            if not np.array_equal(rows_n, np.arange(len(self._sentence_n))):
                taken = torch.from_numpy(rows_n).to(self._device)
                self._cache = _mapped(lambda tensor: tensor.index_select(0, taken), self._cache)
                sentence_n = self._sentence_n[rows_n]
                if not np.array_equal(sentence_n, self._sentence_n):  # hypotheses of one sentence have one memory
                    self._memory = _mapped(lambda tensor: tensor.index_select(0, taken), self._memory)
                self._sentence_n = sentence_n
            tokens = torch.from_numpy(tokens_n).to(self._device)
            found = self._functions.decode_step(tokens, self._position, self._memory, self._cache)
            logits_nv, self._cache = self._checks.step(found, len(tokens_n), self._cache)
            self._position += 1
            log_probabilities: NDArray[np.float32] = torch.log_softmax(logits_nv.float(), 1).cpu().numpy()
        return log_probabilities


def _shape(found: Any) -> Sequence[int] | None:
    return found.shape if isinstance(found, torch.Tensor) else None


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], structure: Any) -> Any:
    """Return nested tuples with the function's result in place of each tensor."""
    if isinstance(structure, torch.Tensor):
        return function(structure)
    parts = [_mapped(function, part) for part in structure]
    return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)
