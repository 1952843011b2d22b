"""Multinomial logistic regression: one dense layer and a softmax.

Logits = W x + b, with W [classes, features] and b [classes].
"""

from __future__ import annotations

import math

from ...data.base import DataInfo
from ..base import ModelSpec, ParameterSpec


def build(data: DataInfo) -> ModelSpec:
    """Fit the layer to the data.

    Weights are uniform in ±1/√features (torch.nn.Linear), the bias is 0.
    """
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
