"""A model by name, made for the data that it is to be trained on."""

from __future__ import annotations

from ..core.errors import UsageError
from ..core.plugins import find, load
from ..data.base import DataInfo
from .base import ModelSpec

__all__ = ["build_model"]


def build_model(name: str, data: DataInfo) -> ModelSpec:
    """Build the model called `name` for data of this shape. Raises UsageError where there is no such model, or it reads other columns."""
    spec: ModelSpec = load(find("model", name), "model")(data)
    there = [column.name for column in data.columns]
    if lacking := [column for column in (*spec.inputs, spec.target) if column not in there]:
        raise UsageError(
            f"model: {name!r} reads the columns {', '.join(dict.fromkeys((*spec.inputs, spec.target)))}, and {data.name!r} has no "
            f"{' and no '.join(dict.fromkeys(lacking))}; it has {', '.join(there)}. Choose another dataset: trainer data list"
        )
    return spec
