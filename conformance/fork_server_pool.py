"""Pool of fork servers, which import each framework once for many short runs.

Runs whose environment, limits or user differ start their own server. Not for measuring the start of runs, which has no import here.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Self

from ..core.job import Job
from ..core.process import die_with_parent, ignore_interrupts, python
from ..launch.node.fork_server_client import ForkServerProcess, inherited_state, is_same_user, receive_packet

REQUEST_SECONDS = 5.0


class ForkServerPool:
    """Pool as a context, which ends with this process's main thread; Linux only.

    `name` goes into ``CROSSTRAIN_FORK_SERVERS``.
    """

    def __init__(self) -> None:
        self.name = f"crosstrain-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(f"\0{self.name}")
            listening.listen(128)
            command = python("crosstrain.conformance.fork_server_pool", str(listening.fileno()), str(os.getpid()))
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[listening.fileno()], start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the pool, its servers and their forks."""
        self._process.kill()
        self._process.wait()


class _Servers:
    """Servers by backend, ``--deterministic`` and ``--threads``.

    Imports may depend on these (`Backend.preload`).
    """

    def __init__(self) -> None:
        self._state = inherited_state()
        self._servers: dict[tuple[str, bool, int | None], ForkServerProcess] = {}

    def answer(self, launcher: socket.socket) -> None:
        """Send a launcher its server, or refuse. Raises OSError where it is gone or silent."""
        if not is_same_user(launcher):
            return
        received = receive_packet(launcher)
        if received is None:
            return
        request, descriptors = received
        try:
            equal = request["state"] == self._state
            if equal:
                self._server(Job.model_validate(request["job"])).lend(launcher, descriptors[0], request["variables"])
            launcher.send(json.dumps({"lent": equal}).encode())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _server(self, job: Job) -> ForkServerProcess:
        key = (job.backend, job.deterministic, job.threads)
        server = self._servers.get(key)
        if server is None or server.ended:
            server = self._servers[key] = ForkServerProcess(job)
        return server


def main(descriptor: int, parent: int) -> None:
    """Serve launchers of a listening socket until the parent process has ended."""
    ignore_interrupts()
    die_with_parent(parent)
    listening, servers = socket.socket(fileno=descriptor), _Servers()
    while True:
        launcher, _ = listening.accept()
        with launcher:
            launcher.settimeout(REQUEST_SECONDS)
            with suppress(OSError):  # the launcher is gone
                servers.answer(launcher)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
