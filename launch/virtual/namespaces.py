"""Unnamed network namespaces, which the making process keeps open, with or without root.

They need the C library, as Python has ``os.unshare`` and ``os.setns`` only from 3.12 on.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ...core.errors import RunFailedError, UsageError
from .enter import call

INTERFACE = "eth0"  # every node's only interface except ``lo``
PREFIX_BITS = 24
MAX_NODES = 250  # a message carries 253 descriptors, and the network has 254 addresses
MESSAGE_BYTES = 65536
MIN_BITS_PER_SECOND = 12_000.0  # about one full Ethernet frame per second
MAX_BITS_PER_SECOND = (2**32 - 1) * 8.0  # the token bucket filter counts bytes per second in 32 bits


def address(node: int) -> str:
    """Return the IPv4 address of a node (from 0): 10.77.0.1 and so on."""
    return f"10.77.0.{node + 1}"


VirtualNodeCapability = Literal["namespaces", "bandwidth", "cpu_quota"]


class NetworkLostError(RunFailedError):
    """The virtual network's holder and all nodes have ended; another network can be made."""


class MissingCapabilityError(UsageError):
    """A missing capability of the machine: reason (no full stop) and remedy."""

    def __init__(self, capability: VirtualNodeCapability, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}. {remedy}")
        self.capability: VirtualNodeCapability = capability
        self.reason = reason
        self.remedy = remedy


# From linux/sched.h.
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_REMEDY = (
    "Use --network host (all nodes on 127.0.0.1), run as root, or allow unprivileged user namespaces: "
    "sysctl kernel.unprivileged_userns_clone=1 (Debian), kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), "
    "user.max_user_namespaces above 0; in a container add the capability SYS_ADMIN or an unconfined seccomp profile."
)


def new_network() -> int:
    """Move this thread into a new namespace; return it. Raises MissingCapabilityError."""
    try:
        call("unshare", _CLONE_NEWNET)
    except OSError as error:
        raise MissingCapabilityError(
            "namespaces", f"Virtual nodes need network namespaces, and this machine refuses one ({error.strerror})", _REMEDY
        ) from error
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def join_network(descriptor: int) -> None:
    """Move this thread into a network namespace."""
    call("setns", descriptor, _CLONE_NEWNET)


def open_user_namespace() -> int | None:
    """Make a user namespace that may make network ones; return it, None with SYS_ADMIN.

    For single-threaded processes. User and group keep their numbers, so that the user's files remain the user's. Raises
    MissingCapabilityError if user namespaces are forbidden.
    """
    if _may_administrate():
        return None
    user, group = os.geteuid(), os.getegid()
    try:
        call("unshare", _CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError as error:
        raise MissingCapabilityError(
            "namespaces", f"Virtual nodes without root need a user namespace, and this machine refuses one ({error.strerror})", _REMEDY
        ) from error
    return os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def _may_administrate() -> bool:
    """Return whether the process has SYS_ADMIN (bit 21 in linux/capability.h)."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 21 & 1)


def silence_ipv6() -> None:
    """Disable IPv6 traffic in this thread's namespace, unless /proc/sys is read-only."""
    folder = Path("/proc/sys/net/ipv6/conf")
    if not folder.exists():
        return
    try:
        for scope in ("all", "default"):
            (folder / scope / "disable_ipv6").write_text("1")
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise


def identity(namespace: int | str) -> tuple[int, int]:
    """Return the unique key of a namespace, given by descriptor or path: device and inode."""
    status = os.stat(namespace)
    return status.st_dev, status.st_ino


def processes_in(networks: frozenset[tuple[int, int]]) -> Iterator[int]:
    """Yield the pids of this user's live processes in these network namespaces."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if identity(f"/proc/{entry.name}/ns/net") in networks:
                yield int(entry.name)
