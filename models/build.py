"""Models built from their names and arguments.

Arguments are the keyword-only parameters of a model's `build`: int, float, bool, str or a Literal of texts (``| None`` with the default
None), each with a default. Ranges, ``Annotated[float, Range(0.0, 1.0)]``, are checked without data. ``wide:big?dropout=0.1`` calls
``build(data, size="big", dropout=0.1)``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ..core.errors import TrainerError, UsageError, raised
from ..core.job import Job
from ..core.plugins import find, is_reference, load, model_base
from ..core.units import decimal_number
from ..data.base import DataInfo
from ..data.store import location as resolve
from .base import ModelSpec

SIZE = "size"
Value = int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a number: `least` ≤ number < `below`."""

    least: float
    below: float

    @property
    def allowed(self) -> str:
        """The range in words."""
        return f"from {self.least:g} up to, but not including, {self.below:g}"


Rate = Annotated[float, Range(0.0, 1.0)]  # a share or probability below 1


@dataclass(frozen=True, slots=True)
class Argument:
    """A keyword-only parameter of a model's `build`.

    `choices`: of a Literal; `range`: of a number.
    """

    name: str
    kind: type
    choices: tuple[str, ...]
    default: Value
    range: Range | None = None

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text without &"}
        return ", ".join(self.choices) or kinds[self.kind] + (f" {self.range.allowed}" if self.range else "")

    def read(self, text: str) -> Value:
        """Parse a value. Raises ValueError for an invalid one."""
        value = self._read(text)
        if self.range is not None and isinstance(value, int | float) and not self.range.least <= value < self.range.below:
            raise ValueError(text)
        return value

    def _read(self, text: str) -> Value:
        if self.kind is str and (not self.choices or text in self.choices):
            return text
        if self.kind is bool and text in ("true", "false"):
            return text == "true"
        if self.kind is int and len(text) <= 18 and text.isascii() and text.removeprefix("-").isdigit():
            return int(text)
        if self.kind is float:
            return decimal_number(text)
        raise ValueError(text)

    def write(self, value: Value) -> str:
        """Return a value as text; equal values give equal texts."""
        if isinstance(value, bool):
            return str(value).lower()
        return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


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


def read_arguments(text: str, arguments: Mapping[str, Argument]) -> dict[str, Value]:
    """Parse the arguments in ``NAME[:SIZE][?key=value&…]``.

    Raises UsageError for unknown or repeated arguments and invalid values.
    """
    pairs = split_arguments(text, SIZE in arguments)
    if pairs and not arguments:
        raise UsageError(f"model: got {text!r}, but {model_base(text)!r} takes no arguments. Leave {text[len(model_base(text)) :]!r} out.")
    values: dict[str, Value] = {}
    for key, value in pairs:
        if key not in arguments:
            listed = ", ".join(f"{name}=…" for name in arguments)
            raise UsageError.of(f"model: argument of {model_base(text)!r}", key, listed, arguments)
        if key in values:
            raise UsageError(f"model: got {key!r} twice in {text!r}; give it once.")
        argument = arguments[key]
        try:
            values[key] = argument.read(value)
        except ValueError:
            raise UsageError.of(f"model: {key} of {model_base(text)!r}", value, argument.allowed, argument.choices) from None
    return values


def split_arguments(text: str, sized: bool) -> list[tuple[str, str]]:
    """Return the arguments of ``NAME[:SIZE][?key=value&…]`` as text, also repeated ones.

    Raises UsageError for another form.
    """
    base = model_base(text)
    before, question_mark, after = text[len(base) :].partition("?")
    pairs: list[tuple[str, str]] = []
    if before.startswith(":"):
        if not before[1:]:
            raise UsageError(f"model: got {text!r}, where nothing follows ':'; write {base}:SIZE, or leave ':' out.")
        pairs.append((SIZE, before[1:]) if sized else (before[1:], ""))
    if question_mark and not after:
        raise UsageError(f"model: got {text!r}, where nothing follows '?'; write {base}?key=value&key=value, or leave '?' out.")
    for part in after.split("&") if after else []:
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise UsageError(f"model: got {part!r} in {text!r}; write key=value, with '&' between two of them.")
        pairs.append((key, value))
    return pairs


def write_arguments(base: str, values: Mapping[str, Value], arguments: Mapping[str, Argument]) -> str:
    """Return ``NAME[:SIZE][?key=value&…]`` without defaults, in the order of `arguments`."""
    written = {key: argument.write(values[key]) for key, argument in arguments.items() if key in values and values[key] != argument.default}
    size = written.pop(SIZE, None)
    rest = "&".join(f"{key}={value}" for key, value in written.items())
    return base + (f":{size}" if size else "") + (f"?{rest}" if rest else "")


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
    """Return the job with canonical texts of its model and data."""
    return resolve.written_out(job).model_copy(update={"model": canonical_model(job.model)})


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


def build_model(name: str, data: DataInfo) -> ModelSpec:
    """Build the model `name` for this data.

    Raises UsageError for unknown models, invalid arguments, missing columns.
    """
    spec = load(find("model", name), "model")(name, data) if is_reference(model_base(name)) else _built(name, data)
    if not spec.inputs:
        raise UsageError(f"model: {name!r} reads no column; its `inputs` are empty")
    names = [column.name for column in data.columns]
    if missing := [column for column in (*spec.inputs, spec.target) if column not in names]:
        raise UsageError(
            f"model: {name!r} reads the columns {', '.join(dict.fromkeys((*spec.inputs, spec.target)))}, and {data.name!r} has no "
            f"{' and no '.join(dict.fromkeys(missing))}; it has {', '.join(names)}. Choose another dataset: trainer data list"
        )
    _check_translation(name, spec, data)
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
