"""The documents of the live page, and the state of the runs on it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from ...core.console import one_line
from ...core.errors import TrainerError, raised
from ...records.store.run_directory import RunReader
from ..runs.locate import UnreadableFolderError, is_run, runs_at
from ..runs.run import Run, started_runs
from .page import render


@dataclass(frozen=True, slots=True)
class Content:
    """A page without its executable scripts, and these in order; scripts of data stay."""

    document: bytes
    scripts: tuple[bytes, ...]


def split_scripts(page: str) -> Content:
    """Separate a page from its scripts; every script tag is real, as ``<`` in texts is escaped."""
    parts: list[str] = []
    scripts: list[bytes] = []
    at = 0
    while (start := page.find("<script", at)) >= 0:
        begin = page.index(">", start) + 1
        end = page.index("</script>", begin)
        parts.append(page[at:start])
        at = end + len("</script>")
        if 'type="application/json"' in page[start:begin]:
            parts.append(page[start:at])
        else:
            scripts.append(page[begin:end].encode())
    return Content("".join([*parts, page[at:]]).encode(), tuple(scripts))


@dataclass(frozen=True, slots=True)
class Rendered:
    """The page, if any; the runs that are not on it with the reasons; another problem, if any."""

    page: str | None
    skipped: Mapping[Path, str]
    problem: str | None = None


def render_readable(paths: Sequence[Path]) -> Rendered:
    """Return the page of the runs. Never raises for damaged, vanished or changing files."""
    skipped: dict[Path, str] = {}
    shown = list(paths)
    while shown:
        page, problem = _attempt(shown)
        if page is not None:
            return Rendered(page, skipped)
        culprits = _culprits(shown, problem)
        if not culprits:
            return Rendered(None, skipped, problem)
        skipped |= culprits
        shown = [path for path in shown if path not in culprits]
    return Rendered(None, skipped)


def _attempt(paths: Sequence[Path]) -> tuple[str | None, str]:
    try:
        return render(started_runs([Run(path) for path in paths])), ""
    except TrainerError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 — of files that change or vanish while they are read; shown on the page, which stays up
        return None, raised(error)


def _culprits(paths: Sequence[Path], problem: str) -> dict[Path, str]:
    if len(paths) == 1:
        return {paths[0]: problem}
    culprits: dict[Path, str] = {}
    for half in (paths[: len(paths) // 2], paths[len(paths) // 2 :]):
        page, problem = _attempt(half)
        if page is None:
            culprits |= _culprits(half, problem)
    return culprits


RECORDS = (
    "status.json",
    "job.json",
    "env.json",
    "summary.json",
    "calibration.json",
    "steps.jsonl",
    "evals.jsonl",
    "events.jsonl",
    "system.jsonl",
    "diverge.json",
)  # files that a run's page depends on
_AT_WORK = ("starting", "running")
FileStamp = tuple[int, int, int] | None  # inode, size and change time (ns) of a file; None if missing or inaccessible
Stamp = tuple[str | FileStamp, ...]  # a run's state, and the stamp of each of `RECORDS`


@dataclass(frozen=True, slots=True)
class Standing:
    """The runs at one look: stamps of those that can be shown, number of running ones, notes."""

    runs: Mapping[Path, Stamp]
    at_work: int
    notes: tuple[str, ...]


class FollowedRuns:
    """Watches run directories and folders; reads only statuses of running jobs, else stamps."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = tuple(places)
        self._states: dict[Path, tuple[FileStamp, str]] = {}
        self._seen: dict[Path, None] = {}

    def look(self) -> Standing:
        """Return the current state of the runs."""
        runs: dict[Path, Stamp] = {}
        at_work = 0
        paths, notes = self._paths()
        for path in paths:
            files = [_file_stamp(path / name) for name in RECORDS]
            state, problem = self._state(path, *files[:2])
            if state is None:
                notes.append(f"{one_line(path.name)}: {one_line(problem)}")
                continue
            runs[path] = (state, *files)
            at_work += state in _AT_WORK
        self._seen.update(dict.fromkeys(paths))
        gone = [one_line(path.name) for path in self._seen if not is_run(path)]
        if gone:
            notes.append(f"no longer there: {', '.join(gone)}")
        return Standing(runs, at_work, tuple(notes))

    def _paths(self) -> tuple[list[Path], list[str]]:
        by_real_path: dict[str, Path] = {}
        notes = []
        for place in self._places:
            try:
                paths = runs_at(place)
            except (UnreadableFolderError, OSError) as error:
                notes.append(one_line(str(error)))
                continue
            if not paths and place not in self._seen:
                what = "there is no run in it yet" if os.path.isdir(place) else "the folder is no longer there"
                notes.append(f"{one_line(str(place))}: {what}")
            for path in paths:
                by_real_path.setdefault(os.path.realpath(path), path)
        return list(by_real_path.values()), notes

    def _state(self, path: Path, status: FileStamp, job: FileStamp) -> tuple[str | None, str]:
        if status is None:
            return None, "it has only begun, and is shown as soon as it has a status"
        known = self._states.get(path)
        if known is None or known[0] != status or known[1] in _AT_WORK:  # a running job may die without recording it
            try:
                known = (status, RunReader(path).state())
            except (TrainerError, OSError) as error:
                return None, str(error)
            self._states[path] = known
        if job is None:
            begun = "it has only begun" if known[1] in _AT_WORK else f"it is {known[1]}"
            return None, f"{begun}, and nothing is known about it (there is no job.json)"
        return known[1], ""


