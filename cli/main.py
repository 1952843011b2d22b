"""The entry point ``trainer``: handles Ctrl-C before anything heavy is imported."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # python -m puts the working directory first, where queue.py would replace the standard library's

from collections.abc import Sequence

from .interrupts import quiet_interrupts
from .streams import guard_streams


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: this process's) and return its exit code."""
    with quiet_interrupts():
        exit_code = guard_streams()
        from .group import invoke
    return exit_code(invoke(arguments))


if __name__ == "__main__":
    code = main()
    exec("")  # else `python -m` ends by SIGINT if an interrupt came in a library's `exec`, such as that of `dataclasses`
    sys.exit(code)
