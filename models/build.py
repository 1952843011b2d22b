"""A model by name, made for the data that it is to be trained on."""

from __future__ import annotations

import traceback

from ..core.errors import TrainerError, UsageError
from ..core.plugins import find, load
from ..data.base import DataInfo
from .base import ModelSpec

__all__ = ["build_model"]


def build_model(name: str, data: DataInfo) -> ModelSpec:
    """Build the model called `name` for data of this shape. Raises UsageError where there is no such model, or it reads other columns."""
    build = load(find("model", name), "model")
    try:
        spec = build(data)
    except TrainerError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({at.filename}, line {at.lineno})"
        raise UsageError(f"model: {name!r} cannot be built for {data.name!r}: {what}") from error
    if not isinstance(spec, ModelSpec):
        raise UsageError(f"model: the `build` of {name!r} returned {type(spec).__name__}, not a ModelSpec")
    if not spec.inputs:
        raise UsageError(f"model: {name!r} reads no column; its `inputs` are empty")
    there = [column.name for column in data.columns]
    if lacking := [column for column in (*spec.inputs, spec.target) if column not in there]:
        raise UsageError(
            f"model: {name!r} reads the columns {', '.join(dict.fromkeys((*spec.inputs, spec.target)))}, and {data.name!r} has no "
            f"{' and no '.join(dict.fromkeys(lacking))}; it has {', '.join(there)}. Choose another dataset: trainer data list"
        )
    return spec
