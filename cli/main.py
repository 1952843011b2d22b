"""The entry point of the command ``trainer``: ready for Ctrl-C before anything heavy is imported."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # python -m puts the working directory first, where a file queue.py would stand for the standard library's

from collections.abc import Sequence

from .interrupts import QuietInterrupts
from .streams import guard_streams

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: this process's) and return its exit code."""
    with QuietInterrupts():
        exit_code = guard_streams()
        from .group import invoke
    return exit_code(invoke(arguments))


if __name__ == "__main__":
    sys.exit(main())
