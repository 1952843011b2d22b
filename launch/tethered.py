"""Become a program that ends with the process that started it: ``python -m crosstrain.launch.tethered PARENT PROGRAM ARGUMENTS``.

The program keeps this process's id, and the kernel's order to kill it when its parent has ended, however that ended.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from ..core.process import die_with_parent, python

__all__ = ["command_ending_with_parent"]


def command_ending_with_parent(program: Sequence[str]) -> list[str]:
    """Return the command that runs `program` as a child of this process's main thread, and no longer than that lives."""
    return python(__name__, str(os.getpid()), *program)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent, *command = sys.argv[1:]
    die_with_parent(int(parent))
    os.execvp(command[0], command)