def _file_stamp(path: Path) -> FileStamp:
    try:
        status = os.stat(path)
    except OSError:  # usually missing; the reader of the file reports other errors
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


LOOK_SECONDS = 2.0  # between two looks at the files
MIN_PAUSE_SECONDS = 2.0  # between two renderings
CPU_SHARE = 0.25  # maximum share of one core for all renderings, limited by the pause after each
ASKED_SECONDS = 10.0  # a page not requested for so long is no longer updated


@dataclass(frozen=True, slots=True)
class Published:
    """The last page, numbered from 1 (0: none), when its files last were unchanged, and notes."""

    version: int = 0
    content: Content | None = None
    read_at_unix_seconds: float | None = None
    runs: int = 0
    at_work: int = 0
    notes: tuple[str, ...] = ()


class Refresher:
    """Renders in the thread of `follow` for any thread; new notes are passed to `report`."""

    def __init__(self, followed: FollowedRuns, report: Callable[[str], None]) -> None:
        self.published = Published()
        self._followed, self._report = followed, report
        self._rendered: Mapping[Path, Stamp] = {}
        self._skipped: dict[Path, tuple[Stamp, str]] = {}
        self._problem: str | None = None
        self._next_at = self._asked_at = time.monotonic()
        self._awake = threading.Event()

    def ask(self) -> None:
        """Record a request for the page."""
        self._asked_at = time.monotonic()
        self._awake.set()

    def follow(self, check: Callable[[], None]) -> NoReturn:
        """Keep the page up to date while requested, until `check` or a signal's handler raises."""
        while True:
            check()
            self.refresh()
            self._awake.clear()
            if time.monotonic() - self._asked_at < ASKED_SECONDS:
                time.sleep(LOOK_SECONDS)
            else:
                self._awake.wait()

    def refresh(self) -> None:
        """Look at the runs, and render their page if it has changed and the pause is over."""
        looked_at = time.time()
        standing = self._followed.look()
        for path, (stamp, _) in list(self._skipped.items()):
            if standing.runs.get(path) != stamp:
                del self._skipped[path]  # it has changed, and may be readable
        wanted = {path: stamp for path, stamp in standing.runs.items() if path not in self._skipped}
        current = list(wanted.items()) == list(self._rendered.items())
        if not current and time.monotonic() >= self._next_at:
            self._render(wanted)
            current = True
        self._publish(standing, looked_at if current else self.published.read_at_unix_seconds)

    def _render(self, wanted: Mapping[Path, Stamp]) -> None:
        began, cpu_began = time.monotonic(), time.thread_time()
        rendered = render_readable(list(wanted))
        self._skipped |= {path: (wanted[path], problem) for path, problem in rendered.skipped.items()}
        self._problem = rendered.problem
        if rendered.page is not None:
            self.published = replace(self.published, version=self.published.version + 1, content=split_scripts(rendered.page))
        self._rendered = {path: stamp for path, stamp in wanted.items() if path not in rendered.skipped}
        cpu_seconds = time.thread_time() - cpu_began
        ended = time.monotonic()
        self._next_at = ended + max(MIN_PAUSE_SECONDS, ended - began, cpu_seconds / CPU_SHARE - cpu_seconds)

    def _publish(self, standing: Standing, read_at: float | None) -> None:
        skipped = [f"{one_line(path.name)} is skipped: {one_line(problem)}" for path, (_, problem) in self._skipped.items()]
        problem = [] if self._problem is None else [f"the page could not be updated: {one_line(self._problem)}"]
        notes = (*standing.notes, *skipped, *problem)
        for text in notes:
            if text not in self.published.notes:
                with suppress(OSError):  # standard error is closed; the page has it too
                    self._report(text)
        self.published = replace(
            self.published, read_at_unix_seconds=read_at, runs=len(standing.runs), at_work=standing.at_work, notes=notes
        )
