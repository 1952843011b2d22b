"""How columns of data become the arguments of a model.

docs/your-own-model.md has the table of what a parameter gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Literal

from ...core.errors import UsageError
from .requests import DataFacts, InputColumn

Kind = Literal["values", "lengths", "mask", "attention_mask"]


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of forward: `columns` side by side, or what is made of one's lengths.

    `positional`: it cannot be passed by its name, or precedes all that are.
    """

    parameter: str
    columns: tuple[str, ...]
    kind: Kind = "values"
    positional: bool = True


def arguments_of(signature: Iterable[Parameter], data: DataFacts, owner: str) -> list[Argument]:
    """Return what the parameters of a signature get from the data's input columns.

    `owner`: whose they are, for messages. Raises UsageError for parameters that are no column, and columns that are no parameter.
    """
    parameters = [part for part in signature if part.kind is not part.VAR_KEYWORD]
    columns = {column.name: column for column in data.inputs}
    known: dict[str, tuple[tuple[str, ...], Kind]] = _from_lengths(data) | {name: ((name,), "values") for name in columns}
    matched = {part.name: known[part.name] for part in parameters if part.name in known}
    open_parameters = [part for part in parameters if part.name not in known]
    required = [part.name for part in open_parameters if part.default is part.empty and part.kind is not part.VAR_POSITIONAL]
    if any(kind == "values" for _, kind in matched.values()):
        only = None
    else:
        only = required.pop(0) if required else next((part.name for part in open_parameters), None)
    if required or (only is None and not matched):
        wrong = required[0] if required else "no parameter"
        raise UsageError.of(f"model: parameter of {owner}", wrong, _listed(known), known)
    if only is not None:
        matched[only] = _side_by_side(list(columns.values()), owner), "values"
    arguments: list[Argument] = []
    for part in parameters:
        if part.name in matched:
            positional = part.kind is not part.KEYWORD_ONLY and len(arguments) == parameters.index(part)
            arguments.append(Argument(part.name, *matched[part.name], positional))
    return arguments


def _from_lengths(data: DataFacts) -> dict[str, tuple[tuple[str, ...], Kind]]:
    """Return the parameters that are made of a varying column's lengths, by name."""
    varying = [column.name for column in data.inputs if column.varies]
    made: dict[str, tuple[tuple[str, ...], Kind]] = {}
    for name in varying:
        prefixes = [f"{name}_", ""] if len(varying) == 1 else [f"{name}_"]
        for prefix in prefixes:
            made |= {f"{prefix}{kind}": ((name,), kind) for kind in ("lengths", "mask", "attention_mask")}
    return made


def _listed(known: Mapping[str, Any]) -> str:
    return f"{', '.join(known)}, or a single parameter of any name"


def _side_by_side(columns: Sequence[InputColumn], owner: str) -> tuple[str, ...]:
    names = tuple(column.name for column in columns)
    alike = all(column.dtype == "float32" and not column.varies and len(column.shape) <= 1 for column in columns)
    if len(columns) > 1 and not alike:
        shown = ", ".join(f"{column.name} ({column.dtype})" for column in columns)
        raise UsageError(
            f"model: {owner} has one parameter for the columns {shown}, which cannot be joined; name its parameters after them."
        )
    return names
