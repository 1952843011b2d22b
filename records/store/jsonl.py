"""JSON lines of records; NaN and infinity are strings, null means not observed."""

from __future__ import annotations

import json
import math
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WrapValidator

from ...core.bounded_json import NotJsonError, UnreadableError, is_readable_line, parse_json, read_lines
from ...core.console import is_text, spelled
from ...core.drafts import replacing
from ...core.errors import RunFailedError, TrainerError, writing
from ...core.job import MAX_NODES
from .schema import SCHEMA, EvalRecord, EventRecord, StepRecord, SystemRecord, TaskSample

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
    """Format a step line at a third of the cost of ``json.dumps``; nine digits identify every float32."""
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


def _number(value: Any) -> float:
    return NON_FINITE[value] if isinstance(value, str) else float(value)


def _losses(values: list[Any]) -> tuple[float, ...]:
    """Return float32 values as the Python floats before writing."""
    try:
        return tuple(array("f", values))
    except TypeError:
        return tuple(array("f", [_number(value) for value in values]))


def _step_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    rates, staleness = value["learning_rates"], value.get("staleness")
    return {
        **_known(StepRecord, value),
        "losses": _made("losses", _losses, value["losses"]),
        "learning_rates": _made("learning_rates", lambda found: tuple(map(_number, found)), rates),
        "staleness": None if staleness is None else _made("staleness", tuple, staleness),
    }


def _made(name: str, make: Callable[[Any], Any], item: Any) -> Any:
    try:
        return make(item)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{name} has a value of another kind") from None


def _known(kind: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Keep known fields: later releases of the schema may write more."""
    return {field.name: _figure(str(field.type), value[field.name]) for field in fields(kind) if field.name in value}


def _figure(declared: str, item: Any) -> Any:
    return NON_FINITE.get(item, item) if isinstance(item, str) and declared.startswith("float") else item


def _system_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    tasks = _made("tasks", lambda tasks: [_known(TaskSample, task) for task in tasks], value.get("tasks", ()))
    return {**_known(SystemRecord, value), "tasks": tasks}


def _eval_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    metrics = value["metrics"] if "metrics" in value else {"accuracy": value["accuracy"]}  # format of earlier releases
    figures = _made("metrics", lambda metrics: {name: _figure("float", figure) for name, figure in metrics.items()}, metrics)
    return {**_known(EvalRecord, value), "metrics": figures}


_FIELDS: Mapping[type, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    StepRecord: _step_fields,
    SystemRecord: _system_fields,
    EvalRecord: _eval_fields,
    EventRecord: lambda value: _known(EventRecord, value),
}


def no_record(kind: type, error: ValueError) -> str:
    """Describe a line for which `decode` has raised an error."""
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return f"not {article} {kind.__name__} that this release reads ({error})"


def decode(kind: type[R], value: Any) -> R:
    """Return a JSON object's record, with types and bounds checked. Raises ValueError, naming the field."""
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    if value.get("schema") != SCHEMA:
        raise ValueError(f"schema {value.get('schema')!r}, and this release reads schema {SCHEMA}")
    try:
        record: R = msgspec.convert(_FIELDS[kind](value), kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing") from error
    except UnicodeEncodeError as error:
        names = [spelled(name) for name, item in value.items() if not is_text(json.dumps({name: item}, ensure_ascii=False))]
        raise ValueError(f"{', '.join(names)[:80]} has half of a character") from error
    if isinstance(record, StepRecord):
        _expect_agreement(record)
    return record


def _expect_agreement(record: StepRecord) -> None:
    """Raise ValueError where lists differ from a group's size; learning rates may be one or none."""
    for name, values, sizes in (
        ("losses", record.losses, (record.count,)),
        ("learning_rates", record.learning_rates, (record.count, 1, 0)),
        ("staleness", record.staleness, (record.count,)),
    ):
        if values is not None and len(values) not in sizes:
            raise ValueError(f"{record.count} updates with {len(values)} {name}")


def _objects(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object); only the last line may be torn, by a crash."""
    torn: int | None = None
    for number, line in enumerate(lines, 1):
        if torn is not None:
            raise DamagedRunError(
                f"{path}, line {torn}: not a whole JSON record, and more lines follow it. The file was damaged after it was written."
            )
        try:
            value = parse_json(line)
        except NotJsonError:
            torn = number
            continue
        except UnreadableError as error:
            raise DamagedRunError(f"{path}, line {number}: {error}.") from error
        if isinstance(value, dict):
            yield number, value
        else:
            torn = number


def read_records(path: Path, kind: type[R]) -> Iterator[R]:
    """Yield a file's records, skipping a torn last line. Raises DamagedRunError with file and line."""
    try:
        for number, value in _objects(path, read_lines(path)):
            try:
                record = decode(kind, value)
            except ValueError as error:
                raise DamagedRunError(f"{path}, line {number}: {no_record(kind, error)}.") from error
            yield record
    except FileNotFoundError:
        return
    except UnreadableError as error:
        raise DamagedRunError(f"{path}: {error}.") from error


def append_whole(descriptor: int, data: bytes) -> None:
    """Append in one write if possible. Raises OSError, and truncates, as half a record would damage the file."""
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
        """Append a record; return its bytes. Raises DiskError, RunFailedError beyond readers' limits, ValueError once closed."""
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
    """Overwrite a short JSON file in place, also on a full disk; readers may see half. Raises DiskError."""
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
