"""The signals by which a user, or a batch system, ends a command that has started processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from ..core.process import NOTICES

__all__ = ["EndingSignals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *NOTICES)
"""The third is that of a terminal which is closed; a command under nohup ignores it, and goes on."""


class EndingSignals:
    """Within the block the first signal calls `in_good_order`, a second one `at_once`, both in the handler of the main thread.

    SIGHUP is left alone where it is ignored, as under nohup. A notice of a batch system, which may send several, is never the second, and a
    signal after it is a first one. Once interrupted, a signal that comes after the block must not change the exit code, and is ignored.
    """

    def __init__(self, in_good_order: Callable[[], None], at_once: Callable[[], NoReturn]) -> None:
        self._in_good_order = in_good_order
        self._at_once = at_once
        self._count = 0
        self._asked = False

    @property
    def interrupted(self) -> bool:
        """Whether a signal has come, or somebody has asked."""
        return self._asked or self._count > 0

    def ask(self) -> None:
        """End in good order what has not been asked to yet, as a first signal does; a signal after that is a first one all the same."""
        if not self.interrupted:
            self._asked = True
            self._in_good_order()

    def __enter__(self) -> EndingSignals:
        heard = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.interrupted else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in NOTICES:
            self.ask()
            return
        self._count += 1
        if self._count > 1:
            self._at_once()
        if not self._asked:
            self._in_good_order()
