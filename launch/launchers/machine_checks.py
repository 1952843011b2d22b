"""Checks for ``trainer doctor``, signals that end a command, and the limit of open files."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import psutil

from ...backends.base import Availability
from ...backends.capabilities import Capabilities
from ...backends.loading import declared_capabilities
from ...core.errors import TrainerError, UsageError
from ...core.job import Job
from ...core.plugins import find
from ...core.process import NOTICES
from ...data.store.location import cache_root
from ...monitor.gpu import GpuHardware, nvidia_hardware
from ...monitor.host import describe_host
from ..preflight.findings import described_gpus
from ..preflight.interview import probe_with_cache
from ..virtual.namespaces import VirtualNodeCapability
from ..virtual.network import Possibility, possible

_GIB = 2**30
MIN_MEMORY_BYTES = 1 * _GIB  # TensorFlow 2.21 takes 0.5 to 0.6 GiB per task before any data (measured)
MIN_DISK_BYTES = 1 * _GIB  # space for prepared data (glyphs28: 55 MB) and some hundred run directories


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ``lack``: something is missing or too small; `remedy` fixes that."""

    name: str
    state: Literal["ok", "lack"]
    found: str
    remedy: str | None = None


def check_machine(*, fresh: bool = False) -> tuple[list[Check], bool]:
    """Return all checks, and whether a backend can train; `fresh` ignores cached probes."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        probing = pool.submit(probe_with_cache, fresh=fresh)
        host, hardware, virtual = describe_host({}), nvidia_hardware(), possible()
        backends = probing.result()
    checks = [
        *map(backend_check, backends),
        *gpu_checks(hardware, backends, host["gpu_problem"], described_gpus(host) if host["gpus"] else None),
        processor_check(host),
        _memory_check(host),
        *virtual_node_checks(virtual),
        _runs_check(),
        _cache_check(),
    ]
    return checks, any(backend.problem is None for backend in backends)


def backend_check(backend: Availability) -> Check:
    """Check that a framework is installed, and list its devices."""
    name = f"backend {backend.name}"
    if backend.problem is not None:
        return Check(name, "lack", backend.problem, backend.hint)
    return Check(name, "ok", f"{backend.version} on {', '.join(backend.devices)}")


def gpu_checks(hardware: GpuHardware, backends: list[Availability], problem: str | None, described: str | None = None) -> Iterator[Check]:
    """Compare the machine's GPUs, `described` by the monitor, with those of each framework."""
    if not hardware.on_bus and not hardware.device_nodes:
        yield Check("gpu", "ok", "no NVIDIA GPU in this machine")
        return
    if not hardware.device_nodes:
        driver = "has a driver but no device file (/dev/nvidia0)" if hardware.driver_loaded else "has no driver"
        remedy = "give the container its devices (docker run --gpus all)" if hardware.driver_loaded else "install the NVIDIA driver"
        yield Check("gpu", "lack", f"{hardware.on_bus} NVIDIA on the PCI bus, which {driver}", remedy)
        return
    yield Check("gpu", "ok", f"{hardware.device_nodes} NVIDIA with device files{f': {described}' if described else ''}")
    for backend in backends:
        if backend.problem is not None:
            continue
        capabilities = declared_capabilities(find("backend", backend.name))
        seen = sum(device.startswith("gpu") for device in backend.devices)
        if "gpu" in capabilities.devices and seen < hardware.device_nodes:
            yield Check(f"gpu for {backend.name}", "lack", f"sees {seen} of {hardware.device_nodes}", _why_unseen(capabilities))
    if problem:
        yield Check("gpu monitoring", "lack", problem, "pip install nvidia-ml-py")


def _why_unseen(capabilities: Capabilities) -> str:
    build = capabilities.gpu_install or "see how the framework is installed for GPUs"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return build if hidden is None else f"CUDA_VISIBLE_DEVICES is {hidden!r}: unset it to see all; otherwise {build}"


def processor_check(host: dict[str, Any]) -> Check:
    """Check whether the cores are limited."""
    usable, logical = host["cores_available"], host["cores_logical"]
    limits = [f"affinity {host['cores_affinity']}"] if host["cores_affinity"] not in (None, logical) else []
    limits += [f"cgroup quota {host['cores_quota']:g}"] if host["cores_quota"] is not None else []
    limited = f" ({', '.join(limits)})" if limits else ""
    described = f"{_figure(usable)} of {_figure(logical)} cores usable{limited}, {host['cpu_model'] or 'unknown model'}"
    if limits and usable is not None and logical is not None and usable < logical:
        return Check("processor", "lack", described, "raise the container's CPU limit or the affinity (taskset) to use the whole machine")
    return Check("processor", "ok", described)


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


