"""A pool of fork servers for many short runs: each framework is imported once for all of them, and not by every run again.

A test suite that trains a hundred times spends most of its time on importing frameworks. `ForkServerPool` starts a process that keeps one
fork server for each backend that is asked for, and lends it to runs whose environment names the pool (`fork_server_client.py`): their
tasks are forked from it, as the tasks of one run are from a server of its own. Only who would have started the same server is lent one: a
run with another environment, other limits or another user starts its own.

The time of a run's start lacks the import then. So this is for tests of what runs do, and not for measuring how fast they begin.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
from types import TracebackType
from typing import Self

from ..core.job import Job
from ..core.process import die_with_parent, ignore_interrupts, python
from ..launch.node.fork_server_client import ForkServerProcess, inherited_state
from ..launch.node.fork_server_connection import is_own_user, receive_packet

__all__ = ["ForkServerPool", "main"]

REQUEST_SECONDS = 5.0


class ForkServerPool:
    """A pool as a child of this process's main thread, which it ends with; for Linux. To be used as a context.

    `name`: what ``CROSSTRAIN_FORK_SERVERS`` says in the environment of runs that may use it.
    """

    def __init__(self) -> None:
        self.name = f"crosstrain-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(f"\0{self.name}")
            listening.listen(128)
            command = python("crosstrain.conformance.fork_server_pool", "--fd", str(listening.fileno()), "--parent", str(os.getpid()))
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[listening.fileno()], start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the pool, its servers, and what they have forked."""
        self._process.kill()
        self._process.wait()


class _Servers:
    """The servers of a pool, by what an import may depend on (`Backend.preload`): backend, ``--deterministic`` and ``--threads``."""

    def __init__(self) -> None:
        self._state = inherited_state()
        self._servers: dict[tuple[str, bool, int | None], ForkServerProcess] = {}

    def answer(self, launcher: socket.socket) -> None:
        """Hear what a launcher asks for, and lend it a server or refuse. Raises OSError where it is gone or says nothing."""
        if not is_own_user(launcher):
            return
        received = receive_packet(launcher)
        if received is None:
            return
        said, descriptors = received
        try:
            equal = said["state"] == self._state
            if equal:
                self._server(Job.model_validate(said["job"])).lend(launcher, descriptors[0], said["variables"])
            launcher.send(json.dumps({"lent": equal}).encode())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _server(self, job: Job) -> ForkServerProcess:
        key = (job.backend, job.deterministic, job.threads)
        standing = self._servers.get(key)
        if standing is None or standing.ended:
            standing = self._servers[key] = ForkServerProcess(job)
        return standing


def main(arguments: list[str] | None = None) -> None:
    """Lend fork servers until the process that has started this one has ended."""
    parser = argparse.ArgumentParser(prog="crosstrain.conformance.fork_server_pool")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(arguments)
    ignore_interrupts()
    die_with_parent(options.parent)
    listening, servers = socket.socket(fileno=options.fd), _Servers()
    while True:
        launcher, _ = listening.accept()
        with launcher:
            launcher.settimeout(REQUEST_SECONDS)
            try:
                servers.answer(launcher)
            except OSError:
                continue  # whoever asked has gone; the others are served


if __name__ == "__main__":
    main()
