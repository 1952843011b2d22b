"""Has a command's standard input and output be a connection to the driver, which this process dials before it becomes the command.

Started as ``python -m crosstrain.launch.node.dialled COMMAND ARGUMENTS…``. Its first line of input is a `Summons`: the secret must be seen
neither in an argument nor in the environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass

from ...core.untrusted.listener import PROOF_SECONDS
from ...engine.protocol.messages import PROTOCOL, Message, Stream
from ...engine.protocol.transport import WrongSecretError, connect

__all__ = ["Summons", "main"]

DIAL_SECONDS = 15.0
"""How long the driver, which listens already, may be out of reach, or have others at its door."""

RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Summons:
    """Where the driver is awaiting a command, the run's secret, and the number under which the command is awaited.

    `silence_seconds`: after which the system ends a connection whose peer acknowledges nothing.
    """

    host: str
    port: int
    secret: str
    number: int
    silence_seconds: float

    def line(self) -> str:
        """Return it as the line of input that a process is summoned by."""
        return json.dumps(asdict(self)) + "\n"


def main() -> None:
    """Dial, join, and become the command. Ends with 1 and a sentence on standard error where the driver cannot be reached."""
    summons = Summons(**json.loads(sys.stdin.readline()))
    try:
        stream = _dial(summons)
        stream.limit_silence(summons.silence_seconds)
        stream.send(Message("join", {"protocol": PROTOCOL, "number": summons.number}))
    except OSError as error:
        sys.exit(f"the driver cannot be reached at {summons.host}, port {summons.port}: {error}")
    for descriptor in (0, 1):
        os.dup2(stream.reader.fileno(), descriptor)
    os.execvp(sys.argv[1], sys.argv[1:])


def _dial(summons: Summons) -> Stream:
    deadline = time.monotonic() + DIAL_SECONDS
    while True:
        try:
            left = max(RETRY_SECONDS, deadline - time.monotonic())
            return connect((summons.host, summons.port), summons.secret.encode(), min(left, PROOF_SECONDS))
        except WrongSecretError:
            raise
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_SECONDS)


if __name__ == "__main__":
    main()
