"""Run directory: its writer (driver), reader, and the purposes of its files."""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from ...core.bounded_json import UnreadableError, parse_json, read_json, read_lines
from ...core.console import inside, one_line
from ...core.drafts import lock
from ...core.errors import DiskError, UsageError, writing
from ...core.job import Job
from ...metrics import MetricInfo
from ...metrics.base import read_metrics
from .document_schemas import checked_document
from .heartbeat import Heartbeat
from .jsonl import DamagedRunError, LineFile, Record, overwrite_document, read_records, write_document
from .known_figures import read_known_figures
from .lockstep_results import Comparison
from .schema import SCHEMA, EvalRecord, EventRecord, StepRecord, SystemRecord

Keeps = Callable[[Mapping[str, Any]], bool]


DIVERGED = "diverge.json"


def write_diverged(run: Path, comparison: Comparison) -> None:
    """Write ``diverge.json`` into a run directory. Raises DiskError."""
    write_document(run / DIVERGED, msgspec.to_builtins(comparison))


def cut_records(path: Path, step: int, run_seconds: float) -> None:
    """Truncate the run directory `path` to `step` updates at `run_seconds` on the run clock.

    Kept: updates before `step`, evaluations up to it, events and samples up to `run_seconds`, and later events about checkpoints up to
    `step`. Removes ``summary.json`` and derived files. Raises DamagedRunError for an unreadable line but the last, OSError on a full disk;
    nothing is cut then.
    """

    def by_time(record: Mapping[str, Any]) -> bool:
        return float(record["time_seconds"]) <= run_seconds

    def event(record: Mapping[str, Any]) -> bool:
        return by_time(record) or (record["event"] == "checkpoint_saved" and record["detail"]["step"] <= step)

    rules: dict[str, Keeps] = {
        "steps.jsonl": lambda record: int(record["step"]) < step,
        "evals.jsonl": lambda record: int(record["step"]) <= step and by_time(record),
        "events.jsonl": event,
        "system.jsonl": by_time,
    }
    partial: dict[str, Path] = {}
    try:
        for name, keeps in rules.items():
            if (path / name).exists():
                partial[name] = _copy(path / name, keeps)
        for name, copied in partial.items():
            os.replace(copied, path / name)
    finally:
        for copied in partial.values():
            copied.unlink(missing_ok=True)
    (path / "summary.json").unlink(missing_ok=True)
    shutil.rmtree(path / "tensorboard", ignore_errors=True)
    for name in ("mllog.txt", "calibration.json"):
        (path / name).unlink(missing_ok=True)


def _copy(path: Path, keeps: Keeps) -> Path:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    torn: int | None = None
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as target:
            for number, line in enumerate(read_lines(path), 1):
                if torn is not None:
                    raise DamagedRunError(f"{path}, line {torn}: not a whole JSON record, and more lines follow it.")
                try:
                    record = parse_json(line)
                    stays = keeps(record)
                except (ValueError, KeyError, TypeError):
                    torn = number
                    continue
                if stays:
                    target.write(line)
            target.flush()
            os.fsync(target.fileno())
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, UnreadableError):
            raise DamagedRunError(f"{path}: {error}.") from error
        raise
    return partial


RunState = Literal["starting", "running", "succeeded", "failed", "interrupted"]
_LIVE = ("starting", "running")
_ATTEMPTS = 100
_MAX_NAME_PART = 80
_START_TOLERANCE_SECONDS = 2.0  # psutil derives starts from the boot time, which moves with the clock


