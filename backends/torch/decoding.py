"""Decoding with a model on torch.

Shapes: padded_bs, source_bs, pieces_bt [batch, time]; logits_nv [rows, pieces].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._higher_order_ops.while_loop import while_loop

from ...data.columns import LENGTHS
from ...data.text import BEGIN, END, PADDING
from ..decoding_functions import CachedStepper, DecodingFunctions


class TorchStepper(CachedStepper):
    """A stepper of a model's functions on a device."""

    def __init__(self, functions: DecodingFunctions, source: str, pieces: int, device: torch.device) -> None:
        super().__init__(pieces, shape_of)
        self._functions, self._source, self._device = functions, source, device

    def _tensor(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._device)

    def _begun(self, padded_bs: NDArray[np.int64], lengths_b: NDArray[np.int64]) -> tuple[Any, Any]:
        inputs = {self._source: self._tensor(padded_bs), f"{self._source}{LENGTHS}": self._tensor(lengths_b)}
        with torch.inference_mode():
            memory = self._checks.memory(self._functions.encode(inputs), len(padded_bs))
            memory = _mapped(lambda tensor: tensor.contiguous(), memory)
            return memory, self._checks.cache(self._functions.empty_cache(memory), len(padded_bs))

    def _taken(self, structures: Sequence[Any], rows_n: NDArray[np.int64]) -> list[Any]:
        rows = self._tensor(rows_n)
        with torch.inference_mode():
            return [_mapped(lambda tensor: tensor.index_select(0, rows), structure) for structure in structures]

    def _stepped(self, tokens_n: NDArray[np.int64]) -> tuple[NDArray[np.float32], Any]:
        with torch.inference_mode():
            result = self._functions.decode_step(self._tensor(tokens_n), self._position, self._memory, self._cache)
            logits_nv, cache = self._checks.step(result, len(tokens_n), self._cache)
            return torch.log_softmax(logits_nv.float(), 1).cpu().numpy(), cache


def shape_of(value: Any) -> Sequence[int] | None:
    """Return a tensor's shape, None for anything else; see `DecodingChecks`."""
    return value.shape if isinstance(value, torch.Tensor) else None


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], structure: Any) -> Any:
    if isinstance(structure, torch.Tensor):
        return function(structure)
    parts = [_mapped(function, part) for part in structure]
    return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)


# Greedy search without numpy or Python at run time; a program's loop keeps its tensors' shapes, so there is no growing cache.

Logits = Callable[[torch.Tensor], torch.Tensor]  # pieces_bt -> logits_btv, which depend only on earlier positions


def greedy(logits: Logits, source_bs: torch.Tensor, lengths_b: torch.Tensor, extra: int) -> torch.Tensor:
    """Return translations, int64 pieces_bt, `extra` longer than the source.

    Each is padded after END, or cut off at its maximum.
    """
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
    return while_loop(unfinished, step, (torch.tensor(0), pieces_bt, done_b))[1]
