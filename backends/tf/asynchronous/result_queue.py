"""Queue of many remote results, in the order in which they are ready."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Generic, Protocol, TypeVar

Label = TypeVar("Label")


class Remote(Protocol):
    """A result that may not be ready (TensorFlow's RemoteValue)."""

    def fetch(self) -> Any:
        """Wait for the value; raises if its computation failed."""


RETRY_SECONDS = 0.1


def _fetched(remote: Remote) -> Any:
    """Wait for a value; retry until the same error object is raised twice.

    Copying a value fails once if its worker died.
    """
    error: Exception | None = None
    while True:
        try:
            return remote.fetch()
        except Exception as raised:
            if raised is error:
                raise
            error = raised
        time.sleep(RETRY_SECONDS)


class ResultQueue(Generic[Label]):
    """Threads that each wait for a result.

    They are daemons: a missing result must not prevent the process from ending.
    """

    def __init__(self, threads: int) -> None:
        self._remotes: queue.SimpleQueue[tuple[Label, Remote]] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[Label, Any, BaseException | None]] = queue.SimpleQueue()
        self.outstanding = 0
        for number in range(threads):
            threading.Thread(target=self._work, name=f"tf-fetch-{number}", daemon=True).start()

    def put(self, label: Label, remote: Remote) -> None:
        """Wait for a further result, known by its label."""
        self.outstanding += 1
        self._remotes.put((label, remote))

    def next(self) -> tuple[Label, Any]:
        """Wait for the next ready result. Raises the error of its computation."""
        label, value, error = self._ready.get()
        self.outstanding -= 1
        if error is not None:
            raise error
        return label, value

    def _work(self) -> None:
        while True:
            label, remote = self._remotes.get()
            try:
                self._ready.put((label, _fetched(remote), None))
            except BaseException as error:  # noqa: BLE001 - raised in the thread that requests the result
                self._ready.put((label, None, error))
