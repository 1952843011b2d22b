"""Nodes that a launcher starts without a run: its agents greet, and that is all.

``python -m crosstrain.conformance.launched_nodes`` starts them as a driver does, with what `Launched` has as JSON in its first argument,
writes a line with the agents' processes, and waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.job import Job
from ..core.process import process_state
from ..core.untrusted.console import note
from ..engine.protocol.messages import Message
from ..launch.launchers.base import AGENT_MODULE, Launcher, NodeChannel
from ..launch.launchers.host_list import Host
from ..launch.launchers.registry import allocated, choose_launcher
from ..launch.launchers.request import LaunchRequest

__all__ = ["Launched", "await_end", "greetings", "main", "visible_agents"]

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Launched:
    """What is asked of a launcher: its name, hosts and further options as a user would type them, and settings of the job."""

    launcher: str
    hosts: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Launcher:
        """Return the launcher. Raises what it raises."""
        given = allocated(self.launcher, os.environ)[0]
        shape = {"nodes": len(self.hosts)} if self.hosts else {}
        job = Job.model_validate({**shape, **self.settings, "launcher": self.launcher})
        hosts = [Host(name) for name in self.hosts]
        return choose_launcher(LaunchRequest(job, note, hosts=hosts, allocated=given, options=self.options, environment=os.environ))


def greetings(channels: Sequence[NodeChannel]) -> list[Message]:
    """Return what each agent greets with, in node order. Raises AssertionError with how it ended where one has ended instead."""
    found = []
    for channel in channels:
        while (message := channel.stream.receive()) is not None and message.kind != "hello":
            continue
        if message is None:
            code = None if channel.process is None else channel.process.wait(10)
            raise AssertionError(f"the agent of node {channel.node} has not greeted: {'' if code is None else channel.explain(code)}")
        found.append(message)
    return found


def visible_agents(greeted: Sequence[Message]) -> list[int]:
    """Return the numbers of those agents' processes that can be seen from here; those on other machines cannot."""
    return [pid for pid in (int(message["pid"]) for message in greeted) if AGENT_MODULE in _command(pid)]


def await_end(pids: Sequence[int], seconds: float) -> list[int]:
    """Wait until processes have ended; return those that live after so many seconds."""
    deadline = time.monotonic() + seconds
    while (living := [pid for pid in pids if process_state(pid) not in (None, "Z", "X")]) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return living


def stop(pids: Sequence[int]) -> None:
    """Stop processes, which then do nothing by themselves."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def main(text: str, wait: Callable[[], None] = signal.pause) -> None:
    """Start the nodes that `text` describes, say which processes their agents are, and wait."""
    launcher = Launched(**json.loads(text)).make()
    launcher.prestart()
    sys.stdout.write(json.dumps(visible_agents(greetings(launcher.start()))) + "\n")
    sys.stdout.flush()
    wait()


def as_text(launched: Launched) -> str:
    """Return what `main` takes."""
    return json.dumps(asdict(launched))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1])
