"""Description of a node for ``env.json``: hardware, limits, interfaces and software."""

from __future__ import annotations

import array
import fcntl
import os
import platform
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from .cpu_limits import cpu_quota_cores, memory_limit_bytes
from .gpu import describe_gpus
from .processes import read_lines

_SIOCETHTOOL = 0x8946
_ETHTOOL_GDRVINFO = 3
# their reported speed is a constant of the driver (veth: 10 Gbit/s)
_DRIVERS_WITHOUT_SPEED = frozenset({"veth", "bridge", "tun", "dummy", "loopback"})
# Distributions that every node describes, in addition to frameworks'.
PACKAGES: Mapping[str, Sequence[str]] = {"crosstrain": ("crosstrain",), "numpy": ("numpy",)}


def cores_available(pid: int | None = None) -> float | None:
    """Return the usable cores of a process by affinity and CPU quota; None if unknown.

    The default is this process.
    """
    affinity = _affinity(pid)
    limits = [limit for limit in (affinity, cpu_quota_cores(pid)) if limit is not None]
    return float(min(limits)) if limits else None


def describe_host(framework_packages: Mapping[str, Sequence[str]], gpus: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return this node's, network namespace's or container's description; null if unknown.

    `gpus`: result of `describe_gpus`.
    """
    quota = cpu_quota_cores()
    return {
        "hostname": platform.node() or None,
        "cpu_model": _cpu_field("model name", "Model") or platform.processor() or None,
        "cpu_flags": (_cpu_field("flags", "Features") or "").split()[:MAX_CPU_FLAGS] or None,
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


MAX_CPU_FLAGS = 1000


def _cpu_field(*names: str) -> str | None:
    """Return a field of ``/proc/cpuinfo`` by its x86 or ARM name, or None."""
    lines = (line.partition(":") for line in read_lines(Path("/proc/cpuinfo")))
    fields = {key.strip(): value.strip() for key, _, value in lines}
    return next((fields[name] for name in names if fields.get(name)), None)


def _interfaces() -> dict[str, dict[str, Any]]:
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
    """Return an interface's driver (struct ethtool_drvinfo of linux/ethtool.h), or None."""
    answer = array.array("B", struct.pack("=I", _ETHTOOL_GDRVINFO) + bytes(192))
    request = struct.pack("16sP16x", interface.encode(), answer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        try:
            fcntl.ioctl(channel, _SIOCETHTOOL, request)
        except OSError:
            return None
    return answer.tobytes()[4:36].split(b"\0", 1)[0].decode()


def installed_versions(packages: Mapping[str, Sequence[str]]) -> dict[str, str | None]:
    """Return each package's release by its metadata; None if not installed."""
    return {name: _first_version(distributions) for name, distributions in packages.items()}


def _first_version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


GIT_SECONDS = 3.0  # for a call of git; a slow, large tree's changes remain unknown
MAX_PACKAGES = 5_000
MAX_CHARACTERS = 200
_INSTALLED = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)\.(dist-info|egg-info)")
# Untrusted settings by which git would start a program, or read elsewhere.
_RUNS_PROGRAMS = r"^(core\.(fsmonitor|worktree)|filter\..*|include\..*|includeif\..*|extensions\.worktreeconfig)$"


def provenance(typed_in: Path) -> dict[str, Any]:
    """Return the releases of installed ``packages``, and two work trees.

    They are the `work_tree` of ``typed_in`` and of ``crosstrain``.
    """
    return {
        "packages": installed_packages(sys.path),
        "typed_in": work_tree(typed_in),
        "crosstrain": work_tree(Path(__file__).resolve().parent),
    }


def installed_packages(folders: Iterable[str]) -> dict[str, str]:
    """Return the release of each distribution in the folders, by metadata name.

    The first counts.
    """
    releases: dict[str, str] = {}
    for folder in folders:
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:  # archive, or missing
            continue
        for entry in entries:
            match = _INSTALLED.fullmatch(entry)
            if match is not None and len(entry) <= MAX_CHARACTERS and len(releases) < MAX_PACKAGES:
                releases.setdefault(match["name"].replace("_", "-").lower(), match["version"])
    return dict(sorted(releases.items()))


def work_tree(folder: Path) -> dict[str, Any] | None:
    """Return a git work tree's ``commit`` and whether files ``changed``, or None.

    `changed` is None if git times out or is unsafe.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None or re.fullmatch("[0-9a-f]{40,64}", commit) is None:
        return None
    unsafe = _git(folder, "config", "--local", "--no-includes", "--name-only", "--get-regexp", _RUNS_PROGRAMS, ends=(0, 1))
    status = _git(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all") if unsafe == "" else None
    return {"commit": commit, "changed": None if status is None else status != ""}


def _git(folder: Path, *arguments: str, ends: tuple[int, ...] = (0,)) -> str | None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**variables, "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode in ends else None
