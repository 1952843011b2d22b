"""Sums in the background: a backward pass goes on while the gradients that it has finished are on their way."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

__all__ = ["BucketSums"]


class BucketSums:
    """Adds up vectors one after another in a thread of its own. All ranks hand in the same sizes in the same order.

    `add_up` is called by nobody else between `submit` and `wait`.
    """

    def __init__(self, add_up: Callable[[NDArray[Any]], None]) -> None:
        self._add_up = add_up
        self._todo: queue.SimpleQueue[NDArray[Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._outstanding = 0
        self._thread = threading.Thread(target=self._run, name="direct exchange", daemon=True)
        self._thread.start()

    def submit(self, vector: NDArray[Any]) -> None:
        """Have a contiguous vector replaced by its sum over all ranks; it must not be touched until `wait` has returned."""
        self._outstanding += 1
        self._todo.put(vector)

    def wait(self) -> None:
        """Wait for all that has been submitted. Raises what came of the first that failed, after which every later one fails too."""
        failure = None
        while self._outstanding:
            failure = failure or self._done.get()
            self._outstanding -= 1
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread when it has done what was submitted."""
        self._todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        failed: Exception | None = None
        while (vector := self._todo.get()) is not None:
            if failed is None:
                try:
                    self._add_up(vector)
                except Exception as error:  # noqa: BLE001 - handed to who waits
                    failed = error
            self._done.put(failed)