class RunWriter:
    """Writer of a locked run directory; records may come from several threads."""

    def __init__(self, path: Path, created: datetime) -> None:
        """Open an existing directory.

        Raises UsageError where another process writes into it, DiskError.
        """
        self.path = path
        self._lock: int | None = _locked(path)
        self._identity = os.fstat(self._lock)
        self._created = created
        self._status_lock = threading.Lock()
        self.line_bytes = 0
        with ExitStack() as undone:
            undone.callback(os.close, self._lock)
            self._open()  # first: its records identify a run that starts
            undone.callback(self._close_files)
            self._heartbeat = Heartbeat(path)
            undone.pop_all()

    def _open(self) -> None:
        self._files = {name: LineFile(self.path / f"{name}.jsonl") for name in ("steps", "evals", "events", "system")}

    @classmethod
    def create(cls, job: Job, *, now: datetime | None = None) -> RunWriter:
        """Make a run directory, private to the owner.

        It is ``<out>/<date>-<time>-<model>-<backend>-<mode>-<nodes>n-<suffix>/``, or `job.name`. Raises UsageError where `job.name` is
        taken or `job.out` unwritable, DiskError, with nothing left, on a full disk.
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
        """Append to an ended run, after a remote driver's time to notice.

        Raises UsageError where another process resumes it too.
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
        """Truncate the records to a checkpoint (`cut_records`), while nothing is written.

        Raises DiskError.
        """
        self._close_files()
        try:
            with writing(self.path):
                cut_records(self.path, step, run_seconds)
        finally:
            self._open()

    def write_job(self, job: Mapping[str, Any]) -> None:
        """Write ``job.json``: resolved job fields and the driver's decisions."""
        write_document(self.path / "job.json", job)

    def write_env(self, nodes: Sequence[Mapping[str, Any]], code: Mapping[str, Any] | None = None) -> None:
        """Write ``env.json``: each node in node order, and the driver's code."""
        write_document(self.path / "env.json", {"nodes": list(nodes), "code": code})

    def write_status(
        self, state: RunState, *, cause: str | None = None, exit_code: int | None = None, task: str | None = None, pid: int | None = None
    ) -> None:
        """Replace ``status.json``, a final one also on a full disk; `task` failed first.

        Raises DiskError.
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
        """Write ``summary.json``, over an existing one also on a full disk. Raises DiskError."""
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
        self._append("steps", record)

    def evaluation(self, record: EvalRecord) -> None:
        """Append to ``evals.jsonl``."""
        self._append("evals", record)

    def event(self, record: EventRecord) -> None:
        """Append to ``events.jsonl``."""
        self._append("events", record)

    def system(self, record: SystemRecord) -> None:
        """Append to ``system.jsonl``, and set `line_bytes` to the line's length."""
        self.line_bytes = self._append("system", record)

    def _append(self, name: str, record: Record) -> int:
        self._heartbeat.check()
        return self._files[name].write(record)

    @property
    def there(self) -> bool:
        """Whether the run directory still exists under its path."""
        try:
            return os.path.samestat(os.stat(self.path), self._identity)
        except OSError:
            return False

    def check(self) -> None:
        """Raise DiskError where the directory is gone, replaced, read-only or taken over."""
        with writing(self.path):
            if not self.there:
                raise FileNotFoundError(errno.ENOENT, "the run directory is no longer there (removed or renamed)")
            if not os.access(self.path, os.W_OK | os.X_OK):
                number = errno.EROFS if os.statvfs(self.path).f_flag & os.ST_RDONLY else errno.EACCES
                raise OSError(number, os.strerror(number))
        self._heartbeat.check()

    def log_path(self, node: int, task: str) -> Path:
        """Return ``logs/<node>/<task>.log``, in a new folder.

        Raises UnsafeNameError for an unsafe task.
        """
        path = inside(self.path, f"logs/{node}/{task}.log")
        with writing(path.parent):
            for part in (path.parent.parent, path.parent):  # never recreates a removed run directory
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
        for file in self._files.values():
            file.close()


