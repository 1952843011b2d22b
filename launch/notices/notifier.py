"""Tells of a run to whom the user has named: once of its end, and of each new beginning; what cannot be told is said here, and recorded.

A run never waits for that while it trains, and its result does not depend on it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...core.settings.personal import GivenOption
from .news import POST_SECONDS, NoticeError, RunNews

__all__ = ["Notifier"]

MOST_WAITING = 100
"""Notices of new beginnings that wait for the address; what comes on top of these is not told."""


class Notifier:
    """Tells the news of one run. `options` are ``notify`` and ``on_failure`` where they were given; without either nothing is done.

    `on_failed` is called with an event's name and details for each notice that was not taken, from whichever thread.
    """

    def __init__(self, options: Mapping[str, GivenOption], warn: Callable[[str], None]) -> None:
        self._notify = options.get("notify")
        self._on_failure = options.get("on_failure")
        self.warn = warn
        self.on_failed: Callable[..., None] | None = None
        self._waiting: queue.Queue[RunNews] = queue.Queue(MOST_WAITING)
        self._posting: threading.Thread | None = None
        self._ended = False

    def restarted(self, news: RunNews) -> None:
        """Tell that the run has begun anew, from a thread, so that it waits for nothing."""
        if self._notify is None:
            return
        try:
            self._waiting.put_nowait(news)
        except queue.Full:
            self._failed("notify", news, "too many notices wait for that address already")
            return
        if self._posting is None:
            self._posting = threading.Thread(target=self._post_waiting, name="notices", daemon=True)
            self._posting.start()

    def ended(self, news: RunNews) -> None:
        """Tell how the run has ended. Bounded in time; a second call does nothing, and nothing is raised."""
        if self._ended:
            return
        self._ended = True
        try:
            self._tell_end(news)
        except KeyboardInterrupt:
            self.warn(f"trainer: interrupted during the notification that the run {news.event}")

    def _tell_end(self, news: RunNews) -> None:
        deadline = time.monotonic() + POST_SECONDS
        while self._posting is not None and self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._notify is not None:
            self._post(news)
        if self._on_failure is not None and news.event == "failed":
            from .failure_command import run_command

            try:
                run_command(self._on_failure.value, news.as_json(), news.variables())
            except NoticeError as error:
                self._failed("on_failure", news, str(error))

    def _post_waiting(self) -> None:
        while True:
            news = self._waiting.get()
            self._post(news)
            self._waiting.task_done()

    def _post(self, news: RunNews) -> None:
        if self._notify is None:
            return
        from .webhook import post  # which loads a client of HTTP; a run that tells nobody does without

        try:
            post(self._notify.value, news.as_json())
        except NoticeError as error:
            self._failed("notify", news, str(error))

    def _failed(self, how: str, news: RunNews, why: str) -> None:
        given = self._notify if how == "notify" else self._on_failure
        shown: Any = "" if given is None or how == "on_failure" else f" ({given.option.shown(given.value)})"
        self.warn(f"trainer: --{how.replace('_', '-')}{shown}: could not notify that the run {news.event}: {why}")
        if self.on_failed is not None:
            self.on_failed("notice_failed", how=how, told=news.event, why=why)
