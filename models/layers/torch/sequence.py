"""The layers of sequences on torch; what each computes, `sequence_protocol` says.

Number formats are autocast's business, which the backend puts around the forward function: on a CPU it leaves alone what is not a product,
so that what has to be float32 is brought to it here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch.nn import functional

from ....data.text import PADDING
from ...base import ForwardContext
from ..masks import refuse_mask
from ..position_codes import exponent_step, position_codes

__all__ = ["SequenceLayers"]

EPSILON = 1e-6
"""Added to the variance of layer normalisation."""

OUT_OF_REACH = -1e9
"""Added to the score of a key that is not attended to: its share is 0 in float32."""

CODES_AT_ONCE = 256
"""Codes of positions are made for a multiple of this length, and kept."""


class SequenceLayers:
    """The layers of one forward pass; each takes the name under which its parameters are found."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], context: ForwardContext[torch.Tensor]) -> None:
        self._parameters = parameters
        self._context = context

    def embedding(self, tokens_bt: torch.Tensor, name: str) -> torch.Tensor:
        """Return x_btd."""
        weight_vd = self._parameters[f"{name}.weight"]
        x_btd = functional.embedding(tokens_bt, weight_vd)
        return x_btd * (math.sqrt(weight_vd.shape[1]) * (tokens_bt != PADDING)[..., None])

    def positions(self, x_btd: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Add the code of each position, counted from `start`."""
        end, width = start + x_btd.shape[1], x_btd.shape[2]
        if torch.compiler.is_exporting():  # a program has no greatest length, and no table in a loop
            places = torch.arange(start, end, dtype=torch.float64, device=x_btd.device)
            exponents = torch.arange(width // 2, dtype=torch.float64, device=x_btd.device) * exponent_step(width)
            angles = places[:, None] * exponents.exp()
            return x_btd + torch.cat((angles.sin(), angles.cos()), 1).float()
        return x_btd + _codes(-(-end // CODES_AT_ONCE) * CODES_AT_ONCE, width, x_btd.device)[start:end]

    def shifted(self, tokens_bt: torch.Tensor, first: int) -> torch.Tensor:
        """Return the tokens moved a place to the right."""
        return functional.pad(tokens_bt, (1, 0), value=first)[:, : tokens_bt.shape[1]]

    def attended(self, lengths_b: torch.Tensor, tokens_bt: torch.Tensor) -> torch.Tensor:
        """Return the mask, boolean [batch, 1, 1, time]."""
        return (torch.arange(tokens_bt.shape[1], device=tokens_bt.device) < lengths_b[:, None])[:, None, None, :]

    def layer_norm(self, x_btd: torch.Tensor, name: str) -> torch.Tensor:
        """Normalise each position, float32."""
        weight_d, bias_d = self._parameters[f"{name}.weight"], self._parameters[f"{name}.bias"]
        return functional.layer_norm(x_btd.float(), weight_d.shape, weight_d, bias_d, EPSILON)

    def linear(self, x_btd: torch.Tensor, name: str, *, low: bool = False) -> torch.Tensor:
        """Multiply by the weight."""
        y_bto = functional.linear(x_btd, self._parameters[f"{name}.weight"])
        return y_bto if low else y_bto.float()

    def dense(self, x_btd: torch.Tensor, name: str) -> torch.Tensor:
        """Multiply by the weight and add the bias, float32."""
        return functional.linear(x_btd, self._parameters[f"{name}.weight"], self._parameters[f"{name}.bias"]).float()

    def dense_relu(self, x_btd: torch.Tensor, name: str, *, low: bool = False) -> torch.Tensor:
        """Return max(0, dense)."""
        y_bto = functional.linear(x_btd, self._parameters[f"{name}.weight"], self._parameters[f"{name}.bias"])
        y_bto = functional.relu(y_bto, inplace=True)
        return y_bto if low else y_bto.float()

    def heads(self, x_btd: torch.Tensor, parts: int, count: int) -> tuple[torch.Tensor, ...]:
        """Return so many views x_bhte."""
        batch, time, width = x_btd.shape
        split = x_btd.view(batch, time, parts, count, width // (parts * count))
        return tuple(split.permute(2, 0, 3, 1, 4).unbind())

    def attention(
        self,
        query_bhqe: torch.Tensor,
        key_bhke: torch.Tensor,
        value_bhke: torch.Tensor,
        mask: torch.Tensor | None,
        rate: float,
        layer: int,
        *,
        causal: bool = False,
        low: bool = False,
    ) -> torch.Tensor:
        """Attend, and put the heads side by side: [batch, query, width].

        torch's fused kernel draws dropout from a generator that is not the step's, so that with dropout the softmax is computed by itself.
        So it is in a low format on a CPU, where the fused kernel takes several times as long.
        """
        if self._context.compute is not None:
            query_bhqe, key_bhke, value_bhke = (x_bhte.to(self._context.compute) for x_bhte in (query_bhqe, key_bhke, value_bhke))
        batch, count, time, width = query_bhqe.shape
        slow = query_bhqe.dtype != torch.float32 and query_bhqe.device.type == "cpu"
        by_itself = slow or (rate and self._context.training)
        if mask is not None:
            refuse_mask(str(mask.dtype).removeprefix("torch."), layer)
        if causal and (by_itself or mask is not None):  # the fused kernel takes one of the two
            earlier_qk = torch.ones(time, key_bhke.shape[2], dtype=torch.bool, device=query_bhqe.device).tril()
            mask, causal = earlier_qk if mask is None else mask & earlier_qk, False
        if by_itself:
            scores_bhqk = torch.matmul(query_bhqe * width**-0.5, key_bhke.transpose(2, 3)).float()
            if mask is not None:
                scores_bhqk = scores_bhqk + torch.where(mask, 0.0, OUT_OF_REACH)
            shares_bhqk = self.dropout(torch.softmax(scores_bhqk, 3), rate, layer)
            mixed_bhqe = torch.matmul(shares_bhqk.to(value_bhke.dtype), value_bhke)
        else:
            mixed_bhqe = functional.scaled_dot_product_attention(query_bhqe, key_bhke, value_bhke, mask, is_causal=causal)
        mixed_bqd = mixed_bhqe.transpose(1, 2).reshape(batch, time, count * width)
        return mixed_bqd if low else mixed_bqd.float()

    def appended(self, before: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return one time after the other."""
        return torch.cat((before, new), 2)

    def dropout(self, x_btd: torch.Tensor, rate: float, layer: int) -> torch.Tensor:
        """Drop at random while training."""
        return self._context.dropout(x_btd, rate, layer) if rate else x_btd

    def logits(self, x_btd: torch.Tensor, name: str) -> torch.Tensor:
        """Return logits_btv, float32."""
        return self.linear(x_btd, name)


@lru_cache(maxsize=64)
def _codes(count: int, width: int, device: torch.device) -> torch.Tensor:
    """Return the codes of the first positions, float32 [count, width]."""
    return torch.from_numpy(position_codes(count, width)).to(device)
