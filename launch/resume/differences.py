"""Do a checkpoint, a model and a dataset belong together? Each difference in words."""

from __future__ import annotations

from ...checkpoint import Meta
from ...core.job import Job
from ...data.sampler import Sampler
from ...data.store.stored_dataset import StoredDataset
from ...models.base import ModelSpec

__all__ = ["data_problem", "model_problem", "run_sampler"]


def model_problem(spec: ModelSpec, meta: Meta) -> list[str]:
    """Return how a model's parameters differ from those of a checkpoint: nothing, or one sentence about the first."""
    known = {name: tuple(shape) for name, shape in meta.model["parameters"]}
    built = {parameter.name: parameter.shape for parameter in spec.parameters}
    for name in [*built, *known]:
        if built.get(name) != known.get(name):
            return [f"parameter {name} has shape {built.get(name, 'none')} in the model and {known.get(name, 'none')} in the checkpoint"]
    return []


def data_problem(data: StoredDataset, meta: Meta) -> list[str]:
    """Return how a dataset differs from the one that a checkpoint was trained on: nothing, or one sentence."""
    if data.digest == meta.data["digest"]:
        return []
    names = f"{data.info.name!r} and {meta.data['name']!r}" if data.info.name != meta.data["name"] else f"{data.info.name!r}"
    return [f"the data is not the same ({names}: digest {data.digest[:12]} instead of {meta.data['digest'][:12]})"]


def run_sampler(job: Job, size: int) -> Sampler:
    """Return the order of `size` examples in a run, for counting; images are not changed by it."""
    return Sampler(size, job.seed, job.global_batch, job.workers, job.mode)
