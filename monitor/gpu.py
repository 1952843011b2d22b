"""What the node's NVIDIA GPUs are and do, through nvidia-ml-py (module ``pynvml``) where it and a driver are there."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .gpu_devices import nvidia_device_nodes, unreadable_gpu_possible
from .visible_gpus import Gpu, visible_gpus

if TYPE_CHECKING:
    from ..records.schema import GpuSample

__all__ = ["GpuProbe", "describe_gpus"]

# The driver's control device on Linux, and its stand-in under WSL 2; and the library that speaks to the driver. Without any of them there
# is no GPU to observe.
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
_LIBRARY = "libnvidia-ml.so.1"

_MOST_PARTITIONS = 64
"""Of a GPU; those that can be cut into some have seven at most."""


class GpuProbe:
    """Reads every NVIDIA device of the host. Never raises: `problem` says once why a present GPU cannot be observed.

    `gpu_of_task` has the number of the device that a task was given.
    """

    def __init__(self, gpu_of_task: Mapping[str, int] | None = None) -> None:
        self._gpu_of_task = gpu_of_task or {}
        self.problem: str | None = None
        self.driver_fails = False
        self._nvml: Any = None
        self._handles: list[Any] = []
        if (there := any(os.path.exists(path) for path in _DEVICES)) or _library_loads():
            self._open(driver_there=there)

    def read(self) -> tuple[GpuSample, ...] | None:
        """Return a mapping a device, null for what it does not tell; None where there is no device or none can be read.

        It has ``name``, ``utilization`` (0 to 1), ``memory_bytes``, ``memory_total_bytes``, ``power_watts``, and ``tasks``, those that were
        given it.
        """
        if not self._handles:
            return None
        return tuple(self._read_device(number, handle) for number, handle in enumerate(self._handles))

    def describe(self) -> list[dict[str, Any]] | None:
        """Return of each device what stays as it is: ``name``, ``memory_total_bytes``, ``uuid``, and UUIDs of its ``partitions`` (MIG)."""
        if not self._handles:
            return None
        return [self._describe_device(handle) for handle in self._handles]

    def driver_version(self) -> str | None:
        """Return the release of the driver; None where there is none that answers."""
        return None if self._nvml is None else self._ask(self._nvml, self._nvml.nvmlSystemGetDriverVersion)

    def close(self) -> None:
        """Let the driver go; afterwards `read` returns None."""
        self._handles = []
        if self._nvml is not None:
            nvml, self._nvml = self._nvml, None
            self._ask(nvml, nvml.nvmlShutdown)

    def _open(self, *, driver_there: bool) -> None:
        """Ask the driver for its devices. A library alone is no problem: it comes with images for machines that have a driver."""
        try:
            import pynvml
        except ImportError:
            if driver_there:
                self.problem = "an NVIDIA driver is here, but its figures need the package nvidia-ml-py: pip install nvidia-ml-py"
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            if driver_there:
                self.driver_fails = True
                self.problem = f"the NVIDIA driver does not answer: {error}"
            return
        self._nvml = pynvml
        count = self._ask(pynvml, pynvml.nvmlDeviceGetCount) or 0
        handles = [self._ask(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        self._handles = [handle for handle in handles if handle is not None]

    def _read_device(self, number: int, handle: Any) -> GpuSample:
        nvml = self._nvml
        rates = self._ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        return {
            "name": self._ask(nvml, nvml.nvmlDeviceGetName, handle),
            "utilization": None if rates is None else rates.gpu / 100,
            "memory_bytes": None if memory is None else int(memory.used),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "power_watts": None if milliwatts is None else milliwatts / 1000,
            "tasks": [task for task, gpu in self._gpu_of_task.items() if gpu == number],
        }

    def _describe_device(self, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        memory = self._ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        return {
            "name": self._ask(nvml, nvml.nvmlDeviceGetName, handle),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "uuid": self._ask(nvml, nvml.nvmlDeviceGetUUID, handle),
            "partitions": self._partitions(handle),
        }

    def _partitions(self, handle: Any) -> list[str]:
        """Return the UUIDs of a device's partitions; most devices, and older drivers, know of none, which is no problem of theirs."""
        nvml, found = self._nvml, []
        try:
            if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                return []
            most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except nvml.NVMLError:
            return []
        for number in range(min(most, _MOST_PARTITIONS)):
            try:
                found.append(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
            except nvml.NVMLError_NotFound:
                continue
            except nvml.NVMLError as error:
                self.problem = f"MIG device {number}: {error}"
        return found

    def _ask(self, nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
        """Return the driver's answer, or None where it refuses (a partitioned or a virtual device does not tell everything)."""
        try:
            return question(*arguments)
        except nvml.NVMLError as error:
            self.problem = f"{question.__name__}: {error}"
            return None


def describe_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, Any]:
    """Return what GPUs a node has, and which of them a process with this `environment` may use.

    ``gpus``: ``name``, ``memory_total_bytes`` and ``uuid`` of each, None where there is none or none can be read; ``gpu_driver``: the
    driver's release; ``gpu_problem``: why GPUs that are there cannot be read. ``visible_gpus``: the fields of `VisibleGpu` of each that
    may be used, in order; None where it is not known whether there are any, as of other makers' than NVIDIA's.
    """
    probe = GpuProbe()
    try:
        devices, driver = probe.describe(), probe.driver_version()
    finally:
        probe.close()
    in_pci_order = environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID") == "PCI_BUS_ID"
    there = _usable(probe, devices, root)
    visible = None if there is None else visible_gpus(there, environment.get("CUDA_VISIBLE_DEVICES"), in_pci_order=in_pci_order)
    kept = ("name", "memory_total_bytes", "uuid")
    return {
        "gpus": None if devices is None else [{key: device[key] for key in kept} for device in devices],
        "gpu_driver": driver,
        "gpu_problem": probe.problem,
        "visible_gpus": None if visible is None else [asdict(gpu) for gpu in visible],
    }


def _usable(probe: GpuProbe, devices: list[dict[str, Any]] | None, root: Path) -> list[Gpu] | None:
    if devices is not None:
        return [Gpu(device["uuid"], tuple(device["partitions"])) for device in devices]
    count = nvidia_device_nodes(root)  # how many they are is known also where nothing can be asked
    if probe.driver_fails or (not count and unreadable_gpu_possible(root)):
        return None
    return [Gpu()] * count


def _library_loads() -> bool:
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True
