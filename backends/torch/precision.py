"""Number formats: what convolutions and matrix products are computed in, and the scaling of the loss that fp16 needs.

Weights, gradients as the optimiser sees them, normalisation, losses and reductions stay float32; which operations are low is
autocast's list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.errors import UsageError
from ..capabilities import unused_precision
from ..loss_scaling import FIRST_SCALE, next_scale, refuse_exhausted

__all__ = ["LossScale", "low_format", "precision_used", "unscaled", "watched"]

TENSOR_FLOAT_CAPABILITY = (8, 0)
"""The first GPUs that know TF32."""


def low_format(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the format of convolutions and matrix products, None for float32. Raises UsageError for fp16 without a GPU."""
    if precision == "fp32":
        return None
    if precision == "fp16" and device.type != "cuda":
        raise UsageError("precision: got 'fp16', which needs a GPU, and this run computes on the CPU; allowed here: fp32, bf16. Use bf16.")
    return torch.bfloat16 if precision == "bf16" else torch.float16


def precision_used(precision: str, device: torch.device) -> str:
    """Return the precision as a summary names it: fp32 says where a GPU computes convolutions or products in TF32."""
    if precision != "fp32" or device.type != "cuda" or torch.cuda.get_device_capability(device) < TENSOR_FLOAT_CAPABILITY:
        return precision
    return "fp32 (TF32)" if torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32 else "fp32"


def watched(forward: Callable[..., torch.Tensor], precision: str, low: torch.dtype, model: str) -> Callable[..., torch.Tensor]:
    """Return the forward function of a model that is to compute in `low`, whose first pass raises UsageError where it does not."""
    proven = False

    def watching(*arguments: Any) -> torch.Tensor:
        nonlocal proven
        if proven:
            return forward(*arguments)
        with _LowOperations(low) as seen:
            result = forward(*arguments)
        if not seen.any:
            raise unused_precision(precision, model, "torch")
        proven = True
        return result

    return watching


class _LowOperations(TorchDispatchMode):  # type: ignore[misc]
    """Notices operations, as autocast leaves them, whose result has the format `low`; a change of format alone is none."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self._low = low
        self.any = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else [result]
        if function is not torch.ops.aten._to_copy.default:
            self.any = self.any or any(isinstance(one, torch.Tensor) and one.dtype == self._low and not one._is_view() for one in results)
        return result


def unscaled(gradients: Sequence[torch.Tensor], scale: float) -> bool:
    """Divide the gradients by the scale, in place; return whether all of them are finite."""
    torch._foreach_mul_(gradients, 1.0 / scale)
    largest = torch._foreach_norm([gradient for gradient in gradients if gradient.numel()], float("inf"))
    return bool(torch.stack(largest).isfinite().all())


class LossScale:
    """Dynamic scaling of the loss; see `backends.loss_scaling`."""

    def __init__(self) -> None:
        self.scale, self.clean_steps = FIRST_SCALE, 0

    @property
    def scalars(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"loss_scale": self.scale, "clean_steps": float(self.clean_steps)}

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Take over what a checkpoint kept; begin anew where it kept nothing."""
        self.scale, self.clean_steps = scalars.get("loss_scale", FIRST_SCALE), int(scalars.get("clean_steps", 0))

    def unscale(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Divide the gradients by the scale, in place, and adapt it. False: they are not all finite, and the update must be left out.

        Ranks whose gradients are reduced together come to the same answer. Raises RunFailedError where the scale is exhausted.
        """
        finite = unscaled(gradients, self.scale)
        self.scale, self.clean_steps = next_scale(self.scale, self.clean_steps, finite)
        refuse_exhausted(self.scale)
        return finite
