"""Where a run's progress goes: to standard error, or into an output of a notebook's cell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..core.console import note

Report = Callable[[str], None]
_OFTEN = ("step ", "evaluated ")  # how lines begin that come again and again


def default_report() -> Report:
    """Return what shows a line: in a notebook the latest ones of a kind replace the former."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return _Cell().show if hasattr(shell, "kernel") else note


class _Cell:
    """An output of a notebook's cell that is updated."""

    def __init__(self) -> None:
        self._latest: dict[str, str] = {}
        self._output: Any = None

    def show(self, line: str) -> None:
        kind = next((begin for begin in _OFTEN if line.startswith(begin)), None)
        if kind is None:
            note(line)
            return
        display: Any = sys.modules["IPython"].display
        self._latest[kind] = line
        content = {"text/plain": "\n".join(self._latest[begin] for begin in _OFTEN if begin in self._latest)}
        if self._output is None:
            self._output = display.display(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)
