"""Multinomial logistic regression: one dense layer and a softmax.

Logits = W x + b, with W [classes, features] and b [classes].
"""

from __future__ import annotations

import math

from ...core.errors import UsageError
from ...data.base import IMAGE, DataInfo, TableFeatures
from ..base import ModelSpec, ParameterSpec


def build(data: DataInfo) -> ModelSpec:
    """Fit the layer to the data.

    Weights are uniform in ±1/√features (torch.nn.Linear), the bias is 0.
    """
    column, shape = _input(data)
    features = math.prod(shape)
    return ModelSpec(
        name="logreg",
        parameters=(
            ParameterSpec("dense.weight", (data.classes, features), bound=1.0 / math.sqrt(features)),
            ParameterSpec("dense.bias", (data.classes,)),
        ),
        input_shape=shape if column == IMAGE else (),
        classes=data.classes,
        inputs=(column,),
        target=data.target,
    )


def _input(data: DataInfo) -> tuple[str, tuple[int, ...]]:
    """Return the column that the layer reads, and its shape."""
    if not isinstance(data.features, TableFeatures):
        return IMAGE, data.input_shape
    numbers = [column for column in data.columns if column.name != data.target]
    if len(numbers) != 1 or numbers[0].dtype != "float32" or numbers[0].varies:
        names = ", ".join(column.name for column in numbers)
        raise UsageError(f"model: logreg reads one column of numbers, and {data.name!r} has {names}. Choose categories=one-hot.")
    return numbers[0].name, numbers[0].fixed_shape
