"""Arguments of models and losses: ``NAME[:SIZE][?key=value&…]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from ..core.errors import UsageError
from ..core.plugins import model_base
from ..core.units import decimal_number

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


def read_arguments(text: str, arguments: Mapping[str, Argument], setting: str = "model") -> dict[str, Value]:
    """Parse the arguments in ``NAME[:SIZE][?key=value&…]``, the value of a job's `setting`.

    Raises UsageError for unknown or repeated arguments and invalid values.
    """
    pairs = split_arguments(text, SIZE in arguments, setting)
    if pairs and not arguments:
        raise UsageError(
            f"{setting}: got {text!r}, but {model_base(text)!r} takes no arguments. Leave {text[len(model_base(text)) :]!r} out."
        )
    values: dict[str, Value] = {}
    for key, value in pairs:
        if key not in arguments:
            listed = ", ".join(f"{name}=…" for name in arguments)
            raise UsageError.of(f"{setting}: argument of {model_base(text)!r}", key, listed, arguments)
        if key in values:
            raise UsageError(f"{setting}: got {key!r} twice in {text!r}; give it once.")
        argument = arguments[key]
        try:
            values[key] = argument.read(value)
        except ValueError:
            raise UsageError.of(f"{setting}: {key} of {model_base(text)!r}", value, argument.allowed, argument.choices) from None
    return values


def split_arguments(text: str, sized: bool, setting: str = "model") -> list[tuple[str, str]]:
    """Return the arguments of ``NAME[:SIZE][?key=value&…]`` as text, also repeated ones.

    Raises UsageError for another form.
    """
    base = model_base(text)
    before, question_mark, after = text[len(base) :].partition("?")
    pairs: list[tuple[str, str]] = []
    if before.startswith(":"):
        if not before[1:]:
            raise UsageError(f"{setting}: got {text!r}, where nothing follows ':'; write {base}:SIZE, or leave ':' out.")
        pairs.append((SIZE, before[1:]) if sized else (before[1:], ""))
    if question_mark and not after:
        raise UsageError(f"{setting}: got {text!r}, where nothing follows '?'; write {base}?key=value&key=value, or leave '?' out.")
    for part in after.split("&") if after else []:
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise UsageError(f"{setting}: got {part!r} in {text!r}; write key=value, with '&' between two of them.")
        pairs.append((key, value))
    return pairs


def write_arguments(base: str, values: Mapping[str, Value], arguments: Mapping[str, Argument]) -> str:
    """Return ``NAME[:SIZE][?key=value&…]`` without defaults, in the order of `arguments`."""
    written = {key: argument.write(values[key]) for key, argument in arguments.items() if key in values and values[key] != argument.default}
    size = written.pop(SIZE, None)
    rest = "&".join(f"{key}={value}" for key, value in written.items())
    return base + (f":{size}" if size else "") + (f"?{rest}" if rest else "")
