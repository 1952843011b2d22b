"""Holds a virtual network in a process of its own, started by `VirtualNetwork`.

It makes namespaces, links and CPU groups, and ends on request or with its owner: then it waits for the processes in the nodes, kills the
rest, and removes the CPU groups. Namespaces have no names, and end with their last process. Messages are JSON packets. The owner sends
``{"bits_per_second": …, "cores": […]}`` first, and ``"close"`` last. The holder answers ``{"ready": …}`` with descriptors (the bridge's
namespace, the nodes' and, without root, the user namespace); or ``{"lacking": …}`` or ``{"failed": …}``, and ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from .bridge import Bridge
from .cpu_quota import CpuGroup, CpuGroups, Hierarchy, sweep
from .namespaces import MESSAGE_BYTES, MissingCapabilityError, identity, open_user_namespace, processes_in

# After the owner's death its processes end by themselves within the first; after `close` none should be left.
_PATIENCE_AFTER_DEATH_SECONDS = 5.0
_PATIENCE_AFTER_CLOSE_SECONDS = 0.5
_PATIENCE_AFTER_KILL_SECONDS = 3.0
_OWNER_CHECK_SECONDS = 0.5


@dataclass
class _Namespaces:
    rootless: bool
    switchboard: Bridge
    descriptors: list[int]
    groups: Sequence[CpuGroup | None]

    def processes(self) -> set[int]:
        """Return the pids in the nodes, all of which descend from the owner."""
        networks = frozenset(identity(descriptor) for descriptor in self.switchboard.nodes)
        return set(processes_in(networks)).union(*(group.processes() for group in self.groups if group is not None))


def main() -> None:
    """Serve the owner over the socket of the only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    owner = os.getppid()
    groups: list[CpuGroup | None] = []
    try:
        request = json.loads(control.recv(MESSAGE_BYTES) or b"null")
        if request is None:
            return
        _make_groups(groups, request["cores"], owner)
        held = _build(request["bits_per_second"], groups)
    except MissingCapabilityError as error:
        _remove(groups)
        _send(control, {"lacking": [error.capability, error.reason, error.remedy]})
        return
    except Exception:  # noqa: BLE001  (the owner raises it)
        _remove(groups)
        _send(control, {"failed": traceback.format_exc()})
        return
    _serve(control, owner, held)


def _make_groups(groups: list[CpuGroup | None], cores: Sequence[float | None], owner: int) -> None:
    """Append each node's group, None without a limit; valid after an exception."""
    if all(limit is None for limit in cores):
        groups.extend(None for _ in cores)
        return
    hierarchy = Hierarchy.find()
    sweep(hierarchy)
    maker = CpuGroups(hierarchy, owner)
    for node, limit in enumerate(cores):
        groups.append(None if limit is None else maker.make(node, limit))


def _build(bits_per_second: float | None, groups: Sequence[CpuGroup | None]) -> _Namespaces:
    user = open_user_namespace()
    switchboard = Bridge(bits_per_second)
    for _ in groups:
        switchboard.add_node()
    descriptors = [switchboard.namespace, *switchboard.nodes] + ([] if user is None else [user])
    return _Namespaces(user is not None, switchboard, descriptors, groups)


def _serve(control: socket.socket, owner: int, held: _Namespaces) -> None:
    files = [None if group is None else str(group.processes_file) for group in held.groups]
    asked_to_close = False
    try:
        message = json.dumps({"ready": {"rootless": held.rootless, "processes_files": files}})
        socket.send_fds(control, [message.encode()], held.descriptors)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        asked_to_close = _await_close(control, owner)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the owner died during a message: clean up as after any other death
    finally:
        if not _await_none(held, _PATIENCE_AFTER_CLOSE_SECONDS if asked_to_close else _PATIENCE_AFTER_DEATH_SECONDS, kill=False):
            _await_none(held, _PATIENCE_AFTER_KILL_SECONDS, kill=True)
        _remove(held.groups)


def _await_close(control: socket.socket, owner: int) -> bool:
    """Wait for the request to close (True) or the owner's death (False)."""
    waiter = select.poll()
    waiter.register(control, select.POLLIN)
    while not waiter.poll(_OWNER_CHECK_SECONDS * 1000):
        if os.getppid() != owner:  # a forked child of the owner may keep the socket open
            return False
    return bool(control.recv(MESSAGE_BYTES))


def _await_none(held: _Namespaces, seconds: float, *, kill: bool) -> bool:
    deadline = time.monotonic() + seconds
    while processes := held.processes():
        if kill:
            for process in processes:
                _kill(process, held)
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _kill(process: int, held: _Namespaces) -> None:
    """Kill a process of the nodes; its pid is pinned and checked first, as pids are reused."""
    try:
        pinned = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        if process in held.processes():
            signal.pidfd_send_signal(pinned, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself
    finally:
        os.close(pinned)


def _remove(groups: Sequence[CpuGroup | None]) -> None:
    for group in groups:
        if group is not None:
            group.remove(1.0)


def _send(control: socket.socket, value: object) -> None:
    control.send(json.dumps(value).encode())


if __name__ == "__main__":
    main()
