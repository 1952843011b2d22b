"""What does the end of one of our commands on another machine mean, and what is to be done about it?"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.metadata import version

from .base import ending_in_words

__all__ = ["end_elsewhere"]

NO_PROGRAM = 127
"""What a shell, env and Ray's actor exit with where there is no such program."""

_MISSING = re.compile(r"No module named '(\w+)")


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
