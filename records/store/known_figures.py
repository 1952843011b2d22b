"""Fast reading of the known fields of ``summary.json``, for lists of thousands of runs.

Its msgspec types are derived from the pydantic schema and accept no value that this would refuse.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from pydantic import WrapValidator
from pydantic.fields import FieldInfo

from ...core.bounded_json import MAX_VALUES, JsonObject, UnreadableError, open_regular
from .jsonl import Loss
from .schema import SCHEMA
from .summary_schema import MODELS_WITH_METRICS, Summary, complete_nodes

_INT64 = 2**63 - 1


def _bounds(metadata: Sequence[Any]) -> dict[str, Any]:
    parts = [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
    bounds = {
        name: value
        for part in parts
        for name in ("ge", "gt", "le", "lt", "max_length", "pattern")
        if (value := getattr(part, name, None)) is not None
    }
    if "gt" in bounds:  # narrows `ge`, and msgspec takes one of them
        bounds.pop("ge", None)
    return bounds


def _msgspec_type(declared: Any, metadata: Sequence[Any] = ()) -> Any:
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is Annotated:
        return _msgspec_type(arguments[0], [*metadata, *arguments[1:]])
    if origin in (Union, UnionType):
        return Union[tuple(map(_msgspec_type, arguments))]  # noqa: UP007 — of a tuple of types
    if origin in (list, dict):
        declared = origin[tuple(map(_msgspec_type, arguments))]
    elif isinstance(declared, type) and issubclass(declared, JsonObject):
        return dict[str, Any] if _has_metrics(declared) else _struct(declared)
    bounds = _bounds(metadata)
    if declared is int:
        return _integer(bounds)
    if declared is float:  # longer integers are too large for the schema
        bounds = ({} if "gt" in bounds else {"ge": float(-_INT64)}) | {"le": float(_INT64)} | bounds
    bounded = Annotated[declared, msgspec.Meta(**bounds)] if bounds else declared
    stays_whole = any(isinstance(item, WrapValidator) for item in metadata)
    return _integer(bounds) | bounded if stays_whole else bounded


def _integer(bounds: Mapping[str, float]) -> Any:
    least = max(bounds.get("ge", -math.inf), math.floor(bounds["gt"]) + 1 if "gt" in bounds else -math.inf, -_INT64)
    most = min(bounds.get("le", math.inf), math.ceil(bounds["lt"]) - 1 if "lt" in bounds else math.inf, _INT64)
    return Annotated[int, msgspec.Meta(ge=math.ceil(least), le=math.floor(most))]


def _has_metrics(model: type[JsonObject]) -> bool:
    return "__pydantic_extra__" in vars(model).get("__annotations__", {})


@cache
def _struct(model: type[JsonObject]) -> type[msgspec.Struct]:
    """Return a model's fields and defaults as a struct, which skips unknown fields."""
    fields: list[Any] = []
    for name, info in model.model_fields.items():
        declared = _msgspec_type(info.annotation, info.metadata)
        factory: Any = info.default_factory
        if info.is_required():
            fields.append((name, declared))
        elif factory is None:
            fields.append((name, declared, info.default))
        else:
            fields.append((name, declared, msgspec.field(default_factory=_struct(factory) if factory not in (list, dict) else factory)))
    return msgspec.defstruct(model.__name__, fields, kw_only=True, gc=False)


_Document = msgspec.defstruct("_Document", [("schema", Literal[SCHEMA])], bases=(_struct(Summary),), kw_only=True, gc=False)
_DECODER = msgspec.json.Decoder(_Document)
_WITH_METRICS = {name: _struct(model) for name, model in MODELS_WITH_METRICS.items()}
_Metrics: Any = msgspec.defstruct("_Metrics", [("values", dict[str, _msgspec_type(Loss | None)])])  # type: ignore[misc]


def read_known_figures(path: Path) -> dict[str, Any] | None:
    """Return the known fields of a ``summary.json``.

    None if `checked_document` has to decide, also if it is missing.
    """
    try:
        with open_regular(path) as file:
            data = file.read(min(os.fstat(file.fileno()).st_size, MAX_VALUES) + 1)
        if data is None or len(data) > MAX_VALUES:
            return None
        summary: dict[str, Any] = msgspec.to_builtins(_DECODER.decode(data))
        for name, kind in _WITH_METRICS.items():
            if (evaluation := summary[name]) is not None:
                metrics = {key: value for key, value in evaluation.items() if key not in kind.__struct_fields__}
                known = msgspec.structs.asdict(msgspec.convert(evaluation, kind))
                summary[name] = known | msgspec.convert({"values": metrics}, _Metrics).values
    except (OSError, UnreadableError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    complete_nodes(summary, summary["per_node"])
    return summary
