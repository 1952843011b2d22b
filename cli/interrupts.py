"""Ctrl-C and termination signals of commands; used during import, so it imports little."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Self

INTERRUPTED = 130  # the exit code of an interrupted command
ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # signals by which batch systems and users end a run


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Handle those of some signals that would raise KeyboardInterrupt. Main thread only."""
    replaced = [number for number in numbers if signal.getsignal(number) is signal.default_int_handler]
    for number in replaced:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.default_int_handler)


def quiet_interrupts() -> AbstractContextManager[None]:
    """Exit with 130 on Ctrl-C, as imports may swallow KeyboardInterrupt. Main thread only."""
    return _handling(_end, signal.SIGINT)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer KeyboardInterrupt to the end of a block that starts something. Main thread only."""
    received: list[int] = []
    try:
        with _handling(lambda number, frame: received.append(number), signal.SIGINT, *ENDING):
            yield
    finally:
        if received:
            raise KeyboardInterrupt


class TerminationAsInterrupt:
    """Raise KeyboardInterrupt on SIGTERM, and SIGUSR1 and 2 if `notices`. Main thread only."""

    def __init__(self, *, notices: bool = False) -> None:
        self._numbers = ENDING if notices else ENDING[:1]

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, signal.default_int_handler) for number in self._numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is signal.default_int_handler:  # else code in the block has replaced it
                signal.signal(number, handler)


class RememberedInterrupts(TerminationAsInterrupt):
    """As above, but remembered until a loop calls `check`, as finalisers discard exceptions."""

    def __init__(self) -> None:
        super().__init__()
        self._interrupted = False

    def __enter__(self) -> Self:
        super().__enter__()
        self._handling = _handling(self._interrupt, signal.SIGINT, *self._numbers)
        self._handling.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handling.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def check(self) -> None:
        """Raise KeyboardInterrupt after an interrupt."""
        if self._interrupted:
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt
