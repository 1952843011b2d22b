"""One task of a run was lost, and is started anew by itself while the others go on: who hears of that, and how long it was away."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["LoneRestarts"]


class _Tasks(Protocol):
    """Those of the attempt."""

    def replace(self, task: str, after_seconds: float, start_seconds: float) -> None:
        """Start a task anew after so many seconds; a start may take `start_seconds`."""
        ...


class LoneRestarts:
    """Records them with `event`, tells them with `tell`, and has the training loop know (`on_absent`, `on_back`, by the task's name).

    A start may take `start_seconds`. `notify` gets the cause and the task when one is back.
    """

    def __init__(
        self,
        tasks: _Tasks,
        start_seconds: float,
        event: Callable[..., Any],
        tell: Callable[[str], None],
        notify: Callable[[str, str], None],
        on_absent: Callable[[str], None],
        on_back: Callable[[str], None],
    ) -> None:
        self._tasks = tasks
        self._start_seconds = start_seconds
        self._event, self._tell, self._notify = event, tell, notify
        self._on_absent, self._on_back = on_absent, on_back
        self._lost: dict[str, tuple[float, str]] = {}

    def begin(self, task: str, cause: str, after_seconds: float) -> None:
        """A task is lost; have it started anew."""
        since, _ = self._lost.get(task, (time.monotonic(), ""))
        self._lost[task] = since, cause
        self._event("task_failed", task=task, cause=cause)
        self._tell(f"{cause}; {task} restarts while training continues")
        self._on_absent(task)
        self._tasks.replace(task, after_seconds, self._start_seconds)

    def end(self, task: str) -> None:
        """It is ready again."""
        since, cause = self._lost.pop(task)
        absent_seconds = time.monotonic() - since
        self._event("task_restarted", task=task, absent_seconds=absent_seconds)
        self._tell(f"{task} takes part again, after {absent_seconds:.1f} s")
        self._on_back(task)
        self._notify(cause, task)
