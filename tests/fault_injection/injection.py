"""Injected faults: kills, stops, cut links, reset connections.

Real signals, and the kernel's tools.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass

from .plan import Fault
from .watched import Watched

PAUSE_SECONDS = 5.0
CUT_SECONDS = 3.0


@dataclass(frozen=True)
class Done:
    """An injected fault: the name to be blamed, and whether tasks must restart."""

    victim: str
    blamed: str
    restarts: bool | None = True
    """None: it may, as a framework may or may not survive it."""
    alone: bool = False
    """It is the only task that restarts; the others continue."""


def inject(fault: Fault, run: Watched, driver: int, *, workers_rejoin: bool) -> Done:
    """Inject the fault now. Raises LookupError if the run has no target for it.

    `workers_rejoin`: a lost worker restarts alone.
    """
    tasks = run.tasks()
    workers = sorted(name for name in tasks if name.startswith("worker"))
    if len(workers) < 3:
        raise LookupError("not all workers are known")
    node = fault.place % 3
    anybody = sorted(tasks)[fault.place % len(tasks)]
    if fault.kind == "worker":
        victim = workers[1 + fault.place % 2]
        return _signal(tasks[victim][1], signal.SIGKILL, Done(victim, victim, alone=workers_rejoin))
    if fault.kind == "chief":
        victim = "chief-0" if "chief-0" in tasks else "worker-0"
        return _signal(tasks[victim][1], signal.SIGKILL, Done(victim, victim))
    if fault.kind == "ps":
        servers = sorted(name for name in tasks if name.startswith("ps"))  # torch's chief is the first server, and has its own name
        if not servers:
            raise LookupError("no parameter server is known")
        victim = servers[fault.place % len(servers)]
        return _signal(tasks[victim][1], signal.SIGKILL, Done(victim, victim))
    if fault.kind == "agent":
        return _signal(run.agent(node, driver), signal.SIGKILL, Done(f"agent of node {node}", f"node {node}"))
    if fault.kind == "driver":
        return _signal(driver, signal.SIGKILL, Done("driver", "", restarts=False))
    if fault.kind == "pause-task":
        return _pause(tasks[anybody][1], Done(anybody, "", restarts=False))
    if fault.kind == "pause-agent":
        return _pause(run.agent(node, driver), Done(f"agent of node {node}", "", restarts=False))
    if fault.kind == "pause-driver":
        return _pause(driver, Done("driver", "", restarts=False))
    if fault.kind == "stop-task":
        victim = workers[fault.place % 3]
        return _signal(tasks[victim][1], signal.SIGSTOP, Done(victim, victim, restarts=None))
    if fault.kind == "stop-agent":
        return _signal(run.agent(node, driver), signal.SIGSTOP, Done(f"agent of node {node}", f"node {node}"))
    inside = ["nsenter", "--target", str(run.agent(node, driver)), "--net"]
    if fault.kind == "cut":
        interface = _interface(inside)
        subprocess.run([*inside, "ip", "link", "set", interface, "down"], check=True)
        threading.Timer(CUT_SECONDS, subprocess.run, [[*inside, "ip", "link", "set", interface, "up"]]).start()
        return Done(f"link of node {node}", "", restarts=None)
    if fault.kind == "reset":
        subprocess.run([*inside, "ss", "--kill", "--tcp", "state", "established"], check=True, capture_output=True)
        return Done(f"connections of node {node}", "", restarts=None)
    raise LookupError(f"no fault {fault.kind!r}")


def _interface(inside: list[str]) -> str:
    shown = subprocess.run([*inside, "ip", "-brief", "link"], check=True, capture_output=True, text=True).stdout
    return next(line.split()[0].partition("@")[0] for line in shown.splitlines() if not line.startswith("lo"))


def _signal(pid: int, number: signal.Signals, done: Done) -> Done:
    os.kill(pid, number)
    return done


def _pause(pid: int, done: Done) -> Done:
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        time.sleep(PAUSE_SECONDS)
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    threading.Thread(target=go_on, daemon=True).start()
    return done
