"""When the page is rendered anew: once for all who look at it, after a change, and seldom enough to leave the machine to the runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from ...core.untrusted.console import one_line
from .content import Content, content_of
from .followed_runs import FollowedRuns, Stamp, Standing
from .rendering import render_readable

__all__ = ["Published", "Refresher"]

LOOK_SECONDS = 2.0
"""Between two looks at the files, at which `FollowedRuns` takes a few microseconds a file."""

LEAST_PAUSE_SECONDS = 2.0
"""Between the end of a rendering and the next one, at the least."""

CPU_SHARE = 0.25
"""Of one core, which all renderings together take at the most: the pause after one is as long as that needs."""

ASKED_SECONDS = 10.0
"""A page for which nobody has asked for so long is looked at by nobody, and costs nothing until somebody asks again."""


@dataclass(frozen=True, slots=True)
class Published:
    """What is served: the last page, numbered from 1 (0: there is none yet), and what is known since.

    `read_at_unix_seconds` is when the files were last looked at and held nothing that the page has not, `notes` what cannot be shown.
    """

    version: int = 0
    content: Content | None = None
    read_at_unix_seconds: float | None = None
    runs: int = 0
    at_work: int = 0
    notes: tuple[str, ...] = ()


class Refresher:
    """Renders in the thread that calls `follow`; `published` and `ask` are for any thread.

    `report` is given a sentence when there is something new to be said of runs that cannot be shown.
    """

    def __init__(self, followed: FollowedRuns, report: Callable[[str], None]) -> None:
        self.published = Published()
        self._followed, self._report = followed, report
        self._rendered: Mapping[Path, Stamp] = {}
        self._left_out: dict[Path, tuple[Stamp, str]] = {}
        self._problem: str | None = None
        self._next_at = self._asked_at = time.monotonic()
        self._awake = threading.Event()

    def ask(self) -> None:
        """Say that somebody looks at the page."""
        self._asked_at = time.monotonic()
        self._awake.set()

    def follow(self, check: Callable[[], None]) -> NoReturn:
        """Keep the page up to date as long as somebody looks at it, until `check`, or a signal's handler, raises."""
        while True:
            check()
            self.refresh()
            self._awake.clear()
            if time.monotonic() - self._asked_at < ASKED_SECONDS:
                time.sleep(LOOK_SECONDS)
            else:
                self._awake.wait()

    def refresh(self) -> None:
        """Look at the runs, and render their page where it has changed and the pause after the last rendering is over."""
        looked_at = time.time()
        standing = self._followed.look()
        for path, (stamp, _) in list(self._left_out.items()):
            if standing.runs.get(path) != stamp:
                del self._left_out[path]  # it has changed, and may be readable now
        wanted = {path: stamp for path, stamp in standing.runs.items() if path not in self._left_out}
        current = list(wanted.items()) == list(self._rendered.items())
        if not current and time.monotonic() >= self._next_at:
            self._render(wanted)
            current = True
        self._publish(standing, looked_at if current else self.published.read_at_unix_seconds)

    def _render(self, wanted: Mapping[Path, Stamp]) -> None:
        began, cpu_began = time.monotonic(), time.thread_time()
        rendered = render_readable(list(wanted))
        self._left_out |= {path: (wanted[path], problem) for path, problem in rendered.left_out.items()}
        self._problem = rendered.problem
        if rendered.page is not None:
            self.published = replace(self.published, version=self.published.version + 1, content=content_of(rendered.page))
        self._rendered = {path: stamp for path, stamp in wanted.items() if path not in rendered.left_out}
        cpu_seconds = time.thread_time() - cpu_began
        ended = time.monotonic()
        self._next_at = ended + max(LEAST_PAUSE_SECONDS, ended - began, cpu_seconds / CPU_SHARE - cpu_seconds)

    def _publish(self, standing: Standing, read_at: float | None) -> None:
        left_out = [f"{one_line(path.name)} is skipped: {one_line(problem)}" for path, (_, problem) in self._left_out.items()]
        problem = [] if self._problem is None else [f"the page could not be updated: {one_line(self._problem)}"]
        notes = (*standing.notes, *left_out, *problem)
        for text in notes:
            if text not in self.published.notes:
                with suppress(OSError):  # standard error is gone; the page has it too
                    self._report(text)
        self.published = replace(
            self.published, read_at_unix_seconds=read_at, runs=len(standing.runs), at_work=standing.at_work, notes=notes
        )
