"""Greedy search as part of a torch program, for an export: no numpy, and no Python at run time.

A loop of a program keeps its tensors' shapes, so that there is no growing cache: each step computes all positions of the target anew.
Shapes: source_bs [batch, time]; pieces_bt [batch, time of the source + what a translation may have more].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._higher_order_ops.while_loop import while_loop

from ...data.text import BEGIN, END, PADDING

__all__ = ["greedy"]

Logits = Callable[[torch.Tensor], torch.Tensor]
"""From pieces_bt of the target to logits_btv of what stands at each position, which depend on the positions before it alone."""


def greedy(logits: Logits, source_bs: torch.Tensor, lengths_b: torch.Tensor, extra: int) -> torch.Tensor:
    """Return the translations, int64 pieces_bt: each ends with END, with padding behind it, or is cut off at its longest length."""
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
