"""Models built from their names and arguments.

Arguments are the keyword-only parameters of a model's `build`: int, float, bool, str or a Literal of texts (``| None`` with the default
None), each with a default. Ranges, ``Annotated[float, Range(0.0, 1.0)]``, are checked without data. ``wide:big?dropout=0.1`` calls
``build(data, size="big", dropout=0.1)``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ..core.errors import TrainerError, UsageError, raised
from ..core.job import Job
from ..core.plugins import find, is_reference, load, model_base
from ..data.base import DataInfo
from ..data.store import location as resolve
from .arguments import SIZE, Argument, Range, Rate, read_arguments, split_arguments, write_arguments
from .base import ModelSpec
from .losses import canonical_loss, objective_of, with_outputs
from .objectives import CLASSIFICATION

__all__ = ["SIZE", "Argument", "Range", "Rate", "build_model", "canonical_model", "read_arguments", "split_arguments", "written_out"]


def arguments_of(name: str, build: Callable[..., Any]) -> dict[str, Argument]:
    """Return a model's arguments by name. Raises UsageError for an invalid declaration."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except ValueError:  # some callables have no signature
        return {}
    keyword_only = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    if not keyword_only:
        return {}
    try:
        hints = get_type_hints(build, include_extras=True)
    except Exception as error:  # third-party annotations may raise anything
        raise UsageError(f"model: the annotations of the `build` of {name!r} cannot be read: {type(error).__name__}: {error}") from error
    return {parameter.name: _argument(name, parameter, hints.get(parameter.name)) for parameter in keyword_only}


def _argument(model: str, parameter: inspect.Parameter, hint: Any) -> Argument:
    alternatives = [part for part in get_args(hint) if part is not type(None)] if get_origin(hint) in (Union, types.UnionType) else [hint]
    kind, number_range = alternatives[0], None
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        number_range = next((part for part in more if isinstance(part, Range)), None)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    known = kind in (int, float, bool, str) or (choices and all(isinstance(choice, str) for choice in choices))
    if len(alternatives) != 1 or not known or parameter.default is parameter.empty:
        raise UsageError(
            f"model: the argument {parameter.name!r} of the `build` of {model!r} needs a default, and int, float, bool, str or a Literal "
            f"of texts as its annotation; it has {inspect.formatannotation(hint)}."
        )
    return Argument(parameter.name, str if choices else kind, tuple(choices), parameter.default, number_range)


def canonical_model(text: str) -> str:
    """Return a model's text in the order of `build`, without defaults.

    Raises UsageError for invalid arguments.
    """
    base = model_base(text)
    if is_reference(base):
        canonical: str = load(find("model", text), "model").canonical(text)
        return canonical
    if text == base:
        return text
    arguments = arguments_of(base, load(find("model", text), "model"))
    return write_arguments(base, read_arguments(text, arguments), arguments)


def written_out(job: Job) -> Job:
    """Return the job with canonical texts of its model, loss and data."""
    return resolve.written_out(job).model_copy(update={"model": canonical_model(job.model), "loss": canonical_loss(job.loss)})


def _built(name: str, data: DataInfo) -> ModelSpec:
    build = load(find("model", name), "model")
    arguments = read_arguments(name, arguments_of(model_base(name), build))
    try:
        spec = build(data, **arguments)
    except TrainerError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"model: {name!r} cannot be built for {data.name!r}: {raised(error)}") from error
    if not isinstance(spec, ModelSpec):
        raise UsageError(f"model: the `build` of {name!r} returned {type(spec).__name__}, not a ModelSpec")
    return spec


def build_model(name: str, data: DataInfo, loss: str | None = None) -> ModelSpec:
    """Build the model `name` for this data, with a job's `loss`.

    Raises UsageError for unknown models, invalid arguments, missing columns, and a loss that does not fit.
    """
    imported, shown = is_reference(model_base(name)), with_outputs(loss, data)
    spec = load(find("model", name), "model")(name, shown) if imported else _built(name, shown)
    if not spec.inputs:
        raise UsageError(f"model: {name!r} reads no column; its `inputs` are empty")
    names = [column.name for column in data.columns]
    if missing := [column for column in (*spec.inputs, spec.target) if column not in names]:
        raise UsageError(
            f"model: {name!r} reads the columns {', '.join(dict.fromkeys((*spec.inputs, spec.target)))}, and {data.name!r} has no "
            f"{' and no '.join(dict.fromkeys(missing))}; it has {', '.join(names)}. Choose another dataset: trainer data list"
        )
    _check_translation(name, spec, data)
    if loss is not None and spec.objective != CLASSIFICATION:
        raise UsageError(f"loss: got {loss!r}, but {name!r} has an objective of its own, {spec.objective.name!r}. Leave --loss out.")
    if loss is not None or (imported and spec.objective == CLASSIFICATION):
        spec = replace(spec, objective=objective_of(loss, data))
    return spec


def _check_translation(name: str, spec: ModelSpec, data: DataInfo) -> None:
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
