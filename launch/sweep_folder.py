"""The folder of a sweep: ``sweep.json``, and a run directory for each point."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError

from ..core.bounded_json import JsonObject, UnreadableError, first_problem, open_regular, read_json
from ..core.console import one_line
from ..core.drafts import lock
from ..core.errors import UsageError
from ..core.job import Job, without_password
from ..core.settings.sources import shipped
from ..core.settings.sweeps import MAX_POINTS, MAX_REPEATS, NOT_SWEPT, SWEEP_FILE, Grid, Point, plan, value_text
from ..records.store.jsonl import DamagedRunError, write_document
from ..records.store.schema import SCHEMA
from .driver.resumption import CONFIG

PointState = Literal["waiting", "running", "succeeded", "failed", "interrupted"]


@dataclass(frozen=True)
class Request:
    """A sweep's configuration, settings and grid; on disk without a tracking URI's password."""

    config: str | None
    flags: Mapping[str, Any]
    grid: Grid

    def plan(self, environ: Mapping[str, str]) -> tuple[Point, ...]:
        """Return the points. Raises UsageError for invalid ones."""
        return plan(self.grid, self.flags, environ, self.config)

    def settings(self) -> Iterator[Mapping[str, Any]]:
        """Yield all settings in parts: the file's name (`CONFIG`), those for all points, the grid's."""
        yield {CONFIG: self.config}
        yield self.flags
        yield from ({name: value} for name, values in self.grid.axes.items() for value in values)
        yield from self.grid.cases

    def recorded(self) -> dict[str, Any]:
        """Return the request for ``sweep.json``."""
        clean = {"mlflow": without_password(self.flags["mlflow"])} if "mlflow" in self.flags else {}
        return {**asdict(self), "flags": {**self.flags, **clean}}


@dataclass
class Entry:
    """A point and its state; `attempts` counts its processes."""

    point: Point
    state: PointState = "waiting"
    cause: str | None = None
    exit_code: int | None = None
    attempts: int = 0
    seconds: float | None = None

    def described(self) -> dict[str, Any]:
        """Return the entry for ``sweep.json``."""
        job = {key: value for key, value in self.point.job.recorded().items() if key not in NOT_SWEPT}
        state = {key: value for key, value in vars(self).items() if key != "point"}
        return {"name": self.point.name, "settings": dict(self.point.settings), **state, "job": job}


class _Grid(JsonObject):
    axes: dict[str, list[Any]]
    cases: list[dict[str, Any]]
    repeats: Annotated[int, Field(ge=1, le=MAX_REPEATS)] | None


class _Request(JsonObject):
    config: str | None
    flags: dict[str, Any]
    grid: _Grid


class _Point(JsonObject):
    name: str
    job: dict[str, Any]
    state: PointState
    cause: str | None
    exit_code: int | None
    attempts: Annotated[int, Field(ge=0, le=2**53)]
    seconds: Annotated[float, Field(ge=0, le=1e12)] | None


class _Sweep(JsonObject):
    created_at: str
    request: _Request
    points: list[_Point]


def read_request(path: Path) -> Request:
    """Return the request of a sweep. Raises UsageError if `path` is no sweep's folder."""
    request = _document(path)["request"]
    grid = {name: request["grid"][name] for name in _Grid.model_fields}
    if (points := Grid(**grid).points) > MAX_POINTS:
        raise DamagedRunError(f"{path / SWEEP_FILE}: request.grid: has {points:,} points; a sweep has at most {MAX_POINTS:,}.")
    config = request["config"]
    if config is not None and config not in shipped():
        _expect_file(config, path)
    return Request(config, request["flags"], Grid(**grid))


def _expect_file(config: str, path: Path) -> None:
    """Raise DamagedRunError unless an untrusted name is of a regular file: a pipe may block."""
    try:
        open_regular(Path(config)).close()
    except FileNotFoundError:
        return  # reported by the plan
    except (UnreadableError, NotADirectoryError) as error:
        raise DamagedRunError(f"{path / SWEEP_FILE}: request.config: {config!r}: {error}.") from error


