"""Arguments of a model, as ``--model NAME[:SIZE][?key=value&key=value]`` gives them: the keyword-only parameters of its `build`.

Each has an annotation (int, float, bool, str, or a Literal of texts; with ``| None`` where the default is None) and a default. A number
that has to lie in a range says so, and is refused before there are data: ``Annotated[float, Range(0.0, 1.0)]``, in short `Rate`. What
stands between ``:`` and ``?`` is the argument `size`. So ``wide:big?dropout=0.1`` calls ``build(data, size="big", dropout=0.1)``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ..core.errors import UsageError
from ..core.plugins import model_base
from ..core.units import decimal_number

__all__ = ["SIZE", "Argument", "Range", "Rate", "arguments_of", "read_arguments", "write_arguments"]

SIZE = "size"

Value = int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class Range:
    """What a number may be: from `least` up to, but not including, `below`."""

    least: float
    below: float

    @property
    def allowed(self) -> str:
        """The same in words."""
        return f"from {self.least:g} up to, but not including, {self.below:g}"


Rate = Annotated[float, Range(0.0, 1.0)]
"""A share or a probability below 1, such as that of a dropout."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A keyword-only parameter of a model's `build`. `choices` are the texts of a Literal, empty for any other kind; `range` a number's."""

    name: str
    kind: type
    choices: tuple[str, ...]
    default: Value
    range: Range | None = None

    @property
    def allowed(self) -> str:
        """What may be given, in words."""
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text without &"}
        return ", ".join(self.choices) or kinds[self.kind] + (f" {self.range.allowed}" if self.range else "")

    def read(self, text: str) -> Value | None:
        """Return the value that a text stands for. Raises ValueError where it is none."""
        value = self._read(text)
        if self.range is not None and isinstance(value, int | float) and not self.range.least <= value < self.range.below:
            raise ValueError(text)
        return value

    def _read(self, text: str) -> Value | None:
        if self.choices:
            if text not in self.choices:
                raise ValueError(text)
            return text
        if self.kind is bool:
            return {"true": True, "false": False}[text] if text in ("true", "false") else _refuse(text)
        if self.kind is int:
            return int(text) if len(text) <= 18 and text.isascii() and text.removeprefix("-").isdigit() else _refuse(text)
        if self.kind is float:
            return decimal_number(text)
        return text

    def write(self, value: Value) -> str:
        """Return a value as text: one text for one value."""
        if isinstance(value, bool):
            return str(value).lower()
        return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _refuse(text: str) -> Value:
    raise ValueError(text)


def arguments_of(name: str, build: Callable[..., Any]) -> dict[str, Argument]:
    """Return the arguments of the model called `name` by name. Raises UsageError where `build` declares one otherwise than it has to."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except ValueError:  # of some callables nothing is known
        return {}
    own = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    if not own:
        return {}
    try:
        hints = get_type_hints(build, include_extras=True)
    except Exception as error:  # whatever somebody else's annotations raise
        raise UsageError(f"model: the annotations of the `build` of {name!r} cannot be read: {type(error).__name__}: {error}") from error
    return {parameter.name: _argument(name, parameter, hints.get(parameter.name)) for parameter in own}


def _argument(model: str, parameter: inspect.Parameter, hint: Any) -> Argument:
    """Return what a keyword-only parameter declares."""
    alternatives = [each for each in get_args(hint) if each is not type(None)] if get_origin(hint) in (Union, types.UnionType) else [hint]
    kind, own = alternatives[0], None
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        own = next((each for each in more if isinstance(each, Range)), None)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    known = kind in (int, float, bool, str) or (choices and all(isinstance(choice, str) for choice in choices))
    if len(alternatives) != 1 or not known or parameter.default is parameter.empty:
        raise UsageError(
            f"model: the argument {parameter.name!r} of the `build` of {model!r} needs a default, and int, float, bool, str or a Literal "
            f"of texts as its annotation; it has {inspect.formatannotation(hint)}."
        )
    return Argument(parameter.name, str if choices else kind, tuple(choices), parameter.default, own)


def read_arguments(text: str, arguments: Mapping[str, Argument]) -> dict[str, Value]:
    """Return the values that ``NAME[:SIZE][?key=value&…]`` gives, by argument; what it leaves out is not among them.

    Raises UsageError for arguments that the model does not have, that are given twice, and for values that are none.
    """
    given = _given(text, SIZE in arguments)
    if given and not arguments:
        raise UsageError(f"model: got {text!r}, but {model_base(text)!r} takes no arguments. Leave {text[len(model_base(text)) :]!r} out.")
    found: dict[str, Value] = {}
    for key, value in given:
        if key not in arguments:
            listed = ", ".join(f"{name}=…" for name in arguments)
            raise UsageError.of(f"model: argument of {model_base(text)!r}", key, listed, arguments)
        if key in found:
            raise UsageError(f"model: got {key!r} twice in {text!r}; give it once.")
        argument = arguments[key]
        try:
            found[key] = argument.read(value)
        except ValueError:
            raise UsageError.of(f"model: {key} of {model_base(text)!r}", value, argument.allowed, argument.choices) from None
    return found


def _given(text: str, sized: bool) -> list[tuple[str, str]]:
    """Return the pairs of a text, as they stand there."""
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
    """Return ``NAME[:SIZE][?key=value&…]`` without what has its default, in the order of `arguments`: one text for one meaning."""
    written = {key: argument.write(values[key]) for key, argument in arguments.items() if key in values and values[key] != argument.default}
    size = written.pop(SIZE, None)
    rest = "&".join(f"{key}={value}" for key, value in written.items())
    return base + (f":{size}" if size else "") + (f"?{rest}" if rest else "")
