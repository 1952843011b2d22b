"""JSON lines of records; NaN and infinity are strings, null means not observed."""

from __future__ import annotations

import json
import math
import os
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path, PurePath
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WrapValidator

from ...core.bounded_json import NotJsonError, UnreadableError, is_readable_line, parse_json, read_lines
from ...core.console import is_text, spelled
from ...core.drafts import replacing
from ...core.errors import RunFailedError, TrainerError, writing
from ...core.job import MAX_NODES
from .schema import SCHEMA, EvalRecord, EventRecord, Float32, StepRecord, SystemRecord, TaskSample

Record = StepRecord | EvalRecord | EventRecord | SystemRecord
R = TypeVar("R", StepRecord, EvalRecord, EventRecord, SystemRecord)
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class DamagedRunError(TrainerError):
    """Unreadable file of a run directory; the message has file and line."""

    exit_code = 2


def finite_json(value: Any) -> Any:
    """Return a copy of a JSON value with strings for non-finite floats, and texts `spelled`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _name(value)
    if isinstance(value, str):
        return spelled(value)
    if isinstance(value, Mapping):
        return {finite_json(key): finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return finite_json(value.tolist())
    return value


def _name(value: float) -> str:
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic | np.ndarray):
        return finite_json(value)
    if isinstance(value, PurePath):
        return spelled(str(value))
    raise TypeError(f"{type(value).__name__} cannot be stored as JSON: {value!r}")


_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_plain)


def _dumps(value: Any) -> str:
    try:
        text = _encoder.encode(value)
    except ValueError:  # non-finite float
        return _encoder.encode(finite_json(value))
    return _encoder.encode(finite_json(value)) if "\\ud" in text else text  # perhaps a surrogate half


def encode(record: Record) -> bytes:
    """Return the record's line, with its newline."""
    if isinstance(record, StepRecord):
        return _encode_step(record)
    value: dict[str, Any] = {"schema": SCHEMA, **_shallow(record)}
    if isinstance(record, SystemRecord):
        value["tasks"] = [_shallow(task) for task in record.tasks]
    return f"{_dumps(value)}\n".encode()


def _shallow(record: Record | TaskSample) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _encode_step(record: StepRecord) -> bytes:
    """Format a step line at a third of the cost of ``json.dumps``.

    Nine digits identify every float32.
    """
    staleness = "null" if record.staleness is None else f"[{('%d,' * len(record.staleness) % tuple(record.staleness))[:-1]}]"
    return (
        f'{{"schema":{SCHEMA},"step":{record.step:d},"count":{record.count:d},"epoch":{record.epoch:d}'
        f',"time_seconds":{_float(record.time_seconds)},"seconds":{_float(record.seconds)},"examples":{record.examples:d}'
        f',"losses":[{_float32s(record.losses)}],"learning_rates":[{",".join(map(_float, record.learning_rates))}]'
        f',"data_wait_seconds":{_float(record.data_wait_seconds)},"network_wait_seconds":{_float(record.network_wait_seconds)}'
        f',"worker":{"null" if record.worker is None else int(record.worker)},"staleness":{staleness}'
        f',"profiled_seconds":{_float(record.profiled_seconds)}}}\n'
    ).encode()


def _float32s(values: tuple[float, ...]) -> str:
    if math.isfinite(sum(values)):
        return ("%.9g," * len(values) % tuple(values))[:-1]
    return ",".join(f"{value:.9g}" if math.isfinite(value) else f'"{_name(value)}"' for value in values)


def _float(value: float | None) -> str:
    if value is None:
        return "null"
    return repr(float(value)) if math.isfinite(value) else f'"{_name(value)}"'


Revive = Callable[[Any], Any]


def _reviver(declared: Any) -> Revive | None:
    """Return what restores the figures in a JSON value of a declared type, if it has any."""
    # Values of another type are returned as they are, for msgspec to name. A figure with bounds is never NaN.
    kind, parts = get_origin(declared), get_args(declared)
    if declared == tuple[Float32, ...]:
        return _revive_float32s
    if declared is float:
        return _revive_float
    if is_dataclass(declared):
        return _object_reviver(declared)
    revive = next((revive for part in parts if (revive := _reviver(part))), None) if kind is not Annotated else None
    if revive is None or kind in (Union, UnionType):
        return revive
    if kind is tuple:
        return lambda value: _revive_list(value, revive)
    return lambda value: {name: revive(item) for name, item in value.items()} if isinstance(value, dict) else value


