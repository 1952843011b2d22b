"""The run directory: its writer, which the driver uses while the run goes on, and its reader, which everything else uses."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from ...core.errors import DiskError, UsageError, writing
from ...core.job import Job
from ...core.untrusted.bounded_json import UnreadableError, read_json
from ...core.untrusted.console import one_line
from ...core.untrusted.path_names import inside
from ...metrics import MetricInfo
from ...metrics.recorded import read_metrics
from ..schema import EvalRecord, EventRecord, StepRecord, SystemRecord
from .document_schemas import checked_document
from .heartbeat import Heartbeat
from .jsonl import DamagedRunError, LineFile, overwrite_document, read_records, write_document
from .truncation import cut_records

__all__ = ["RunReader", "RunState", "RunWriter", "name_part", "state_now"]

RunState = Literal["starting", "running", "succeeded", "failed", "interrupted"]

_LIVE = ("starting", "running")
_ATTEMPTS = 100
_LONGEST_NAME_PART = 80
_START_TOLERANCE_SECONDS = 2.0  # psutil derives a process's start from the boot time, which moves when the clock is set


class RunWriter:
    """Writes one run directory, which is locked meanwhile. Records may come from several threads."""

    def __init__(self, path: Path, created: datetime) -> None:
        """Open the files in a directory that `create` has made.

        Raises UsageError where another process writes into it, DiskError where nobody can.
        """
        self.path = path
        self._lock: int | None = _locked(path)
        self._identity = os.fstat(self._lock)
        self._created = created
        self._status_lock = threading.Lock()
        self.line_bytes = 0
        with ExitStack() as undone:
            undone.callback(os.close, self._lock)
            self._heartbeat = Heartbeat(path)
            undone.callback(self._heartbeat.close)
            self._open()
            undone.pop_all()

    def _open(self) -> None:
        self._steps = LineFile(self.path / "steps.jsonl")
        self._evals = LineFile(self.path / "evals.jsonl")
        self._events = LineFile(self.path / "events.jsonl")
        self._system = LineFile(self.path / "system.jsonl")

    @classmethod
    def create(cls, job: Job, *, now: datetime | None = None) -> RunWriter:
        """Make ``<out>/<date>-<time>-<model>-<backend>-<mode>-<nodes>n-<suffix>/`` (or `job.name`), readable by its owner alone.

        `now` names the directory (default: the local time). Raises UsageError where `job.name` is taken or `job.out` cannot be written,
        and DiskError, with nothing left behind, where the disk is full.
        """
        created = now or datetime.now().astimezone()
        try:
            job.out.mkdir(parents=True, exist_ok=True)
            path = _make_named(job.out / job.name) if job.name else _make_new(job, created)
        except OSError as error:
            raise UsageError(
                f"out: {str(job.out)!r} cannot hold run directories ({error.strerror}). Give another folder with --out."
            ) from error
        try:
            return cls(path, created)
        except DiskError:
            shutil.rmtree(path)
            raise

    @classmethod
    def reopen(cls, path: Path) -> RunWriter:
        """Go on in the directory of a run that has ended. Records are appended; see `cut`.

        Of one whose driver was on another host it waits until that would have noticed, were it there yet. Raises UsageError where another
        process goes on with it too.
        """
        status = RunReader(path).status()
        writer = cls(path, datetime.fromisoformat(status["created_at"]))
        if status["state"] in _LIVE and _alive(status["driver"]) is None:
            try:
                writer._heartbeat.settle()
            except UsageError:
                writer.close()
                raise
        return writer

    def cut(self, step: int, run_seconds: float) -> None:
        """Take the records back to a checkpoint (`cut_records`); call while nothing is written. Raises DiskError."""
        self._close_files()
        try:
            with writing(self.path):
                cut_records(self.path, step, run_seconds)
        finally:
            self._open()

    def write_job(self, job: Mapping[str, Any]) -> None:
        """Write ``job.json``: the fields of the Job with nothing left open, and what the driver resolved besides."""
        write_document(self.path / "job.json", job)

    def write_env(self, nodes: Sequence[Mapping[str, Any]], code: Mapping[str, Any] | None = None) -> None:
        """Write ``env.json``: what each node is, in node order, and which `code` the driver runs."""
        write_document(self.path / "env.json", {"nodes": list(nodes), "code": code})

    def write_status(
        self, state: RunState, *, cause: str | None = None, exit_code: int | None = None, task: str | None = None, pid: int | None = None
    ) -> None:
        """Replace ``status.json``. `task` is the one that failed first; `pid` is the driver's (default: this process).

        How a run ended is also told where the disk is full. Raises DiskError.
        """
        self.check()
        with self._status_lock:
            status = {
                "state": state,
                "cause": cause,
                "exit_code": exit_code,
                "task": task,
                "driver": _driver(os.getpid() if pid is None else pid),
                "created_at": self._created.astimezone().isoformat(timespec="milliseconds"),
                "changed_at": datetime.now().astimezone().isoformat(timespec="milliseconds"),
            }
            try:
                write_document(self.path / "status.json", status)
            except DiskError:
                if state in _LIVE:
                    raise
                overwrite_document(self.path / "status.json", status)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``; one that is there can be corrected where the disk is full. Raises DiskError."""
        self.check()
        path = self.path / "summary.json"
        try:
            write_document(path, summary)
        except DiskError:
            if not path.exists():
                raise
            overwrite_document(path, summary)

    def write_calibration(self, calibration: Mapping[str, Any]) -> None:
        """Write ``calibration.json``."""
        write_document(self.path / "calibration.json", calibration)

    def step(self, record: StepRecord) -> None:
        """Append to ``steps.jsonl``."""
        self._heartbeat.check()
        self._steps.write(record)

    def evaluation(self, record: EvalRecord) -> None:
        """Append to ``evals.jsonl``."""
        self._heartbeat.check()
        self._evals.write(record)

    def event(self, record: EventRecord) -> None:
        """Append to ``events.jsonl``."""
        self._heartbeat.check()
        self._events.write(record)

    def system(self, record: SystemRecord) -> None:
        """Append to ``system.jsonl``; `line_bytes` says then how long that line is."""
        self._heartbeat.check()
        self.line_bytes = self._system.write(record)

    @property
    def there(self) -> bool:
        """Whether the run directory is still to be found under its path."""
        try:
            return os.path.samestat(os.stat(self.path), self._identity)
        except OSError:
            return False

    def check(self) -> None:
        """Raise DiskError where the run directory is gone, or another, or may only be read: files that are open notice none of it.

        So it does where another driver has taken the run for dead, and has gone on with it.
        """
        with writing(self.path):
            if not self.there:
                raise FileNotFoundError(errno.ENOENT, "the run directory is no longer there (removed or renamed)")
            if not os.access(self.path, os.W_OK | os.X_OK):
                number = errno.EROFS if os.statvfs(self.path).f_flag & os.ST_RDONLY else errno.EACCES
                raise OSError(number, os.strerror(number))
        self._heartbeat.check()

    def log_path(self, node: int, task: str) -> Path:
        """Return ``logs/<node>/<task>.log``, in a folder that exists. Raises UnsafeNameError for a task that cannot name a file of it."""
        path = inside(self.path, f"logs/{node}/{task}.log")
        with writing(path.parent):
            for part in (path.parent.parent, path.parent):  # not the run directory, where that has been removed
                part.mkdir(mode=0o700, exist_ok=True)
        return path

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._close_files()
        self._heartbeat.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _close_files(self) -> None:
        for file in (self._steps, self._evals, self._events, self._system):
            file.close()


