"""Network namespaces without names: made by a process that keeps them open, with or without root.

Python gained ``os.unshare`` and ``os.setns`` in 3.12; below that they are two calls of the C library.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from .errors import MissingCapabilityError

__all__ = ["identity", "join_network", "new_network", "open_user_namespace", "processes_in", "silence_ipv6"]

# From linux/sched.h.
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

_REMEDY = (
    "Use --network host (all nodes on 127.0.0.1), run as root, or allow unprivileged user namespaces: "
    "sysctl kernel.unprivileged_userns_clone=1 (Debian), kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), "
    "user.max_user_namespaces above 0; in a container add the capability SYS_ADMIN or an unconfined seccomp profile."
)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def new_network() -> int:
    """Move this thread into a new, empty network namespace; return a descriptor that keeps it alive.

    Raises MissingCapabilityError where the kernel refuses.
    """
    try:
        _call("unshare", _CLONE_NEWNET)
    except OSError as error:
        raise MissingCapabilityError(
            "namespaces", f"Virtual nodes need network namespaces, and this machine refuses one ({error.strerror})", _REMEDY
        ) from error
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def join_network(descriptor: int) -> None:
    """Move this thread into the network namespace behind `descriptor`."""
    _call("setns", descriptor, _CLONE_NEWNET)


def open_user_namespace() -> int | None:
    """Get the right to make network namespaces; return the descriptor of a new user namespace where one was needed for it.

    With the capability SYS_ADMIN nothing is done and None returned. Otherwise the (single-threaded) process moves into a user
    namespace in which it has every capability and in which its own user and group keep their numbers, so that the user's files
    stay the user's. Raises MissingCapabilityError where user namespaces are forbidden.
    """
    if _may_administrate():
        return None
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError as error:
        raise MissingCapabilityError(
            "namespaces", f"Virtual nodes without root need a user namespace, and this machine refuses one ({error.strerror})", _REMEDY
        ) from error
    return os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def _may_administrate() -> bool:
    """Whether the process has the capability SYS_ADMIN (bit 21 in linux/capability.h)."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 21 & 1)


def silence_ipv6() -> bool:
    """Switch IPv6 off in this thread's network namespace, so that neighbour discovery adds nothing to the counters.

    Returns whether it is off; in a container whose /proc/sys is read-only it stays on, which costs a few packets at the start.
    """
    folder = Path("/proc/sys/net/ipv6/conf")
    if not folder.exists():
        return True
    try:
        for scope in ("all", "default"):
            (folder / scope / "disable_ipv6").write_text("1")
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return False
        raise
    return True


def identity(descriptor: int) -> tuple[int, int]:
    """Return what tells one namespace from every other: device and inode."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def processes_in(networks: frozenset[tuple[int, int]]) -> Iterator[int]:
    """Yield the ids of the live processes in these network namespaces; processes of other users cannot be seen and are not ours."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            status = os.stat(f"/proc/{entry.name}/ns/net")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if (status.st_dev, status.st_ino) in networks:
            yield int(entry.name)