def _document(path: Path) -> dict[str, Any]:
    file = path / SWEEP_FILE
    try:
        document = read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"sweep: {str(path)!r} is not the folder of a sweep (it has no {SWEEP_FILE})") from None
    except UnreadableError as error:
        raise DamagedRunError(f"{file}: {error}.") from error
    if not isinstance(document, dict):
        raise DamagedRunError(f"{file}: holds {type(document).__name__}, not a JSON object.")
    if document.get("schema") != SCHEMA:
        raise DamagedRunError(f"{file}: has schema {document.get('schema')!r}; this version of trainer reads {SCHEMA}.")
    try:
        _Sweep.model_validate(document)
    except ValidationError as error:
        raise DamagedRunError(f"{file}: {first_problem(error)}.") from error
    return document


class SweepFolder:
    """One sweep on disk, locked by this process until `close`."""

    def __init__(self, path: Path, request: Request, points: Sequence[Point], command: Sequence[str]) -> None:
        """Make or open the folder. Raises UsageError if it is locked or has something else."""
        self.path = path
        self.entries = [Entry(point) for point in points]
        self.request, self._command = request, points[0].job.recorded_command(command)
        self._created = _now()
        self._lock: int | None = _locked(path)
        try:
            if (path / SWEEP_FILE).exists():
                self._take_up(_document(path))
            elif any(path.iterdir()):
                raise _taken(path)
            else:
                self.write("running")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the folder; idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def run_path(self, entry: Entry) -> Path:
        """Return a point's run directory, which need not exist."""
        return self.path / entry.point.name

    def write(self, state: str) -> None:
        """Replace ``sweep.json`` with this `state` of the sweep."""
        document = {
            "name": self.path.name,
            "state": state,
            "created_at": self._created,
            "changed_at": _now(),
            "pid": os.getpid(),
            "command": self._command,
            "request": self.request.recorded(),
            "points": [entry.described() for entry in self.entries],
        }
        write_document(self.path / SWEEP_FILE, document)

    def _take_up(self, document: Mapping[str, Any]) -> None:
        before = {entry["name"]: entry for entry in document["points"]}
        names = {entry.point.name for entry in self.entries}
        differences = [f"{entry.point.name} is new" for entry in self.entries if entry.point.name not in before]
        differences += [f"{one_line(name)} is missing" for name in before if name not in names]
        for entry in self.entries:
            if entry.point.name in before:
                differences += _changes(entry.point, before[entry.point.name]["job"])
        if differences:
            more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
            listed = "; ".join(differences[:3])
            raise UsageError(
                f"sweep: {str(self.path)!r} was begun with other points: {listed}{more}. Give another --name, or the same settings."
            )
        self._created = document["created_at"]
        fields = ("state", "cause", "exit_code", "attempts", "seconds")
        self.entries = [Entry(entry.point, **{field: before[entry.point.name][field] for field in fields}) for entry in self.entries]


def _changes(point: Point, before: Mapping[str, Any]) -> list[str]:
    now = point.job.recorded()
    changed = [name for name, value in before.items() if name in Job.model_fields and now[name] != value]
    return [f"{point.name}: {name} was {one_line(value_text(before[name]))}, now {value_text(now[name])}" for name in changed]


def check_free(path: Path) -> None:
    """Raise UsageError if this folder has something other than a sweep."""
    if path.is_dir() and any(path.iterdir()) and not (path / SWEEP_FILE).exists():
        raise _taken(path)


def _taken(path: Path) -> UsageError:
    return UsageError(f"name: {path.name!r} is taken in {str(path.parent)!r} and no sweep; give another --name")


def _locked(path: Path) -> int:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = lock(path)
    except OSError as error:
        raise UsageError(f"out: {str(path)!r} cannot hold a sweep ({error.strerror}). Give another folder with --out.") from error
    if descriptor is None:
        raise UsageError(f"sweep: {str(path)!r} is at work already, in another process")
    return descriptor


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")
