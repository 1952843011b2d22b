"""Ctrl-C while the command itself is still being imported. Imports nothing heavy."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Self

__all__ = ["INTERRUPTED", "DeferredInterrupts", "QuietInterrupts", "RememberedInterrupts", "TerminationAsInterrupt"]

INTERRUPTED = 130
"""The exit code of an interrupted command."""

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""By which others end a run."""


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
    """Within the block what would interrupt this process does nothing yet; at its end it raises KeyboardInterrupt.

    For short steps that start something, so that whoever ends it knows of it. For the main thread. That is Ctrl-C, and the signals of a
    `TerminationAsInterrupt` around it.
    """

    def __enter__(self) -> None:
        self._interrupted = False
        self._replaced = [number for number in (signal.SIGINT, *ENDING) if signal.getsignal(number) is signal.default_int_handler]
        for number in self._replaced:
            signal.signal(number, self._remember)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in self._replaced:
            signal.signal(number, signal.default_int_handler)
        if self._interrupted:
            raise KeyboardInterrupt

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True


class TerminationAsInterrupt:
    """Within the block SIGTERM raises KeyboardInterrupt as Ctrl-C does, so that what was begun is cleared away. For the main thread.

    `notices`: so do SIGUSR1 and SIGUSR2, by which batch systems announce the end of a job.
    """

    def __init__(self, *, notices: bool = False) -> None:
        self._numbers = ENDING if notices else ENDING[:1]

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, signal.default_int_handler) for number in self._numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is signal.default_int_handler:  # else somebody within has decided what it means from now on
                signal.signal(number, handler)


class RememberedInterrupts(TerminationAsInterrupt):
    """The same, for a loop without an end, which calls `check`: an interrupt's exception is lost where Python discards what is raised.

    It does so in finalisers, for instance. Ctrl-C is remembered too, where it is not ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self._interrupted = False

    def __enter__(self) -> Self:
        super().__enter__()
        numbers = [number for number in (signal.SIGINT, *self._numbers) if signal.getsignal(number) is signal.default_int_handler]
        self._own = {number: signal.signal(number, self._interrupt) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._own.items():
            signal.signal(number, handler)
        super().__exit__(kind, error, trace)

    def check(self) -> None:
        """Raise KeyboardInterrupt where one has come."""
        if self._interrupted:
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)
