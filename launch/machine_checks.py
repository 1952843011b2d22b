"""Can this machine train? What is there, what is lacking, and what to do about each lack; for ``trainer doctor``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from ..backends.base import Availability
from ..backends.capabilities import Capabilities
from ..backends.loading import declared_capabilities
from ..core.errors import TrainerError
from ..core.job import Job
from ..core.plugins import find
from ..data.store.location import cache_root
from ..monitor.gpu_devices import GpuHardware, nvidia_hardware
from ..monitor.host import describe_host
from .preflight.gpu_findings import described_gpus
from .preflight.kept_probes import probe_kept
from .virtual.network import Possibility, possible

__all__ = ["Check", "backend_check", "check_machine", "disk_check", "gpu_checks", "processor_check", "virtual_node_checks"]

_GIB = 2**30

LEAST_MEMORY_BYTES = 1 * _GIB
"""A TensorFlow task holds 0.5 to 0.6 GiB before it has any data (measured with TensorFlow 2.21), and a run has at least one."""

LEAST_DISK_BYTES = 1 * _GIB
"""Room for prepared data (glyphs28: 55 MB) and some hundred run directories."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. ``lack``: something is missing or smaller than it could be, and `remedy` says what to do."""

    name: str
    state: Literal["ok", "lack"]
    found: str
    remedy: str | None = None


def check_machine(*, fresh: bool = False) -> tuple[list[Check], bool]:
    """Look at everything; return the checks and whether a backend can train.

    The first time, and where `fresh`, that takes about as long as importing the frameworks (`probe_kept`).
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        asked = pool.submit(probe_kept, fresh=fresh)
        host, hardware, virtual = describe_host({}), nvidia_hardware(), possible()
        backends = asked.result()
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


def backend_check(found: Availability) -> Check:
    """A framework is there with its devices, or it is not."""
    name = f"backend {found.name}"
    if found.problem is not None:
        return Check(name, "lack", found.problem, found.hint)
    return Check(name, "ok", f"{found.version} on {', '.join(found.devices)}")


def gpu_checks(hardware: GpuHardware, backends: list[Availability], problem: str | None, described: str | None = None) -> Iterator[Check]:
    """Compare the GPUs that the machine has with those that each usable framework sees.

    `problem` is the monitor's with them, `described` what its driver says of them.
    """
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
    """Say how many cores may be used and what limits them."""
    usable, logical = host["cores_available"], host["cores_logical"]
    limits = [f"affinity {host['cores_affinity']}"] if host["cores_affinity"] not in (None, logical) else []
    limits += [f"cgroup quota {host['cores_quota']:g}"] if host["cores_quota"] is not None else []
    limited = f" ({', '.join(limits)})" if limits else ""
    found = f"{_figure(usable)} of {_figure(logical)} cores usable{limited}, {host['cpu_model'] or 'unknown model'}"
    if limits and usable is not None and logical is not None and usable < logical:
        return Check("processor", "lack", found, "raise the container's CPU limit or the affinity (taskset) to use the whole machine")
    return Check("processor", "ok", found)


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


def _memory_check(host: dict[str, Any]) -> Check:
    total, limit = host["memory_total_bytes"], host["memory_limit_bytes"]
    free = psutil.virtual_memory().available
    usable = free if limit is None else min(free, limit)
    limited = f", limited to {_size(limit)} by the cgroup" if limit is not None else ""
    found = f"{_size(free)} free of {_size(total)}{limited}"
    if usable < LEAST_MEMORY_BYTES:
        return Check("memory", "lack", found, f"have at least {_size(LEAST_MEMORY_BYTES)} for each task")
    return Check("memory", "ok", found)


def virtual_node_checks(virtual: Possibility) -> Iterator[Check]:
    """Say whether several nodes can live on this machine, and with which limits."""
    if not virtual.ok:
        yield Check("virtual nodes", "lack", f"not possible: {virtual.reason}", virtual.remedy)
        return
    yield Check("virtual nodes", "ok", f"possible, {'in a user namespace' if virtual.rootless else 'as root'}")
    for name, option, works, reason in (
        ("link limits", "--bandwidth", virtual.bandwidth, virtual.bandwidth_reason),
        ("core limits", "--cores-per-node", virtual.cpu_quota, virtual.cpu_quota_reason),
    ):
        if works:
            yield Check(name, "ok", f"{option} works")
        else:
            yield Check(name, "lack", f"{option} does not work here", reason)


def disk_check(name: str, folder: Path) -> Check:
    """Say how much room there is for a folder, which may not exist yet, and whether it can be written."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    found = f"{_size(free)} free at {folder}"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "lack", f"{there} cannot be written", "choose another folder: --out for runs, TRAINER_DATA_CACHE for datasets")
    if free < LEAST_DISK_BYTES:
        return Check(name, "lack", found, f"make at least {_size(LEAST_DISK_BYTES)} free, or choose another folder")
    return Check(name, "ok", found)


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
