"""Decoding with a model on torch. Shapes: padded_bs, source_bs, pieces_bt [batch, time]; logits_nv [rows, pieces]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._higher_order_ops.while_loop import while_loop

from ...data.columns import LENGTHS
from ...data.text import BEGIN, END, PADDING
from ..decoding_functions import DecodingChecks, DecodingFunctions


class TorchStepper:
    """A `models.decoding.search.Stepper` of a model's functions. Wrong results raise UsageError (`DecodingChecks`)."""

    def __init__(self, functions: DecodingFunctions, source: str, pieces: int, device: torch.device) -> None:
        self._functions, self._source, self._device = functions, source, device
        self._checks = DecodingChecks(shape_of, pieces)
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


def shape_of(found: Any) -> Sequence[int] | None:
    """Return a tensor's shape, None for anything else; see `DecodingChecks`."""
    return found.shape if isinstance(found, torch.Tensor) else None


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], structure: Any) -> Any:
    if isinstance(structure, torch.Tensor):
        return function(structure)
    parts = [_mapped(function, part) for part in structure]
    return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)


# Greedy search without numpy or Python at run time; a program's loop keeps its tensors' shapes, so there is no growing cache.

Logits = Callable[[torch.Tensor], torch.Tensor]  # pieces_bt -> logits_btv, which depend only on earlier positions


def greedy(logits: Logits, source_bs: torch.Tensor, lengths_b: torch.Tensor, extra: int) -> torch.Tensor:
    """Return translations, int64 pieces_bt, `extra` longer than the source: each padded after END, or cut off at its maximum."""
    batch, time = source_bs.shape
    total = time + extra

    def unfinished(place: torch.Tensor, pieces_bt: torch.Tensor, done_b: torch.Tensor) -> torch.Tensor:
        return (place < total) & ~done_b.all()

    def step(place: torch.Tensor, pieces_bt: torch.Tensor, done_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        here_t = torch.arange(total, device=source_bs.device) == place
        scores_bv = (logits(pieces_bt) * here_t[None, :, None]).sum(1)
        numbers_v = torch.arange(scores_bv.shape[1], device=source_bs.device)
        piece_b = scores_bv.masked_fill((numbers_v == PADDING) | (numbers_v == BEGIN), float("-inf")).argmax(1)
        piece_b = torch.where(done_b | (place >= lengths_b + extra), PADDING, piece_b)
        return place + 1, torch.where(here_t[None, :], piece_b[:, None], pieces_bt), (piece_b == END) | (piece_b == PADDING)

    pieces_bt = torch.zeros(batch, total, dtype=torch.int64, device=source_bs.device)
    done_b = torch.zeros(batch, dtype=torch.bool, device=source_bs.device)
    found: torch.Tensor = while_loop(unfinished, step, (torch.tensor(0), pieces_bt, done_b))[1]
    return found