def _locked(path: Path) -> int:
    """Lock a run directory until closed or the process ends. Raises UsageError if locked."""
    descriptor = lock(path)
    if descriptor is None:
        raise UsageError(f"run: another process is writing into {str(path)!r}. Wait until it has ended.")
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
    """Return a text as part of a folder's name: letters, digits, ``_``, ``.`` and ``-``.

    Of a path before arguments only the last part remains.
    """
    return re.sub(r"[^\w.-]", "_", re.sub(r"^[^?]*/", "", text))[:_MAX_NAME_PART]


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
    """Return a process's identity, as the system reuses numbers."""
    try:
        started: float | None = psutil.Process(pid).create_time()
    except psutil.Error:
        started = None
    return {"pid": pid, "host": socket.gethostname(), "process_started_unix_seconds": started}


class RunReader:
    """Reader of a run directory, also live or crashed.

    Raises UsageError for another folder, DamagedRunError if unreadable.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / "job.json").is_file() and not (self.path / "status.json").is_file():
            problem = "it has neither job.json nor status.json" if self.path.is_dir() else "there is no such folder"
            raise UsageError(f"run: {str(path)!r} is not a run directory ({problem}). Runs are made under --out, by default in runs/.")

    @property
    def name(self) -> str:
        """Directory name, on one line."""
        is_last = self.path.name not in ("", "..") and not self.path.is_symlink()
        return one_line((self.path if is_last else self.path.resolve()).name)  # resolving costs a system call per folder

    def job(self) -> dict[str, Any]:
        """Return ``job.json``."""
        return self._required("job.json")

    def metrics(self) -> tuple[MetricInfo, ...]:
        """Return the run's metrics, the headline first and the loss last."""
        return read_metrics(self.job())

    def environment(self) -> dict[str, Any] | None:
        """Return ``env.json``, or None if missing."""
        return self._document("env.json")

    def status(self) -> dict[str, Any]:
        """Return ``status.json``."""
        return self._required("status.json")

    def summary(self) -> dict[str, Any] | None:
        """Return ``summary.json`` with the directory's current name, or None if missing."""
        summary = self._document("summary.json")
        return None if summary is None else {**summary, "run": self.name}

    def known_figures(self) -> dict[str, Any] | None:
        """Return `summary` without fields that this release does not know, several times as fast."""
        figures = read_known_figures(self.path / "summary.json")
        return self.summary() if figures is None else {**figures, "run": self.name}

    def calibration(self) -> dict[str, Any] | None:
        """Return ``calibration.json``, or None if missing."""
        return self._document("calibration.json")

    def diverged(self) -> Comparison | None:
        """Return ``diverge.json``, or None if missing."""
        path = self.path / DIVERGED
        fields = self._read(DIVERGED)
        if fields is None:
            return None
        if fields.get("schema") != SCHEMA:
            raise DamagedRunError(f"{path}: has schema {fields.get('schema')!r}; this release reads {SCHEMA}.")
        try:
            return msgspec.convert(fields, Comparison, strict=False)  # numbers that are not finite are texts
        except msgspec.ValidationError as error:
            raise DamagedRunError(f"{path}: {error}.") from error

    def steps(self) -> Iterator[StepRecord]:
        """Yield the step records in order of arrival."""
        return read_records(self.path / "steps.jsonl", StepRecord)

    def evals(self) -> Iterator[EvalRecord]:
        """Yield the evaluations."""
        return read_records(self.path / "evals.jsonl", EvalRecord)

    def events(self) -> Iterator[EventRecord]:
        """Yield the events."""
        return read_records(self.path / "events.jsonl", EventRecord)

    def system(self) -> Iterator[SystemRecord]:
        """Yield all nodes' resource samples in order of arrival."""
        return read_records(self.path / "system.jsonl", SystemRecord)

    def state(self) -> str:
        """Return the state of ``status.json``, or ``died`` for a live one whose driver is gone."""
        return state_now(self.status())

    def driver_alive(self) -> bool | None:
        """Return whether the driver still runs; None for another host."""
        return _alive(self.status()["driver"])

    def _document(self, name: str) -> dict[str, Any] | None:
        value = self._read(name)
        return None if value is None else checked_document(self.path / name, value)

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            value = read_json(path)
        except FileNotFoundError:
            return None
        except UnreadableError as error:
            raise DamagedRunError(f"{path}: {str(error).removeprefix('is ')}.") from error
        if not isinstance(value, dict):
            raise DamagedRunError(f"{path}: holds {type(value).__name__}, not a JSON object.")
        return value

    def _required(self, name: str) -> dict[str, Any]:
        value = self._document(name)
        if value is None:
            raise DamagedRunError(f"{self.path / name}: missing; the run ended before it was written, or the file was removed.")
        return value


