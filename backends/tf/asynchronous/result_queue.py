"""Async: waiting for many remote results at once, and taking them in the order in which they are ready."""

from __future__ import annotations

import queue
import threading
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["ResultQueue"]

Label = TypeVar("Label")


class Remote(Protocol):
    """A result that may not be there yet (TensorFlow's RemoteValue)."""

    def fetch(self) -> Any:
        """Wait for the value and return it; raises where computing it failed."""
        ...


class ResultQueue(Generic[Label]):
    """A few threads, each waiting for one result. They are daemons: a result that never comes must not keep the process alive."""

    def __init__(self, threads: int) -> None:
        self._remotes: queue.SimpleQueue[tuple[Label, Remote]] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[Label, Any, BaseException | None]] = queue.SimpleQueue()
        self.outstanding = 0
        for number in range(threads):
            threading.Thread(target=self._work, name=f"tf-fetch-{number}", daemon=True).start()

    def put(self, label: Label, remote: Remote) -> None:
        """Wait for one more result; it is recognised by its label."""
        self.outstanding += 1
        self._remotes.put((label, remote))

    def next(self) -> tuple[Label, Any]:
        """Return the next result that is ready, waiting where none is. Raises what computing it raised."""
        label, value, error = self._ready.get()
        self.outstanding -= 1
        if error is not None:
            raise error
        return label, value

    def _work(self) -> None:
        while True:
            label, remote = self._remotes.get()
            try:
                self._ready.put((label, remote.fetch(), None))
            except BaseException as error:  # noqa: BLE001 - carried to the thread that asks for the result and raised there
                self._ready.put((label, None, error))
