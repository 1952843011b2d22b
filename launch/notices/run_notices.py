"""The notices of one run: what its driver knows of it goes into each, and what could not be told into its events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ...core.errors import DiskError
from ...records.schema import EventRecord
from ...records.store.jsonl import LineFile
from ...records.store.run_directory import RunState
from .news import Event, RunNews
from .notifier import Notifier

__all__ = ["RunNotices"]

EVENTS = "events.jsonl"

_ENDS: Mapping[RunState, Event] = {"succeeded": "finished", "interrupted": "interrupted", "failed": "failed"}


class RunNotices:
    """Tells of a run by `notifier`. `done` returns the updates that the run has done and the seconds that it has taken, at any time."""

    def __init__(self, notifier: Notifier, name: str | None, done: Callable[[], tuple[int, float]]) -> None:
        self._notifier = notifier
        self._name = name
        self._done = done
        self._path: Path | None = None
        self._restarts = 0
        self._live: Callable[..., None] | None = None

    def has_directory(self, path: Path, record: Callable[..., None]) -> None:
        """The run has a directory, which the notices name; `record` is called with an event of it and its details, until the end."""
        self._path = path.absolute()
        self._live = record
        self._notifier.on_failed = self._record

    def restarted(self, cause: str, task: str | None) -> None:
        """The run has begun anew, after what an attempt has ended with. Takes no time."""
        self._restarts += 1
        self._notifier.restarted(self._news("restarted", cause, task, None))

    def ended(self, state: RunState, cause: str | None, task: str | None, exit_code: int) -> None:
        """The run has come to that state, and its records are closed. Bounded in time; nothing is raised; a second call does nothing."""
        self._live = None
        if self._path is not None and not self._path.exists():
            self._path = None  # it was never a run, and its directory was removed
        self._notifier.ended(self._news(_ENDS[state], cause, task, exit_code))

    def _news(self, event: Event, cause: str | None, task: str | None, exit_code: int | None) -> RunNews:
        steps, seconds = self._done()
        name = self._name or (self._path.name if self._path is not None else None)
        return RunNews(event, name, self._path, cause, task, steps, seconds, exit_code, self._restarts)

    def _record(self, event: str, **detail: Any) -> None:
        """Record an event of a notice; after the end behind all others. Called from the thread of a notice, too."""
        try:
            if self._live is not None:
                self._live(event, **detail)
                return
        except DiskError:
            return  # the next record of the run raises it
        except ValueError:
            pass  # the run has closed its records just then
        if self._path is None or not (self._path / EVENTS).exists():
            return
        try:
            with closing(LineFile(self._path / EVENTS)) as file:
                file.write(EventRecord(event, self._done()[1], detail))
        except DiskError as error:
            self._notifier.warn(f"trainer: that could not be recorded either: {error}")