def state_now(status: Mapping[str, Any]) -> str:
    """Return a ``status.json``'s state, or ``died`` for a live one whose driver is gone."""
    state = str(status["state"])
    return "died" if state in _LIVE and _alive(status["driver"]) is False else state


def _alive(driver: Mapping[str, Any]) -> bool | None:
    if driver["host"] != socket.gethostname():
        return None
    try:
        process = psutil.Process(driver["pid"])
        started, ended = process.create_time(), process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    known = driver["process_started_unix_seconds"]
    return not ended and known is not None and abs(started - known) <= _START_TOLERANCE_SECONDS


_CHECKPOINT_FILES = (
    ("parameters.safetensors", "weights and running statistics, by canonical name"),
    ("optimizer.safetensors", "what the optimiser remembers of each weight, by SLOT/NAME"),
    ("checkpoint.json", "where the run stood: updates, data cursor, clock, job, model, data"),
    ("manifest.json", "size and digest of each other file"),
)
# The first match counts; a star matches slashes too.
_PURPOSES: tuple[tuple[str, str], ...] = (
    ("job.json", "what was asked, with every default resolved"),
    ("env.json", "what each node is"),
    ("vocabulary.model", "the pieces of text that the model was trained on, as sentencepiece's model"),
    ("status.json", "how the run stands or ended"),
    ("heartbeat", "the driver's sign of life; of a run that is at work, or whose driver was killed"),
    ("summary.json", "the figures that compare with other runs"),
    ("steps.jsonl", "the updates: losses, times, learning rates"),
    ("evals.jsonl", "the evaluations"),
    (DIVERGED, "what `trainer diverge` found last"),
    ("calibration.json", "the parts of a step, timed by themselves after the run"),
    ("events.jsonl", "starts, ends, checkpoints, deaths"),
    ("system.jsonl", "resource samples of each node"),
    ("mllog.txt", "MLPerf's event log"),
    ("tensorboard/*", "event files for TensorBoard; fewer points than the records"),
    ("logs/stacks.txt", "where each task stood when the run did not get on"),
    ("logs/*", "output of each task"),
    ("profile/*", "traces of a few steps: .json for Chrome's trace viewer, .xplane.pb for TensorBoard's profile plugin"),
    *((f"checkpoints/step-*/{name}", purpose) for name, purpose in _CHECKPOINT_FILES),
    ("checkpoints/.*", "left by a writer that was killed; the next one removes it"),
    ("exports/*/README.md", "how to load this export without trainer"),
    ("exports/*/model.json", "this export's input, normalisation, classes and weights, for programs"),
    ("exports/*", "an exported model"),
    *_CHECKPOINT_FILES,
)
UNKNOWN = "not written by trainer"


@dataclass(frozen=True, slots=True)
class FileUse:
    """File of a folder: relative path, size and purpose."""

    path: str
    bytes: int
    purpose: str


def describe_folder(folder: Path) -> list[FileUse]:
    """Return a row per file below a run directory or checkpoint, by name.

    Vanishing files are skipped.
    """
    rows = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                purpose = next((purpose for pattern, purpose in _PURPOSES if fnmatch.fnmatchcase(name, pattern)), UNKNOWN)
                rows.append(FileUse(name, path.stat().st_size, purpose))
    return sorted(rows, key=lambda row: row.path)
