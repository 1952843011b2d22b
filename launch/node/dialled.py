"""Connects to the driver, then executes a command with the connection as its input/output.

Started as ``python -m crosstrain.launch.node.dialled COMMAND ARGUMENTS…``. Its first line of input is a `Summons`, as it has the secret.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass

from ...core.listener import PROOF_SECONDS
from ...engine.protocol.join_messages import CommandJoin
from ...engine.protocol.messages import PROTOCOL, Stream
from ...engine.protocol.transport import WrongSecretError, connect

DIAL_SECONDS = 15.0  # how long the listening driver may be unreachable or busy with other connections
RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Summons:
    """The driver's address, the run's secret, the command's number, and the silence limit."""

    host: str
    port: int
    secret: str
    number: int
    silence_seconds: float

    def line(self) -> str:
        """Return it as a line of input."""
        return json.dumps(asdict(self)) + "\n"


def main() -> None:
    """Connect, join, and execute the command. Exits with 1 if the driver cannot be reached."""
    summons = Summons(**json.loads(sys.stdin.readline()))
    try:
        stream = _dial(summons)
        stream.limit_silence(summons.silence_seconds)
        stream.send(CommandJoin(summons.number, PROTOCOL))
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
