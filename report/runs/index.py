"""An SQLite cache of a folder's runs as flat rows, rebuilt if missing, damaged or older.

An external index is untrusted (links, an endless view as its table), so it is checked before SQLite opens it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from ...core.bounded_json import UnreadableError, parse_json
from ...core.console import note
from ...core.errors import TrainerError, UsageError
from ...records.store.jsonl import Loss, finite_json
from ...records.store.summary_schema import summary_type
from ...records.summary import job_fields, read_job
from .locate import check_readable, is_run, run_names
from .run import Run
from .summary_rows import figure_type, row

DAMAGED = "damaged"  # the state of a run with unreadable files; `problem` says why
_LIVE = ("starting", "running")
STATES = (*_LIVE, "succeeded", "failed", "interrupted", "died", DAMAGED)
# Keys of a row: those of `summary_rows.row`, and path, start (ISO 8601), problem and folder (such as a sweep's).
FIGURES = ("path", "folder", "created_at", "problem", *row({"per_node": []}))
_FILES = ("status.json", "summary.json", "job.json")
_BUSY_SECONDS = 30.0  # far longer than a write of thousands of rows takes
_NO_DAMAGE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)  # lowest bytes of codes that rebuilding would not fix
_TABLE = "CREATE TABLE runs (name BLOB PRIMARY KEY, stamp TEXT NOT NULL, state TEXT NOT NULL, row TEXT NOT NULL, digest INTEGER NOT NULL)"
_SCHEMA = [("table", "runs", _TABLE), ("index", "sqlite_autoindex_runs_1", None)]
_VERSION = zlib.crc32(repr((2, _TABLE, FIGURES)).encode()) >> 1  # user_version is signed; other releases have other figures
_TYPES: Mapping[str, Any] = {"created_at": str | None, "problem": str | None, "eval_error": summary_type(("eval", "loss"))}


def row_type(name: str) -> Any:
    """Return the pydantic type of one of `FIGURES`; each may be None."""
    return str if name == "path" else _TYPES.get(name) or figure_type(name)


_FIELDS: Any = {name: (row_type(name), ...) for name in FIGURES if name not in ("path", "folder")}
_BESIDE = ("", "-wal", "-shm", "-journal")  # suffixes of SQLite's files; an external journal could remove the file that it names


class _WithMetrics(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[Annotated[str, Field(pattern=r"^((best_)?eval|end)_[a-z0-9_]+$")], Loss | None] = Field(init=False)


_Row = create_model("_Row", __base__=_WithMetrics, **_FIELDS)
Entry = tuple[str, str, str]  # the stamp of a run's files, its state, and its row as JSON


class _UnusableIndexError(Exception):
    """The index file is missing, damaged, another release's or foreign."""


def list_runs(out: Path) -> list[dict[str, Any]]:
    """Return a row for each run below `out`, by name. Raises UnreadableFolderError for `out`."""
    # Keys are `FIGURES`, None if unknown. Runs without summary have their job's figures, unreadable ones the state `DAMAGED`.
    check_readable(out)
    problems = []
    for place in (out / ".index.sqlite", _cache(out)):
        try:
            return _shown(_kept(place, out), out)
        except (OSError, sqlite3.Error, _UnusableIndexError) as error:
            problems.append(f"{place}: {error}")
    note(f"runs: the index cannot be kept ({'; '.join(problems)}); all runs are read again")
    return _shown(_refreshed({}, out), out)


def _cache(out: Path) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG base directory specification ignores relative paths
        base = Path(os.path.expanduser("~")) / ".cache"
    return base / "crosstrain" / "runs" / f"{hashlib.sha256(os.fsencode(out.resolve())).hexdigest()[:16]}.sqlite"


def _shown(entries: Mapping[str, Entry], out: Path) -> list[dict[str, Any]]:
    return [
        {"path": str(out / name), "folder": name.rpartition("/")[0] or None, **parse_json(entries[name][2].encode())}
        for name in sorted(entries)
    ]


