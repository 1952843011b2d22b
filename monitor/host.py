"""What a node is: its processor, the share of it that may be used, memory, interfaces and GPUs; for ``env.json``."""

from __future__ import annotations

import array
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from .cpu_limits import cpu_quota_cores, memory_limit_bytes
from .gpu import describe_gpus

__all__ = ["PACKAGES", "cores_available", "describe_host", "installed_versions"]

_SIOCETHTOOL = 0x8946
_ETHTOOL_GDRVINFO = 3
# Virtual interfaces name a speed that is a constant in their driver (veth: 10 Gbit/s), not a measure of anything.
_DRIVERS_WITHOUT_SPEED = frozenset({"veth", "bridge", "tun", "dummy", "loopback"})


PACKAGES: Mapping[str, Sequence[str]] = {
    "crosstrain": ("crosstrain",),
    "numpy": ("numpy",),
}
"""What is looked for on every node beside the packages of frameworks, and the distributions it comes in."""


def cores_available(pid: int | None = None) -> float | None:
    """Return the cores that a process (default: this one) may use: the smaller of its affinity and its CPU quota.

    The affinity holds the cpuset's limit already. Quotas of version 1 and 2 count, the process's own group's and every group's above.
    None where the system does not tell.
    """
    affinity = _affinity(pid)
    limits = [limit for limit in (affinity, cpu_quota_cores(pid)) if limit is not None]
    return float(min(limits)) if limits else None


def describe_host(framework_packages: Mapping[str, Sequence[str]], gpus: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what this process's node is; null for what the system does not tell.

    `framework_packages` are those whose releases are looked for besides `PACKAGES`, each with the distributions that it may come in.
    `gpus` is what `describe_gpus` has said, where it was asked already. In a network namespace the interfaces are the namespace's; in a
    container cores and memory limit are the container's.
    """
    quota = cpu_quota_cores()
    return {
        "hostname": platform.node() or None,
        "cpu_model": _cpu_field("model name", "Model") or platform.processor() or None,
        "cpu_flags": (_cpu_field("flags", "Features") or "").split()[:MOST_CPU_FLAGS] or None,
        "cores_logical": psutil.cpu_count(logical=True),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_affinity": _affinity(None),
        "cores_quota": None if quota is None else round(quota, 3),
        "cores_available": cores_available(),
        "memory_total_bytes": psutil.virtual_memory().total,
        "memory_limit_bytes": memory_limit_bytes(),
        "interfaces": _interfaces(),
        "operating_system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "packages": installed_versions({**PACKAGES, **framework_packages}),
        **(describe_gpus(os.environ) if gpus is None else gpus),
    }


def _affinity(pid: int | None) -> int | None:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() if pid is None else None
    try:
        return len(os.sched_getaffinity(pid or 0))
    except OSError:
        return None


MOST_CPU_FLAGS = 1000


def _cpu_field(*names: str) -> str | None:
    """Return a field of ``/proc/cpuinfo``, by the name that x86 gives it or that ARM does; None where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return next((fields[name] for name in names if fields.get(name)), None)


def _interfaces() -> dict[str, dict[str, Any]]:
    """Return addresses, state and speed (bits per second, null where it means nothing) of each interface of the network namespace."""
    states = psutil.net_if_stats()
    described = {}
    for name, entries in sorted(psutil.net_if_addrs().items()):
        state = states.get(name)
        speed = state.speed if state and state.speed > 0 and _driver(name) not in _DRIVERS_WITHOUT_SPEED else None
        described[name] = {
            "addresses": [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)],
            "up": None if state is None else state.isup,
            "mtu_bytes": None if state is None else state.mtu,
            "speed_bits_per_second": None if speed is None else speed * 1_000_000,
        }
    return described


def _driver(interface: str) -> str | None:
    """Return the name of an interface's driver (struct ethtool_drvinfo of linux/ethtool.h), or None where it has none to tell."""
    answer = array.array("B", struct.pack("=I", _ETHTOOL_GDRVINFO) + bytes(192))
    request = struct.pack("16sP16x", interface.encode(), answer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        try:
            fcntl.ioctl(channel, _SIOCETHTOOL, request)
        except OSError:
            return None
    return answer.tobytes()[4:36].split(b"\0", 1)[0].decode()


def installed_versions(packages: Mapping[str, Sequence[str]]) -> dict[str, str | None]:
    """Return the release of each package as its metadata has it; None where none of its distributions is installed."""
    return {name: _first(distributions) for name, distributions in packages.items()}


def _first(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
