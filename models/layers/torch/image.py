"""The layers on torch. Shapes: x_bchw [batch, channels, height, width], or x_bi [batch, features].

Number formats are autocast's business, which the backend puts around the forward function; nothing is cast here, save the logits.
A batch may be empty: every layer then gives an empty result, and gradients of zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional, grad

from ...base import ForwardContext
from ..space_to_depth import gradient_uses_space_to_depth, uses_space_to_depth

__all__ = ["Layers"]

MOMENTUM, EPSILON = 0.1, 1e-5
"""Batch normalisation: the share of a new batch in the running statistics, and what is added to the variance."""

PAIRS_FROM = 1 << 24
"""Multiply-adds of a convolution with which two columns at once make up for the operations around it, each of which torch calls singly."""


class Layers:
    """The layers of one forward pass; each takes the name under which its parameters are found."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], context: ForwardContext[torch.Tensor]) -> None:
        self._parameters = parameters
        self._context = context

    def images(self, x_bchw: torch.Tensor) -> torch.Tensor:
        """Return canonical images [b, c, h, w] in the layout that the other layers work in."""
        return x_bchw

    def enlarge(self, x_bchw: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Resize bilinearly, with half-pixel centres."""
        if x_bchw.shape[2:] == (height, width):
            return x_bchw
        return functional.interpolate(x_bchw, size=(height, width), mode="bilinear", align_corners=False)

    def conv(self, x_bchw: torch.Tensor, name: str, stride: int = 1, padding: int = 0) -> torch.Tensor:
        """Cross-correlate with ``<name>.weight`` [out, in, h, w], zeros around the image; add ``<name>.bias`` where there is one."""
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
        """Convolve with a bias, take max(x, 0) and the maximum of each window; the convolution adds the bias as it goes."""
        return self.relu(self.max_pool(self.conv(x_bchw, name, padding=padding), kernel, stride))

    def relu(self, x: torch.Tensor) -> torch.Tensor:
        """Return max(x, 0), in the memory of x: fresh memory would cost AlexNet's step 2%."""
        return functional.relu(x, inplace=True)

    def max_pool(self, x_bchw: torch.Tensor, kernel: int, stride: int, padding: int = 0) -> torch.Tensor:
        """Take the maximum of each window; windows that would reach beyond the padding are left out."""
        return functional.max_pool2d(x_bchw, kernel, stride, padding)

    def average_pool(self, x_bchw: torch.Tensor, side: int) -> torch.Tensor:
        """Average to `side` × `side` pixels; output i of a side of n covers the pixels ⌊i·n/side⌋ … ⌈(i+1)·n/side⌉ − 1."""
        return functional.adaptive_avg_pool2d(x_bchw, side)

    def flatten(self, x_bchw: torch.Tensor) -> torch.Tensor:
        """Return [b, c·h·w], in canonical order."""
        return x_bchw.flatten(1)

    def dense(self, x_bi: torch.Tensor, name: str) -> torch.Tensor:
        """Multiply by ``<name>.weight`` [out, in] and add ``<name>.bias``. An image [b, c, h, w] is taken in canonical order."""
        return functional.linear(x_bi.flatten(1), self._parameters[f"{name}.weight"], self._parameters[f"{name}.bias"])

    def dropout(self, x_bi: torch.Tensor, rate: float, layer: int) -> torch.Tensor:
        """Drop at random while training; `layer` numbers the model's dropout layers."""
        return self._context.dropout(x_bi, rate, layer)

    def batch_norm(self, x_bchw: torch.Tensor, name: str) -> torch.Tensor:
        """Normalise each channel: by the batch while training (which moves the running statistics), else by the running statistics.

        The running variance takes up the unbiased variance; of a single value that is taken as 0. An empty batch moves nothing.
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
        """Normalise one value a channel, which torch refuses: it is its own mean, so that only the shift is left, and no gradient for x."""
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
    """Convolve two neighbouring columns at once (space_to_depth.py), `padding` rows and columns of zeros around the image.

    x is channels last in memory, and so is the result.
    """
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
    """Return whether a convolution has so much to do that two columns at once may pay.

    Never while a program for any number of images is traced: it would be bound to the numbers of images that the answer holds for.
    """
    if isinstance(x_bchw.shape[0], torch.SymInt):
        return False
    multiply_adds: int = x_bchw.numel() // weight_oihw.shape[1] * weight_oihw.numel()
    return multiply_adds >= PAIRS_FROM


def _gradient_in_pairs(x_bchw: torch.Tensor, weight_oihw: torch.Tensor, stride: int, padding: int) -> bool:
    """Return whether the gradient with respect to x is to take two columns at once: where one is wanted, in float32."""
    _, inputs, height, width = weight_oihw.shape
    wanted = x_bchw.requires_grad and not torch.is_autocast_enabled("cpu")
    return wanted and gradient_uses_space_to_depth(x_bchw.shape[3], inputs, (height, width), stride, padding)


class _ConvWithPairedGradient(torch.autograd.Function):  # type: ignore[misc]
    """A convolution with stride 1 whose gradient with respect to the images takes two neighbouring columns at once (space_to_depth.py)."""

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
