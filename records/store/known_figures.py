"""Fast reading of the known fields of ``summary.json``, for lists of thousands of runs.

Its msgspec types are derived from the pydantic schema and accept no value that this would refuse.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
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
_BOUNDS = ("ge", "gt", "le", "lt", "max_length", "pattern")


def _msgspec_type(declared: Any, metadata: Sequence[Any] = ()) -> Any:
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is Annotated:
        info = FieldInfo.from_annotation(declared)
        return _msgspec_type(info.annotation, [*metadata, *info.metadata])
    if origin in (Union, UnionType):
        return Union[tuple(map(_msgspec_type, arguments))]  # noqa: UP007 — of a tuple of types
    if declared in MODELS_WITH_METRICS.values():
        return dict[str, Any]
    if origin in (list, dict):
        declared = origin[tuple(map(_msgspec_type, arguments))]
    elif isinstance(declared, type) and issubclass(declared, JsonObject):
        return _struct(declared)
    bounds = {name: bound for part in metadata for name in _BOUNDS if (bound := getattr(part, name, None)) is not None}
    if declared not in (int, float):
        return Annotated[declared, msgspec.Meta(**bounds)] if bounds else declared
    # Of a bound and a strict one, that of 64 bits also, the narrower counts; longer integers are too large for the schema.
    least, most = max(bounds.pop("ge", -_INT64), -_INT64), min(bounds.pop("le", _INT64), _INT64)
    low, high = bounds.pop("gt", -math.inf), bounds.pop("lt", math.inf)
    whole = msgspec.Meta(ge=max(math.ceil(least), low + 1), le=min(math.floor(most), high - 1))
    integer = Annotated[int, whole]
    if declared is int:
        return integer
    lower, upper = {"gt": low} if low >= least else {"ge": least}, {"lt": high} if high <= most else {"le": most}
    real = Annotated[float, msgspec.Meta(**lower, **upper)]
    return integer | real if any(isinstance(part, WrapValidator) for part in metadata) else real  # some whole numbers stay such


def _struct(model: type[JsonObject]) -> type[msgspec.Struct]:
    """Return a model's fields and defaults as a struct, which skips unknown fields."""
    fields: list[Any] = []
    for name, info in model.model_fields.items():
        factory: Any = info.default_factory
        if factory is not None:
            default = msgspec.field(default_factory=factory if factory in (list, dict) else _struct(factory))
        else:
            default = msgspec.NODEFAULT if info.is_required() else info.default
        fields.append((name, _msgspec_type(info.annotation, info.metadata), default))
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
