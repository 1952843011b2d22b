"""Logistic regression on torch.

Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..base import ForwardContext


def forward(parameters: Mapping[str, torch.Tensor], x_bchw: torch.Tensor, context: ForwardContext[torch.Tensor]) -> torch.Tensor:
    """Return logits_bk."""
    return torch.nn.functional.linear(x_bchw.flatten(1), parameters["dense.weight"], parameters["dense.bias"])
