"""Hosts on this machine: network namespaces on a bridge, each with an address."""

import os
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class BridgedHosts:
    """`namespaces` are the hosts' names for ``ip netns``; `addresses` theirs on link ``eth``.

    `hub` is another one, on the bridge itself.
    """

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]
    hub: str

    def command_prefix(self, host: int | None) -> list[str]:
        """The prefix of a command that is to run on a host; None for the hub."""
        return ["ip", "netns", "exec", self.hub if host is None else self.namespaces[host]]

    def in_network(self, host: int | None) -> list[str]:
        """The prefix for a command with this machine's files; /sys has the control groups too."""
        return ["nsenter", f"--net=/run/netns/{self.hub if host is None else self.namespaces[host]}"]

    def set_link(self, host: int, state: str) -> None:
        """Take a host's link ``down``, or ``up`` again."""
        _do("-n", self.namespaces[host], "link", "set", "eth", state)

    def lose_route(self, host: int, target: int) -> None:
        """Have a host no longer reach another, which so gets no answer from it either."""
        _do("-n", self.namespaces[host], "route", "add", "unreachable", f"{self.addresses[target]}/32")

    def find_route(self, host: int, target: int) -> None:
        """Undo `lose_route`."""
        _do("-n", self.namespaces[host], "route", "del", "unreachable", f"{self.addresses[target]}/32")

    def processes(self, daemon: str) -> list[int]:
        """The processes on the hosts, without the hub's and those whose command has `daemon` in it."""
        inside = {os.stat(f"/run/netns/{name}").st_ino for name in self.namespaces}
        pids = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.stat(entry / "ns/net").st_ino in inside:
                    command = (entry / "cmdline").read_bytes().decode(errors="replace")
                    if command and daemon not in command:  # none: it is over
                        pids.append(int(entry.name))
            except OSError:
                continue
        return pids


@contextmanager
def bridged_hosts(count: int, prefix: str):
    """Make the hosts, 10.99.0.1 and on, and the hub, 10.99.0.254; remove them at the end.

    Skips the test without permission.
    """
    name = f"{prefix}{os.getpid()}"
    if _ip("netns", "add", f"{name}-hub").returncode != 0:
        pytest.skip("no network namespaces can be made here")
    with ExitStack() as cleanup:
        cleanup.callback(_ip, "netns", "del", f"{name}-hub")
        _do("-n", f"{name}-hub", "link", "add", "bridge", "type", "bridge")
        _do("-n", f"{name}-hub", "address", "add", "10.99.0.254/24", "dev", "bridge")
        for link in ("lo", "bridge"):
            _do("-n", f"{name}-hub", "link", "set", link, "up")
        for host in range(count):
            namespace = f"{name}-{host}"
            _do("netns", "add", namespace)
            cleanup.callback(_ip, "netns", "del", namespace)
            _do("-n", namespace, "link", "add", "eth", "type", "veth", "peer", "name", f"host{host}", "netns", f"{name}-hub")
            _do("-n", f"{name}-hub", "link", "set", f"host{host}", "master", "bridge", "up")
            _do("-n", namespace, "address", "add", f"10.99.0.{host + 1}/24", "dev", "eth")
            for link in ("lo", "eth"):
                _do("-n", namespace, "link", "set", link, "up")
        names, addresses = zip(*((f"{name}-{host}", f"10.99.0.{host + 1}") for host in range(count)), strict=True)
        yield BridgedHosts(names, addresses, f"{name}-hub")


def _ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


def _do(*arguments):
    done = _ip(*arguments)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
