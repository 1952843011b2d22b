"""Ctrl-C while the command itself is still being imported. Imports nothing heavy."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

__all__ = ["INTERRUPTED", "DeferredInterrupts", "QuietInterrupts", "TerminationAsInterrupt"]

INTERRUPTED = 130
"""The exit code of an interrupted command."""


class QuietInterrupts:
    """Within the block Ctrl-C ends this process at once, with one line and exit code 130.

    An exception in the middle of an import would surface as whatever the imported module makes of it. For the main thread, and only
    where nothing has been started that would have to be ended. A command that ignores Ctrl-C goes on ignoring it.
    """

    def __enter__(self) -> None:
        self._replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._replaced:
            signal.signal(signal.SIGINT, _end)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class DeferredInterrupts:
    """Within the block Ctrl-C does nothing yet; at its end it raises KeyboardInterrupt.

    For short steps that start something, so that whoever ends it knows of it. For the main thread.
    """

    def __enter__(self) -> None:
        self._interrupted = False
        self._replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._replaced:
            signal.signal(signal.SIGINT, self._remember)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._interrupted:
            raise KeyboardInterrupt

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True


class TerminationAsInterrupt:
    """Within the block SIGTERM raises KeyboardInterrupt as Ctrl-C does, so that what was begun is cleared away. For the main thread."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGTERM, self._before)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)
