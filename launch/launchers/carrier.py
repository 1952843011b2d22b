"""What carries an agent's channel from another machine: a child of this process, such as ssh or srun; what that says, and how it ends."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import IO, Any

from ...core.process import command_ending_with_parent, ignores_signal
from ...core.untrusted.console import note, one_line
from ...engine.protocol.messages import Stream
from ...engine.protocol.transport import AGENT_BEGINS, start_over_stdio
from .base import ending_in_words

__all__ = ["Carrier", "ErrorLines", "end_elsewhere", "popen_with_errors", "start_elsewhere"]

LONGEST_LINE_BYTES = 4096
LAST_LINES = 4
"""How much is kept of a line, and how many lines are told."""

READ_SECONDS = 0.5
"""How long is waited for the last lines of a process that has ended."""

NO_PROGRAM = 127
"""What a shell, env and Ray's actor exit with where there is no such program."""

_MISSING = re.compile(r"No module named '(\w+)")


class Carrier(subprocess.Popen[bytes]):
    """A child that carries a channel: ssh and srun have the agent beyond them end, ``ip netns exec`` or ``env`` have become the agent."""

    def terminate(self) -> None:
        """Have it end, and the agent with it: by SIGTERM or, where it has become an agent, which ignores that, by SIGKILL."""
        if ignores_signal(self.pid, signal.SIGTERM):
            self.kill()
        else:
            super().terminate()


def start_elsewhere(host: str, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], Stream, ErrorLines]:
    """Start a command that carries a channel from `host`, and ends with this process; return it, the channel and what it says.

    It is asked to end (SIGTERM), not killed: srun that is killed cannot tell the node, whose agent would go on until it has missed the
    driver for too long. A command that becomes the agent itself ends as agents do: with its input, also where it was stopped.
    """
    process, stream = start_over_stdio(_carrier, command_ending_with_parent(command, signal.SIGTERM), AGENT_BEGINS)
    assert process.stderr is not None
    return process, stream, ErrorLines(host, process.stderr, tell=lambda: stream.begun)


def _carrier(command: Sequence[str], **options: Any) -> Carrier:
    return Carrier(command, stderr=subprocess.PIPE, **options)


def popen_with_errors(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a child whose standard error is read here."""
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


class ErrorLines:
    """What the carrier, and the agent over there, say on standard error: told with the host's name where `tell` says so, the last kept."""

    def __init__(self, host: str, file: IO[bytes], tell: Callable[[], bool]) -> None:
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._thread = threading.Thread(target=self._relay, args=(host, file, tell), name=f"said-by-{host}", daemon=True)
        self._thread.start()

    def last(self) -> list[str]:
        """Return the last lines. For when the process has ended."""
        self._thread.join(READ_SECONDS)
        return [*self._lines]

    def behind(self) -> str:
        """Return a colon and the last lines, to stand behind what happened; empty where there are none. For when the process has ended."""
        return "".join(f": {line}" for line in self.last())

    def _relay(self, host: str, file: IO[bytes], tell: Callable[[], bool]) -> None:
        with file:
            while line := file.readline(LONGEST_LINE_BYTES):
                text = one_line(line.decode(errors="replace").rstrip("\r\n"))
                if text.strip():
                    self._lines.append(text)
                    if tell():
                        note(f"{host}: {text}")


def end_elsewhere(command: Sequence[str], code: int, said: Sequence[str], by: str = "") -> str:
    """Say how a command that `remote_python` has made ended, with which last lines; and what to do where the host lacks something.

    `by` names what has carried the exit code, with a space before it.
    """
    interpreter = shlex.quote(command[2] if command[0] == "env" else command[0])
    lines = "".join(f": {line}" for line in said)
    if code == NO_PROGRAM:
        return f"could not be started: there is no {interpreter}{lines}; --python PATH names the interpreter on the nodes"
    missing = [match[1] for line in said if (match := _MISSING.search(line)) is not None]
    if not missing:
        return f"{ending_in_words(code)}{by}{lines}"
    install = f"{interpreter} -m pip install crosstrain=={version('crosstrain')}"
    return (
        f"{ending_in_words(code)}{by}, as {missing[-1]} is not installed for {interpreter}{lines}; type `{install}` there, or name another "
        "interpreter by --python PATH"
    )