def _memory_check(host: dict[str, Any]) -> Check:
    total, limit = host["memory_total_bytes"], host["memory_limit_bytes"]
    free = psutil.virtual_memory().available
    usable = free if limit is None else min(free, limit)
    limited = f", limited to {_size(limit)} by the cgroup" if limit is not None else ""
    described = f"{_size(free)} free of {_size(total)}{limited}"
    if usable < MIN_MEMORY_BYTES:
        return Check("memory", "lack", described, f"have at least {_size(MIN_MEMORY_BYTES)} for each task")
    return Check("memory", "ok", described)


def virtual_node_checks(virtual: Possibility) -> Iterator[Check]:
    """Check whether virtual nodes work, and with which limits."""
    if (none := virtual.missing.get("namespaces")) is not None:
        yield Check("virtual nodes", "lack", f"not possible: {none.reason}", none.remedy)
        return
    yield Check("virtual nodes", "ok", f"possible, {'in a user namespace' if virtual.rootless else 'as root'}")
    limits: tuple[tuple[str, str, VirtualNodeCapability], ...] = (
        ("link limits", "--bandwidth", "bandwidth"),
        ("core limits", "--cores-per-node", "cpu_quota"),
    )
    for name, option, capability in limits:
        missing = virtual.missing.get(capability)
        yield Check(name, "ok", f"{option} works") if missing is None else Check(name, "lack", f"{option} does not work here", str(missing))


def disk_check(name: str, folder: Path) -> Check:
    """Check the free space of a folder, which may not exist yet, and that it can be written."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    described = f"{_size(free)} free at {folder}"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check(
            name, "lack", f"{existing} cannot be written", "choose another folder: --out for runs, TRAINER_DATA_CACHE for datasets"
        )
    if free < MIN_DISK_BYTES:
        return Check(name, "lack", described, f"make at least {_size(MIN_DISK_BYTES)} free, or choose another folder")
    return Check(name, "ok", described)


def _runs_check() -> Check:
    try:
        return disk_check("run directories", Path.cwd() / Job.model_fields["out"].default)
    except FileNotFoundError:
        return Check(
            "run directories", "lack", "the working directory has been removed", "change to a folder that exists, or choose one with --out"
        )


def _cache_check() -> Check:
    try:
        return disk_check("prepared data", cache_root())
    except TrainerError as error:
        return Check("prepared data", "lack", "no folder for it", str(error))


def _size(count: float) -> str:
    return f"{count / _GIB:.1f} GiB"


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *NOTICES)  # SIGHUP comes from a terminal that is closed


class CaughtSignals:
    """Passes the signals that end a command to `handle`. Main thread only.

    An ignored SIGHUP stays ignored (nohup). Once `interrupted`, signals after the block are ignored, so that the exit code stays.
    """

    interrupted = False

    def __enter__(self) -> Self:
        numbers = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, lambda number, frame: self.handle(number)) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.interrupted else handler)

    def handle(self, number: int) -> None:
        """Take a signal."""
        raise NotImplementedError


class EndingSignals(CaughtSignals):
    """Calls `graceful` at the first signal and `immediate` at the second, in the main thread.

    Repeated notices of a batch system count as none, and a signal after one as the first.
    """

    def __init__(self, graceful: Callable[[], None], immediate: Callable[[], NoReturn]) -> None:
        self._graceful = graceful
        self._immediate = immediate
        self._count = 0

    def ask(self) -> None:
        """Call `graceful` unless interrupted; the next signal still counts as the first."""
        if not self.interrupted:
            self.interrupted = True
            self._graceful()

    def handle(self, number: int) -> None:
        """Take a signal, as `ask` unless it is the second."""
        if number not in NOTICES:
            self._count += 1
            if self._count > 1:
                self._immediate()
        self.ask()


FILES_OF_A_CHILD = 8  # per node whose agent this process starts: pipes and sockets to the agent and to the probe before it
FILES_OF_A_CONNECTION = 2  # per node that has joined: its connection
OTHER_FILES = 512  # records, data, models, and unauthenticated peers of `core.listener`


def allow_files_of_nodes(nodes: int, *, joining: bool) -> None:
    """Raise the limit of open files for a driver of this many nodes. Raises UsageError."""
    needed = OTHER_FILES + nodes * (FILES_OF_A_CONNECTION if joining else FILES_OF_A_CHILD)
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY or needed <= allowed:
        return
    if most != resource.RLIM_INFINITY and needed > most:
        raise UsageError(
            f"nodes: got {nodes:,}, for which this process may have to open {needed:,} files, and the system allows it {most:,} "
            "(ulimit -Hn). Take fewer nodes, or have that limit raised."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
