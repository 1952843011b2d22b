"""A model by name and arguments, made for the data that it is to be trained on."""

from __future__ import annotations

from ..core.errors import TrainerError, UsageError, raised
from ..core.job import Job
from ..core.plugins import find, load, model_base
from ..data.base import DataInfo
from ..data.store import resolve
from .arguments import arguments_of, read_arguments, write_arguments
from .base import ModelSpec

__all__ = ["build_model", "canonical_model", "written_out"]


def canonical_model(text: str) -> str:
    """Return ``NAME[:SIZE][?key=value&…]`` as all ways of writing the same arguments have it: in the model's order, without defaults.

    A name without arguments is left as it is, and its module is not imported. Raises UsageError for arguments that are not allowed.
    """
    base = model_base(text)
    if text == base:
        return text
    arguments = arguments_of(base, load(find("model", text), "model"))
    return write_arguments(base, read_arguments(text, arguments), arguments)


def written_out(job: Job) -> Job:
    """Return the job with the canonical text of its model, and with its data as `data.store.resolve.written_out` has them."""
    return resolve.written_out(job).model_copy(update={"model": canonical_model(job.model)})


def build_model(name: str, data: DataInfo) -> ModelSpec:
    """Build the model called `name`, with the arguments behind it, for data of this shape.

    Raises UsageError where there is no such model, it does not have these arguments, or it reads other columns.
    """
    build = load(find("model", name), "model")
    given = read_arguments(name, arguments_of(model_base(name), build))
    try:
        spec = build(data, **given)
    except TrainerError:
        raise
    except Exception as error:
        raise UsageError(f"model: {name!r} cannot be built for {data.name!r}: {raised(error)}") from error
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
    _check_translation(name, spec, data)
    return spec


def _check_translation(name: str, spec: ModelSpec, data: DataInfo) -> None:
    """Raise UsageError where what an objective translates is not what the model reads and says."""
    quality = spec.objective.translation
    if quality is None:
        return
    what = f"model: the {type(quality).__name__} of {name!r}"
    if quality.source not in spec.inputs:
        raise UsageError(
            f"{what} has the source {quality.source!r}, which the model does not read; its `inputs` are {', '.join(spec.inputs)}."
        )
    if quality.target not in (*spec.inputs, spec.target):
        read = ", ".join(dict.fromkeys((*spec.inputs, spec.target)))
        raise UsageError(f"{what} has the target {quality.target!r}, which the model does not read; its `inputs` and `target` are {read}.")
    sizes = data.text.vocabulary_sizes
    if wordless := [column for column in (quality.source, quality.target) if column not in sizes]:
        raise UsageError(f"{what} translates {' and '.join(wordless)}, of which {data.name!r} has no vocabulary_sizes.")
    if spec.logits_per_position != sizes[quality.target]:
        raise UsageError(
            f"model: {name!r} has logits_per_position={spec.logits_per_position}; a model that translates needs"
            f" {sizes[quality.target]}, a number for each piece of {quality.target!r}."
        )