def _locked(path: Path) -> int:
    """Lock a run directory until the descriptor is closed or the process ends. Raises UsageError where it is locked already."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(f"run: another process is writing into {str(path)!r}. Wait until it has ended.") from None
    return descriptor


def _make_named(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise UsageError(
            f"name: {path.name!r} is taken in {str(path.parent)!r}; a run never writes into another's directory. Give another --name."
        ) from None
    return path


def name_part(text: str) -> str:
    """Return a text as a part of a folder's name: what is no letter, digit, ``_``, ``.`` or ``-`` becomes ``_``; cut where it is long."""
    return re.sub(r"[^\w.-]", "_", text)[:_LONGEST_NAME_PART]


def _make_new(job: Job, created: datetime) -> Path:
    stem = f"{created:%Y%m%d-%H%M%S}-{name_part(job.model)}-{name_part(job.backend)}-{job.mode}-{job.nodes}n"
    for _ in range(_ATTEMPTS):
        path = job.out / f"{stem}-{secrets.token_hex(2)}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path
    raise UsageError(f"out: {_ATTEMPTS} names like {stem}-… are taken in {str(job.out)!r}. Give another folder with --out, or a --name.")


def _driver(pid: int) -> dict[str, Any]:
    """Return what identifies a process beyond its number, which the system uses again."""
    try:
        started: float | None = psutil.Process(pid).create_time()
    except psutil.Error:
        started = None
    return {"pid": pid, "host": socket.gethostname(), "process_started_unix_seconds": started}


