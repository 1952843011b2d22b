"""Runs the user's own command after a failure, in bounded time: what it is told comes on its input and in variables, never in its words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from ...core.process import command_ending_with_parent
from .news import NoticeError

__all__ = ["COMMAND_SECONDS", "run_command"]

COMMAND_SECONDS = 60.0
"""What the command may take; then it is ended, with all that it has started in its process group."""

NOT_ITS_OWN = ("TRAINER_SECRET", "TRAINER_NOTIFY", "TRAINER_ON_FAILURE")
"""Variables that the command does not need, and that a `trainer` in it would act upon."""


def run_command(command: str, body: bytes, variables: Mapping[str, str], seconds: float = COMMAND_SECONDS) -> None:
    """Run a command by the shell, with `body` on its standard input; what it prints goes to standard error.

    Raises NoticeError where it cannot be run, fails, or takes longer than `seconds`.
    """
    environment = {name: value for name, value in os.environ.items() if name not in NOT_ITS_OWN} | dict(variables)
    sys.stderr.flush()
    try:
        process = subprocess.Popen(
            command_ending_with_parent(["/bin/sh", "-c", command]),
            stdin=subprocess.PIPE,
            stdout=2,  # standard output is for data
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise NoticeError(f"it cannot be run: {getattr(error, 'strerror', None) or error}") from error
    try:
        process.communicate(body, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoticeError(f"it was ended, as it has taken longer than {seconds:g} s") from None
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        how = f"was killed by signal {-process.returncode}" if process.returncode < 0 else f"has ended with {process.returncode}"
        raise NoticeError(f"it {how}")
