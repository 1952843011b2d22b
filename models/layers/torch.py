"""Layers on torch: x_bchw [batch, channels, height, width] or x_bi [batch, features].

The backend's autocast sets formats.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional, grad

from ...data.text import PADDING
from .formulas import exponent_step, gradient_uses_space_to_depth, position_codes, refuse_mask, uses_space_to_depth
from .protocol import NetworkLayers, SequenceNetworkLayers

__path__: list[str] = []  # `core/plugins.py` finds former modules below this one
MOMENTUM, EPSILON = 0.1, 1e-5  # batch normalisation: weight of a new batch, term added to the variance
PAIRS_FROM = 1 << 24  # multiply-adds above which two columns at once outweigh the extra operations


class Layers(NetworkLayers):
    """torch's `NetworkLayers`."""

    def images(self, x_bchw: torch.Tensor) -> torch.Tensor:
        """Return canonical images [b, c, h, w] unchanged."""
        return x_bchw

    def enlarge(self, x_bchw: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Resize bilinearly, with half-pixel centres."""
        if x_bchw.shape[2:] == (height, width):
            return x_bchw
        return functional.interpolate(x_bchw, size=(height, width), mode="bilinear", align_corners=False)

    def conv(self, x_bchw: torch.Tensor, name: str, stride: int = 1, padding: int = 0) -> torch.Tensor:
        """Cross-correlate with ``<name>.weight`` [out, in, h, w].

        Add ``<name>.bias`` if there is one.
        """
        weight, bias = self._parameters[f"{name}.weight"], self._parameters.get(f"{name}.bias")
        if x_bchw.device.type == "cpu" and _large(x_bchw, weight) and x_bchw.is_contiguous(memory_format=torch.channels_last):
            outputs, inputs, _, kernel_width = weight.shape
            if uses_space_to_depth(x_bchw.shape[3], inputs, outputs, kernel_width, stride, padding):
                return _conv_space_to_depth(x_bchw, weight, bias, (padding, padding))
            if _gradient_in_pairs(x_bchw, weight, stride, padding):
                convolved: torch.Tensor = _ConvWithPairedGradient.apply(x_bchw, weight, bias, padding)
                return convolved
        return functional.conv2d(x_bchw, weight, bias, stride=stride, padding=padding)

    def conv_pool(self, x_bchw: torch.Tensor, name: str, kernel: int, stride: int, padding: int = 0) -> torch.Tensor:
        """Apply convolution, bias, max pooling and ReLU."""
        return self.relu(self.max_pool(self.conv(x_bchw, name, padding=padding), kernel, stride))

    def relu(self, x: torch.Tensor) -> torch.Tensor:
        """Return max(x, 0), in place: new memory would cost AlexNet's step 2%."""
        return functional.relu(x, inplace=True)

    def max_pool(self, x_bchw: torch.Tensor, kernel: int, stride: int, padding: int = 0) -> torch.Tensor:
        """Take the maximum of each window that fits within the padding."""
        return functional.max_pool2d(x_bchw, kernel, stride, padding)

    def average_pool(self, x_bchw: torch.Tensor, side: int) -> torch.Tensor:
        """Average to `side` × `side` pixels."""
        return functional.adaptive_avg_pool2d(x_bchw, side)

    def flatten(self, x_bchw: torch.Tensor) -> torch.Tensor:
        """Return [b, c·h·w], in canonical order."""
        return x_bchw.flatten(1)

    def dense(self, x_bi: torch.Tensor, name: str) -> torch.Tensor:
        """Multiply by ``<name>.weight`` [out, in] and add ``<name>.bias``."""
        return functional.linear(x_bi.flatten(1), self._parameters[f"{name}.weight"], self._parameters[f"{name}.bias"])

    def batch_norm(self, x_bchw: torch.Tensor, name: str) -> torch.Tensor:
        """Normalise by the batch while training, else by running statistics.

        Their variance is unbiased, 0 for a single value.
        """
        weight, bias = self._parameters[f"{name}.weight"], self._parameters[f"{name}.bias"]
        mean, variance = self._context.buffers[f"{name}.running_mean"], self._context.buffers[f"{name}.running_var"]
        if not self._context.training or not x_bchw.numel():
            return functional.batch_norm(x_bchw, mean, variance, weight, bias, eps=EPSILON)
        if x_bchw.numel() == x_bchw.shape[1]:
            return self._batch_norm_of_one(x_bchw, name)
        new_mean, new_variance = mean.clone(), variance.clone()
        normal = functional.batch_norm(x_bchw, new_mean, new_variance, weight, bias, training=True, momentum=MOMENTUM, eps=EPSILON)
        self._context.updated |= {f"{name}.running_mean": new_mean, f"{name}.running_var": new_variance}
        return normal

    def _batch_norm_of_one(self, x_1c11: torch.Tensor, name: str) -> torch.Tensor:
        """Normalise one value per channel, which torch rejects.

        Only the shift remains, without a gradient for x.
        """
        mean, variance = self._context.buffers[f"{name}.running_mean"], self._context.buffers[f"{name}.running_var"]
        seen_c = x_1c11.detach().flatten().to(mean.dtype)
        self._context.updated |= {f"{name}.running_mean": mean.lerp(seen_c, MOMENTUM), f"{name}.running_var": variance * (1 - MOMENTUM)}
        weight_c11, bias_c11 = (self._parameters[f"{name}.{part}"].view(-1, 1, 1) for part in ("weight", "bias"))
        return (x_1c11 * 0 * weight_c11 + bias_c11).to(x_1c11.dtype)

    def logits(self, x_bk: torch.Tensor) -> torch.Tensor:
        """Return the last layer's result as float32."""
        return x_bk.float()


def _conv_space_to_depth(
    x_bchw: torch.Tensor, weight_oihw: torch.Tensor, bias: torch.Tensor | None, padding: tuple[int, int]
) -> torch.Tensor:
    """Takes and returns channels last."""
    batch, inputs, height, width = x_bchw.shape
    outputs, _, kernel_height, kernel_width = weight_oihw.shape
    weight_ohwi = weight_oihw.permute(0, 2, 3, 1)
    left, right = functional.pad(weight_ohwi, (0, 0, 0, 1)), functional.pad(weight_ohwi, (0, 0, 1, 0))
    pairs_ohwi = torch.cat((left, right)).reshape(2 * outputs, kernel_height, (kernel_width + 1) // 2, 2 * inputs)
    pairs_bhwi = x_bchw.permute(0, 2, 3, 1).reshape(batch, height, width // 2, 2 * inputs)
    y_pairs_bohw = functional.conv2d(
        pairs_bhwi.permute(0, 3, 1, 2),
        pairs_ohwi.permute(0, 3, 1, 2),
        None if bias is None else torch.cat((bias, bias)),
        padding=(padding[0], padding[1] // 2),
    )
    y_pairs_bhwo = y_pairs_bohw.permute(0, 2, 3, 1)
    return y_pairs_bhwo.reshape(batch, y_pairs_bhwo.shape[1], 2 * y_pairs_bhwo.shape[2], outputs).permute(0, 3, 1, 2)


def _large(x_bchw: torch.Tensor, weight_oihw: torch.Tensor) -> bool:
    """Never while a program for any batch size is traced: the comparison would fix the size."""
    if isinstance(x_bchw.shape[0], torch.SymInt):
        return False
    multiply_adds: int = x_bchw.numel() // weight_oihw.shape[1] * weight_oihw.numel()
    return multiply_adds >= PAIRS_FROM


def _gradient_in_pairs(x_bchw: torch.Tensor, weight_oihw: torch.Tensor, stride: int, padding: int) -> bool:
    """Return whether the gradient with respect to x, if needed, should take two columns at once."""
    _, inputs, height, width = weight_oihw.shape
    wanted = x_bchw.requires_grad and not torch.is_autocast_enabled("cpu")
    return wanted and gradient_uses_space_to_depth(x_bchw.shape[3], inputs, (height, width), stride, padding)


class _ConvWithPairedGradient(torch.autograd.Function):  # type: ignore[misc]
    """Convolution with stride 1 whose images' gradient takes two neighbouring columns at once."""

    @staticmethod
    def forward(ctx: Any, x_bchw: torch.Tensor, weight_oihw: torch.Tensor, bias: torch.Tensor | None, padding: int) -> torch.Tensor:
        ctx.save_for_backward(x_bchw, weight_oihw)
        ctx.padding, ctx.biased = padding, bias is not None
        return functional.conv2d(x_bchw, weight_oihw, bias, padding=padding)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, y_bohw: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x_bchw, weight_oihw), padding = ctx.saved_tensors, ctx.padding
        y_bohw = y_bohw.contiguous(memory_format=torch.channels_last)
        rest_rows, rest_columns = (side - 1 - padding for side in weight_oihw.shape[2:])
        x_gradient = _conv_space_to_depth(y_bohw, weight_oihw.flip(2, 3).transpose(0, 1), None, (rest_rows, rest_columns))
        weight_gradient = grad.conv2d_weight(x_bchw, weight_oihw.shape, y_bohw, padding=padding)
        return x_gradient, weight_gradient, y_bohw.sum((0, 2, 3)) if ctx.biased else None, None


# The backend's autocast changes only products on a CPU, so other results are cast to float32 here.

LAYER_NORM_EPSILON = 1e-6  # added to the variance
OUT_OF_REACH = -1e9  # added to masked scores: their share is 0 in float32
CODES_PER_CHUNK = 256  # position codes are cached for multiples of this length


class SequenceLayers(SequenceNetworkLayers):
    """torch's `SequenceNetworkLayers`."""

    def embedding(self, tokens_bt: torch.Tensor, name: str) -> torch.Tensor:
        """Return x_btd."""
        weight_vd = self._parameters[f"{name}.weight"]
        x_btd = functional.embedding(tokens_bt, weight_vd)
        return x_btd * (math.sqrt(weight_vd.shape[1]) * (tokens_bt != PADDING)[..., None])

    def positions(self, x_btd: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Add position codes counted from `start`."""
        end, width = start + x_btd.shape[1], x_btd.shape[2]
        if torch.compiler.is_exporting():  # an exported program has no maximum length, and no table in a loop
            places = torch.arange(start, end, dtype=torch.float64, device=x_btd.device)
            exponents = torch.arange(width // 2, dtype=torch.float64, device=x_btd.device) * exponent_step(width)
            angles = places[:, None] * exponents.exp()
            return x_btd + torch.cat((angles.sin(), angles.cos()), 1).float()
        return x_btd + _codes(-(-end // CODES_PER_CHUNK) * CODES_PER_CHUNK, width, x_btd.device)[start:end]

    def shifted(self, tokens_bt: torch.Tensor, first: int) -> torch.Tensor:
        """Shift the tokens one place to the right."""
        return functional.pad(tokens_bt, (1, 0), value=first)[:, : tokens_bt.shape[1]]

    def attended(self, lengths_b: torch.Tensor, tokens_bt: torch.Tensor) -> torch.Tensor:
        """Return the mask, boolean [batch, 1, 1, time]."""
        return (torch.arange(tokens_bt.shape[1], device=tokens_bt.device) < lengths_b[:, None])[:, None, None, :]

    def layer_norm(self, x_btd: torch.Tensor, name: str) -> torch.Tensor:
        """Normalise each position, float32."""
        weight_d, bias_d = self._parameters[f"{name}.weight"], self._parameters[f"{name}.bias"]
        return functional.layer_norm(x_btd.float(), weight_d.shape, weight_d, bias_d, LAYER_NORM_EPSILON)

    def dense_relu(self, x_btd: torch.Tensor, name: str, *, low: bool = False) -> torch.Tensor:
        """Return max(0, dense)."""
        y_bto = functional.relu(self._product(x_btd, name, biased=True), inplace=True)
        return y_bto if low else y_bto.float()

    def heads(self, x_btd: torch.Tensor, parts: int, count: int) -> tuple[torch.Tensor, ...]:
        """Return `parts` views x_bhte."""
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
        """Return attention with heads concatenated: [batch, query, width].

        torch's fused kernel draws dropout from another generator than the step's, and is several times slower in a low format on a CPU; in
        both cases the softmax is computed separately.
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
        """Concatenate along time."""
        return torch.cat((before, new), 2)

    def _product(self, x_btd: torch.Tensor, name: str, *, biased: bool = False) -> torch.Tensor:
        return functional.linear(x_btd, self._parameters[f"{name}.weight"], self._parameters[f"{name}.bias"] if biased else None)

    def _float32(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


@lru_cache(maxsize=64)
def _codes(count: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(position_codes(count, width)).to(device)