class RunReader:
    """Reads one run directory, also while it is being written or after a crash: each call opens its file anew, and nothing is kept.

    Raises UsageError where `path` is no run directory, DamagedRunError where a file of it cannot be read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / "job.json").is_file() and not (self.path / "status.json").is_file():
            found = "it has neither job.json nor status.json" if self.path.is_dir() else "there is no such folder"
            raise UsageError(f"run: {str(path)!r} is not a run directory ({found}). Runs are made under --out, by default in runs/.")

    @property
    def name(self) -> str:
        """The directory's name, on one line."""
        return one_line(self.path.resolve().name)

    def job(self) -> dict[str, Any]:
        """Return ``job.json``."""
        return self._required("job.json")

    def metrics(self) -> tuple[MetricInfo, ...]:
        """Return the metrics of the run's evaluations, the headline first and the loss last."""
        return read_metrics(self.job())

    def environment(self) -> dict[str, Any] | None:
        """Return ``env.json``, or None where the run has none (yet)."""
        return self._document("env.json")

    def env(self) -> list[dict[str, Any]]:
        """Return what each node is, in node order; empty where the run never came so far."""
        document = self.environment()
        return [] if document is None else list(document["nodes"])

    def code(self) -> dict[str, Any] | None:
        """Return which code the driver ran; None where the run does not tell."""
        document = self.environment()
        return None if document is None else document.get("code")

    def status(self) -> dict[str, Any]:
        """Return ``status.json``."""
        return self._required("status.json")

    def summary(self) -> dict[str, Any] | None:
        """Return ``summary.json``, or None where the run has none (yet); the run is called as its directory is now."""
        found = self._document("summary.json")
        return None if found is None else {**found, "run": self.name}

    def calibration(self) -> dict[str, Any] | None:
        """Return ``calibration.json``, or None where the run has none."""
        return self._document("calibration.json")

    def steps(self) -> Iterator[StepRecord]:
        """Yield the step records in the order of their arrival."""
        return read_records(self.path / "steps.jsonl", StepRecord)

    def evals(self) -> Iterator[EvalRecord]:
        """Yield the evaluations."""
        return read_records(self.path / "evals.jsonl", EvalRecord)

    def events(self) -> Iterator[EventRecord]:
        """Yield the events."""
        return read_records(self.path / "events.jsonl", EventRecord)

    def system(self) -> Iterator[SystemRecord]:
        """Yield the resource samples of all nodes in the order of their arrival."""
        return read_records(self.path / "system.jsonl", SystemRecord)

    def state(self) -> str:
        """Return the state as it is now: what ``status.json`` says, or ``died`` where it says live and the driver is gone."""
        return state_now(self.status())

    def driver_alive(self) -> bool | None:
        """Return whether the process that wrote the status still runs; None where it ran on another host."""
        return _alive(self.status()["driver"])

    def _document(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            value = read_json(path)
        except FileNotFoundError:
            return None
        except UnreadableError as error:
            raise DamagedRunError(f"{path}: {str(error).removeprefix('is ')}.") from error
        if not isinstance(value, dict):
            raise DamagedRunError(f"{path}: holds {type(value).__name__}, not a JSON object.")
        return checked_document(path, value)

    def _required(self, name: str) -> dict[str, Any]:
        value = self._document(name)
        if value is None:
            raise DamagedRunError(f"{self.path / name}: missing; the run ended before it was written, or the file was removed.")
        return value


def state_now(status: Mapping[str, Any]) -> str:
    """Return the state that a ``status.json`` tells of: its own, or ``died`` where that is a live one and the driver is gone."""
    state = str(status["state"])
    return "died" if state in _LIVE and _alive(status["driver"]) is False else state


def _alive(driver: Mapping[str, Any]) -> bool | None:
    """Return whether a process that `_driver` described still runs; None where it ran on another host."""
    if driver["host"] != socket.gethostname():
        return None
    try:
        process = psutil.Process(driver["pid"])
        started, ended = process.create_time(), process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    if ended:  # though nobody has asked for its exit code yet
        return False
    known = driver["process_started_unix_seconds"]
    return known is not None and abs(started - known) <= _START_TOLERANCE_SECONDS