def _object_reviver(record: Any) -> Revive:
    revivers = {name: revive for name, hint in get_type_hints(record, include_extras=True).items() if (revive := _reviver(hint))}

    def revive_object(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {**value, **{name: revive(value[name]) for name, revive in revivers.items() if name in value}}

    return revive_object


def _revive_float(value: Any) -> Any:
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def _revive_list(values: Any, revive: Revive) -> Any:
    return [revive(value) for value in values] if isinstance(values, list) else values


def _revive_float32s(values: Any) -> Any:
    """Return float32 values as the Python floats before writing."""
    with suppress(TypeError):
        return array("f", values).tolist()
    named = _revive_list(values, _revive_float)
    with suppress(TypeError):
        return array("f", named).tolist()
    return named


_REVIVERS = {kind: _object_reviver(kind) for kind in get_args(Record)}


def no_record(kind: type, error: Exception) -> str:
    """Describe a line for which `decode` has raised an error."""
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return f"not {article} {kind.__name__} that this release reads ({error})"


def decode(kind: type[R], value: Any) -> R:
    """Return a JSON object's record, with types and bounds checked.

    Raises ValueError, naming the field.
    """
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    if value.get("schema") != SCHEMA:
        raise ValueError(f"schema {value.get('schema')!r}, and this release reads schema {SCHEMA}")
    if kind is EvalRecord and "metrics" not in value and "accuracy" in value:  # format of earlier releases
        value = {**value, "metrics": {"accuracy": value["accuracy"]}}
    try:
        record: R = msgspec.convert(_REVIVERS[kind](value), kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    except UnicodeEncodeError as error:
        names = [spelled(name) for name, item in value.items() if not is_text(json.dumps({name: item}, ensure_ascii=False))]
        raise ValueError(f"{', '.join(names)[:80]} has half of a character") from error
    if isinstance(record, StepRecord):
        _expect_agreement(record)
    return record


def _expect_agreement(record: StepRecord) -> None:
    """Raise ValueError where lists differ from a group's size.

    Learning rates may be one or none.
    """
    for name, values, sizes in (
        ("losses", record.losses, (record.count,)),
        ("learning_rates", record.learning_rates, (record.count, 1, 0)),
        ("staleness", record.staleness, (record.count,)),
    ):
        if values is not None and len(values) not in sizes:
            raise ValueError(f"{record.count} updates with {len(values)} {name}")


def torn_line(path: Path, number: int) -> DamagedRunError:
    """Return the error for a line that is no JSON object. A crash may only tear the last one."""
    return DamagedRunError(
        f"{path}, line {number}: not a whole JSON record, and more lines follow it. The file was damaged after it was written."
    )


def read_records(path: Path, kind: type[R]) -> Iterator[R]:
    """Yield a file's records, skipping a torn last line.

    Raises DamagedRunError with file and line.
    """
    torn: int | None = None
    try:
        for number, line in enumerate(read_lines(path), 1):
            if torn is not None:
                raise torn_line(path, torn)
            value = None
            try:
                value = parse_json(line)
                record = decode(kind, value) if isinstance(value, dict) else None
            except NotJsonError:
                record = None
            except ValueError as error:
                problem = error if value is None else no_record(kind, error)
                raise DamagedRunError(f"{path}, line {number}: {problem}.") from error
            if record is None:
                torn = number
            else:
                yield record
    except FileNotFoundError:
        return
    except UnreadableError as error:
        raise DamagedRunError(f"{path}: {error}.") from error


def append_whole(descriptor: int, data: bytes) -> None:
    """Append in one write if possible.

    Raises OSError, and truncates, as half a record would damage the file.
    """
    written = os.write(descriptor, data)
    if written == len(data):
        return
    start = os.fstat(descriptor).st_size - written
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        os.ftruncate(descriptor, start)
        raise


class LineFile:
    """File of records, each appended by one write: a crash loses at most one line. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises DiskError."""
        self.path = path
        with writing(path):
            self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()

    def write(self, record: Record) -> int:
        """Append a record as a line; return the line's size in bytes.

        Raises DiskError; RunFailedError for a line that readers would refuse; ValueError once closed.
        """
        line = encode(record)
        if not is_readable_line(line):
            raise RunFailedError(
                f"{self.path.name}: a record of {len(line):,} bytes is more than is read of such a file; it was not written"
            )
        with self._lock:
            if self._descriptor is None:
                raise ValueError(f"{self.path} is closed")
            with writing(self.path):
                append_whole(self._descriptor, line)
        return len(line)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def write_document(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically, adding ``schema``. Raises DiskError."""
    with writing(path), replacing(path) as draft:
        draft.write_text(_document_text(value), encoding="utf-8")


def overwrite_document(path: Path, value: Mapping[str, Any]) -> None:
    """Overwrite a short JSON file in place, also on a full disk; readers may see half.

    Raises DiskError.
    """
    text = _document_text(value).encode()
    with writing(path), path.open("r+b") as file:  # "wb" would first release its space
        file.write(text)
        file.truncate()


def _document_text(value: Mapping[str, Any]) -> str:
    return json.dumps(finite_json({"schema": SCHEMA, **value}), indent=1, allow_nan=False, default=_plain) + "\n"


# Bounds are far beyond measurable figures: others were not written by a run.
MAX_TASKS = 1 << 16


def _as_it_is(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Check a number without converting an int."""
    validate(value)
    return value


Figure = Annotated[float, Field(ge=-1e30, le=1e30), WrapValidator(_as_it_is)]
# A float32 or a mean, written by `finite_json`.
Loss = Annotated[float, Field(ge=-1e40, le=1e40), WrapValidator(_as_it_is)] | Literal["NaN", "Infinity", "-Infinity"]
Seconds = Annotated[float, Field(ge=-1e12, le=1e12), WrapValidator(_as_it_is)]
Duration = Annotated[float, Field(ge=0, le=1e12), WrapValidator(_as_it_is)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Node = Annotated[int, Field(ge=0, lt=MAX_NODES)]
Worker = Annotated[int, Field(ge=0, lt=MAX_TASKS)]
Text = Annotated[str, Field(max_length=1 << 16)]
Name = Annotated[str, Field(max_length=4096)]


def _moment(text: str) -> str:
    try:
        datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise ValueError("a time as ISO 8601 writes it, such as 2026-05-01T10:00:00.000+00:00, is needed") from None
    return text


def _state(text: str) -> str:
    if text not in STATES:
        raise ValueError(f"is {text[:40]!r}; a run is {', '.join(STATES[:-1])} or {STATES[-1]}")
    return text


STATES = ("starting", "running", "succeeded", "failed", "interrupted")
State = Annotated[str, AfterValidator(_state), msgspec.Meta(pattern=rf"\A(?:{'|'.join(STATES)})\Z")]
Moment = Annotated[str, Field(max_length=100), AfterValidator(_moment)]