def _kept(place: Path, out: Path) -> dict[str, Entry]:
    """Update the index at `place` under a lock: SQLite's log must never meet another file."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            return _updated(place, out)
        except _UnusableIndexError:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _make(place)
            return _updated(place, out)


def _make(place: Path) -> None:
    for suffix in _BESIDE:
        Path(f"{place}{suffix}").unlink(missing_ok=True)
    os.close(os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite would create it readable by others
    with closing(sqlite3.connect(place, timeout=_BUSY_SECONDS, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(_TABLE)
        database.execute(f"PRAGMA user_version = {_VERSION}")  # last, so that the file of a killed process is unusable


def _updated(place: Path, out: Path) -> dict[str, Entry]:
    if not _are_own_files(place):
        raise _UnusableIndexError
    with closing(sqlite3.connect(place, timeout=_BUSY_SECONDS, isolation_level=None)) as database:
        with _damage_noticed():
            before = _entries(database)
        now = _refreshed(before, out)
        with _damage_noticed():
            _write(database, before, now)
        return now


@contextmanager
def _damage_noticed() -> Iterator[None]:
    """Raise _UnusableIndexError for any error that a damaged file may cause in a statement."""
    try:
        yield
    except (sqlite3.Error, UnicodeError, MemoryError) as error:  # Python's own errors have no code; a message may contain a damaged name
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _NO_DAMAGE:
            raise
        raise _UnusableIndexError(str(error)) from error


def _are_own_files(place: Path) -> bool:
    kinds = {}
    for suffix in _BESIDE:
        with suppress(FileNotFoundError):
            kinds[suffix] = stat.S_IFMT(os.lstat(f"{place}{suffix}").st_mode)
    return "" in kinds and "-journal" not in kinds and set(kinds.values()) == {stat.S_IFREG}


def _entries(database: sqlite3.Connection) -> dict[str, Entry]:
    tables = database.execute("SELECT type, name, sql FROM sqlite_master LIMIT 3").fetchall()
    if tables != _SCHEMA or database.execute("PRAGMA user_version").fetchone() != (_VERSION,):
        raise _UnusableIndexError
    found = {}
    for name, stamp, state, text, digest in database.execute("SELECT name, stamp, state, row, digest FROM runs"):
        if not _is_sound(name, stamp, state, text, digest):
            raise _UnusableIndexError
        found[os.fsdecode(name)] = (stamp, state, text)
    return found


def _write(database: sqlite3.Connection, before: Mapping[str, Entry], now: Mapping[str, Entry]) -> None:
    named = ((os.fsencode(name), entry) for name, entry in now.items() if before.get(name) != entry)
    changed = [(name, *entry, _digest(name, entry)) for name, entry in named]
    gone = [(os.fsencode(name),) for name in before if name not in now]
    if not changed and not gone:
        return
    database.execute("BEGIN IMMEDIATE")
    database.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?)", changed)
    database.executemany("DELETE FROM runs WHERE name = ?", gone)
    database.execute("COMMIT")


def _digest(name: bytes, entry: Entry) -> int:
    """Return the digest of a row; folder names are bytes that may not be valid text."""
    return zlib.crc32(b"\0".join((name, *(part.encode() for part in entry))))


def _is_sound(name: Any, stamp: Any, state: Any, text: Any, digest: Any) -> bool:
    """Return whether a row was written here: neither damaged nor from an external index."""
    if not isinstance(name, bytes) or not all(isinstance(part, str) for part in (stamp, state, text)):
        return False
    try:
        if digest != _digest(name, (stamp, state, text)):
            return False
        _Row.model_validate(parse_json(text.encode()))
    except (UnreadableError, UnicodeEncodeError, ValidationError):
        return False
    return True


def _refreshed(before: Mapping[str, Entry], out: Path) -> dict[str, Entry]:
    now = {}
    passed_over: list[Path] = []
    for name in run_names(out, passed_over):
        stamp = _stamp(out / name)
        known = before.get(name)
        if known is None or known[0] != stamp or known[1] in _LIVE:
            try:
                read = _figures(Run(out / name))
            except UsageError:
                continue  # removed by another process
            if read["state"] == DAMAGED and not is_run(out / name):
                continue
            known = (stamp, read["state"], json.dumps(finite_json(read), separators=(",", ":")))
        now[name] = known
    if passed_over:
        note(f"passed over, as they cannot be read: {', '.join(sorted(map(str, passed_over)))}")
    return now


def _stamp(path: Path) -> str:
    parts = []
    for name in _FILES:
        try:
            status = os.stat(path / name)
        except OSError:
            parts.append("-")
        else:
            parts.append(f"{status.st_ino}.{status.st_mtime_ns}.{status.st_size}")
    return " ".join(parts)


def run_row(run: Run) -> dict[str, Any]:
    """Return the row of one run from its files."""
    return {"path": str(run.path), **_figures(run)}


def _figures(run: Run) -> dict[str, Any]:
    created = None
    try:
        created = str(run.status["created_at"])
        figures = row(run.summary) if run.has_summary else _without_summary(run)
        return {"created_at": created, "problem": None, **figures, "run": run.own_name, "state": run.state}
    except (TrainerError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        problem = str(error) if isinstance(error, TrainerError) else f"{run.path}: {type(error).__name__}: {error}"
        return {"created_at": created, "problem": problem, **row({"per_node": []}), "run": run.path.name, "state": DAMAGED}


def _without_summary(run: Run) -> dict[str, Any]:
    job = read_job(run.job)
    return row({**job_fields(job, run.own_name), "target": job.until, "per_node": []})
