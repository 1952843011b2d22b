"""Does a checkpoint fit a model, or data? And its own model, built again from its description without the data that it was trained on."""

from __future__ import annotations

from ..core.errors import UsageError
from ..data.store.stored_dataset import StoredDataset
from ..models.base import ModelSpec
from ..models.build import build_model
from .meta import Meta, data_info, described_model

__all__ = ["data_problem", "model_problem", "rebuilt_model"]


def rebuilt_model(meta: Meta) -> ModelSpec:
    """Return the model that a checkpoint holds the state of. Raises UsageError where the model of this name is another one by now."""
    name = meta.job["model"]
    spec: ModelSpec = build_model(name, data_info(meta.data))
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


def model_problem(spec: ModelSpec, meta: Meta) -> list[str]:
    """Return how a model's parameters and buffers differ from those of a checkpoint: nothing, or one sentence about the first."""
    now = described_model(spec)
    for kind in ("parameters", "buffers"):
        known, built = ({name: tuple(shape) for name, shape in described[kind]} for described in (meta.model, now))
        for name in [*built, *known]:
            if built.get(name) != known.get(name):
                one = kind.removesuffix("s")
                return [f"{one} {name} has shape {built.get(name, 'none')} in the model and {known.get(name, 'none')} in the checkpoint"]
    return []


def data_problem(data: StoredDataset, meta: Meta) -> list[str]:
    """Return how a dataset differs from the one that a checkpoint was trained on: nothing, or one sentence."""
    if data.digest == meta.data["digest"]:
        return []
    names = f"{data.info.name!r} and {meta.data['name']!r}" if data.info.name != meta.data["name"] else f"{data.info.name!r}"
    return [f"the data is not the same ({names}: digest {data.digest[:12]} instead of {meta.data['digest'][:12]})"]
