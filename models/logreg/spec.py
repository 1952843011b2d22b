"""Logistic regression: logits = W x + b, with W of shape [classes, features] and b of shape [classes]."""

from __future__ import annotations

import math

from ...data.base import DataInfo
from ..base import ModelSpec, ParameterSpec

__all__ = ["build"]


def build(data: DataInfo) -> ModelSpec:
    """Fit the layer to the data. Weights are uniform in ±1/√features (torch.nn.Linear's default), the bias starts at zero."""
    features = math.prod(data.input_shape)
    return ModelSpec(
        name="logreg",
        parameters=(
            ParameterSpec("dense.weight", (data.classes, features), bound=1.0 / math.sqrt(features)),
            ParameterSpec("dense.bias", (data.classes,)),
        ),
        input_shape=data.input_shape,
        classes=data.classes,
    )
