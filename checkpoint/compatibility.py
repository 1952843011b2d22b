"""The model of a checkpoint, built again from its description, without the data that it was trained on."""

from __future__ import annotations

from ..core.errors import UsageError
from ..core.plugins import find, load
from ..models.base import ModelSpec
from .meta import Meta, data_info, described_model

__all__ = ["rebuilt_model"]


def rebuilt_model(meta: Meta) -> ModelSpec:
    """Return the model that a checkpoint holds the state of. Raises UsageError where the model of this name is another one by now."""
    name = meta.job["model"]
    spec: ModelSpec = load(find("model", name), "model")(data_info(meta.data))
    now = described_model(spec)
    for kind in ("parameters", "buffers"):
        before = {array: tuple(shape) for array, shape in meta.model[kind]}
        after = {array: tuple(shape) for array, shape in now[kind]}
        if before != after:
            differing = sorted(array for array in before.keys() | after.keys() if before.get(array) != after.get(array))
            raise UsageError(
                f"model: {name!r} is not what the checkpoint was made of; its {kind} differ in {', '.join(differing[:5])}"
                f"{' and others' if len(differing) > 5 else ''}. Use the release that trained it."
            )
    return spec
