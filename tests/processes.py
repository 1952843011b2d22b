"""Finding processes of a run by the mark in their environment, and their namespaces."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MARK = "CROSSTRAIN_TEST_MARK"


def marked(mark: str, name: str = "") -> list[int]:
    """The live (not zombie) processes with this mark and `name` in their command line."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment.split(b"\0") and state not in "ZX" and name in command:
            pids.append(int(entry.name))
    return sorted(pids)


@dataclass
class MarkedRun:
    """A `trainer` command in a new session, whose processes are found whatever their parent.

    `before` is a command before it, such as one that runs it elsewhere.
    """

    arguments: list[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    before: list[str] = field(default_factory=list)

    def __enter__(self):
        self.errors = (self.folder / f"stderr-{self.mark}.txt").open("w+")
        self.output = (self.folder / f"stdout-{self.mark}.txt").open("w+")
        self.process = subprocess.Popen(
            [*self.before, sys.executable, "-m", "crosstrain.cli.main", *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.errors,
            env={**os.environ, **self.environment, MARK: self.mark},
            start_new_session=True,
        )
        return self

    def __exit__(self, *_):
        for pid in self.alive():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self.process.wait()
        self.errors.close()
        self.output.close()

    def alive(self, name: str = "") -> list[int]:
        """The living (not zombie) processes of the run whose command line contains `name`."""
        return marked(self.mark, name)

    def namespaces(self) -> set[int]:
        """The network namespaces, other than this process's own, in which the run has processes."""
        ours = os.stat("/proc/self/ns/net").st_ino
        identities = set()
        for pid in self.alive():
            try:
                identities.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
            except OSError:
                continue
        return identities - {ours}

    def stderr(self) -> str:
        return Path(self.errors.name).read_text()

    def stdout(self) -> str:
        return Path(self.output.name).read_text()

    def wait(self, seconds: float) -> int:
        return self.process.wait(timeout=seconds)


@contextmanager
def script_process(script: Path, *arguments, **options):
    """A Python script that does not outlive the test."""
    with subprocess.Popen([sys.executable, str(script), *arguments], **options) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                started.kill()


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports, outside `PortBlock` and ephemeral ones."""
    while True:
        first = random.SystemRandom().randrange(10_000, 21_000 - count)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


def open_descriptors() -> set[tuple[str, str]]:
    """Return this process's descriptors, each as its number and what it is of.

    A test compares what is there afterwards with what was there before, and not their number: earlier tests may have left some.
    """
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            descriptors.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return descriptors


def is_over(connection: socket.socket) -> bool:
    """Whether the peer closes or resets the connection without sending more.

    One that was never accepted is reset.
    """
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def wait_until(condition, seconds: float, what: str):
    """Wait until `condition()` is true and return its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds:g} s for {what}")


def living_in(namespaces: set[int], mark: str) -> list[int]:
    """The processes in one of these network namespaces without another run's mark.

    The system reuses the number of a deleted namespace, so another test's run may have it.
    """
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            inside = os.stat(entry / "ns/net").st_ino in namespaces
            marks = [value for value in (entry / "environ").read_bytes().split(b"\0") if value.startswith(f"{MARK}=".encode())]
        except OSError:
            continue
        if inside and marks in ([], [f"{MARK}={mark}".encode()]):
            pids.append(int(entry.name))
    return sorted(pids)
