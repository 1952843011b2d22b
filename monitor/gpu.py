"""NVIDIA GPUs of a node, through nvidia-ml-py (module ``pynvml``) and a driver if present."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .processes import read_lines

if TYPE_CHECKING:
    from ..records.store.schema import GpuSample

# CUDA reads CUDA_VISIBLE_DEVICES (index, UUID or MIG name) up to the first unknown device, and takes a list with a duplicate as empty.
_NUMBER = re.compile(r"[ \t]*([+-]?[0-9]+)")
_GPU, _PARTITION = "GPU-", "MIG-"
_MAX_INDEX = 9  # digits: Python refuses numbers of thousands


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU of the driver; `uuid` may be unknown, `partitions` are UUIDs of MIG devices."""

    uuid: str | None = None
    partitions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """Usable device: its ``CUDA_VISIBLE_DEVICES``, known `uuid`, and number in PCI order."""

    visible_as: str
    uuid: str | None
    gpu: int | None


def visible_gpus(gpus: Sequence[Gpu], variable: str | None, *, in_pci_order: bool = True) -> list[VisibleGpu]:
    """Return the devices of `variable` in its order, all without it.

    Unless `in_pci_order`, its indices name unknown devices.
    """
    if variable is None:
        devices = list(_all(gpus))
    elif variable.startswith((_GPU, _PARTITION)):
        devices = list(_by_uuid(gpus, variable.split(","), _GPU if variable.startswith(_GPU) else _PARTITION))
    else:
        devices = list(_by_index(gpus, variable.split(",")))
    if in_pci_order:
        return devices
    return [VisibleGpu(device.visible_as, None, None) if device.visible_as.isdigit() else device for device in devices]


def _all(gpus: Sequence[Gpu]) -> Iterator[VisibleGpu]:
    for number, gpu in enumerate(gpus):
        if gpu.partitions:
            yield from (VisibleGpu(uuid, uuid, number) for uuid in gpu.partitions)
        else:
            yield VisibleGpu(str(number), gpu.uuid, number)


def _by_index(gpus: Sequence[Gpu], entries: Sequence[str]) -> Iterator[VisibleGpu]:
    """Read entries as C's strtoul, ignoring space before and text after a number."""
    numbers: list[str] = []
    for entry in entries:
        number = _index(entry)
        if number is None:
            break
        if number in numbers:
            return
        numbers.append(number)
    for number in numbers:
        if len(number) > _MAX_INDEX or int(number) >= len(gpus):
            return
        yield VisibleGpu(number, gpus[int(number)].uuid, int(number))


def _index(entry: str) -> str | None:
    match = _NUMBER.match(entry)
    if match is None or match[1].startswith("-"):
        return None
    return match[1].lstrip("+0") or "0"


def _by_uuid(gpus: Sequence[Gpu], entries: Sequence[str], prefix: str) -> Iterator[VisibleGpu]:
    devices: list[VisibleGpu] = []
    seen: set[str] = set()
    for entry in entries:
        if entry in seen:
            return
        if not entry.startswith(prefix):
            break
        seen.add(entry)
    for entry in entries[: len(seen)]:
        device = _gpu(gpus, entry) if prefix == _GPU else _partition(gpus, entry)
        if device is None:
            break
        if device in devices:
            return
        devices.append(device)
    yield from devices


def _gpu(gpus: Sequence[Gpu], entry: str) -> VisibleGpu | None:
    """Return the GPU whose UUID starts with an entry; trust the entry if no UUIDs are known."""
    if not any(gpu.uuid for gpu in gpus):
        return VisibleGpu(entry, None, None) if gpus else None
    return _only([VisibleGpu(gpu.uuid, gpu.uuid, number) for number, gpu in enumerate(gpus) if gpu.uuid and gpu.uuid.startswith(entry)])


def _partition(gpus: Sequence[Gpu], entry: str) -> VisibleGpu | None:
    """Return the partition by its UUID's start, or by older drivers' ``MIG-GPU-…/1/0``."""
    if entry.startswith(f"{_PARTITION}{_GPU}"):
        owner = entry.removeprefix(_PARTITION).partition("/")[0]
        return _only([VisibleGpu(entry, entry, number) for number, gpu in enumerate(gpus) if gpu.uuid in (owner, None)][:1])
    if not any(gpu.uuid for gpu in gpus):
        return VisibleGpu(entry, entry, None) if gpus else None
    known = [VisibleGpu(uuid, uuid, number) for number, gpu in enumerate(gpus) for uuid in gpu.partitions]
    return _only([device for device in known if device.visible_as.startswith(entry)])


def _only(candidates: Sequence[VisibleGpu]) -> VisibleGpu | None:
    return candidates[0] if len(candidates) == 1 else None


_NVIDIA_VENDOR = "0x10de"
_OTHERS = ("dev/kfd", "dev/dri/renderD*", "dev/dxg")  # AMD's driver, any compute device, and WSL
_DISPLAY_CLASS = "0x03"  # PCI base class of display controllers and compute cards (0x0302)


@dataclass(frozen=True, slots=True)
class GpuHardware:
    """NVIDIA GPUs on the PCI bus, usable ones (``/dev/nvidia0`` …), and a driver if loaded."""

    on_bus: int
    device_nodes: int
    driver_loaded: bool


def nvidia_hardware(root: Path = Path("/")) -> GpuHardware:
    """Count the hardware below `root`.

    Containers see the whole bus, but only their device nodes.
    """
    cards = [folder for folder in (root / "sys/bus/pci/devices").glob("*") if _is_gpu(folder)]
    return GpuHardware(len(cards), nvidia_device_nodes(root), (root / "proc/driver/nvidia/version").exists())


def nvidia_device_nodes(root: Path = Path("/")) -> int:
    """Count the NVIDIA GPUs that this process may open."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in (root / "dev").glob("nvidia*"))


def unreadable_gpu_possible(root: Path = Path("/")) -> bool:
    """Return whether a GPU without NVIDIA's device file may exist.

    That is another maker's, or one under WSL.
    """
    return any(next(root.glob(pattern), None) is not None for pattern in _OTHERS)


def _is_gpu(folder: Path) -> bool:
    return _first_word(folder / "vendor") == _NVIDIA_VENDOR and _first_word(folder / "class").startswith(_DISPLAY_CLASS)


def _first_word(path: Path) -> str:
    return "".join(read_lines(path)[:1]).strip()


# The driver's control device (Linux, WSL 2) or library: without any of them no GPU is observable.
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
_LIBRARY = "libnvidia-ml.so.1"
_MAX_PARTITIONS = 64  # of a GPU; existing ones have seven at most


class GpuProbe:
    """Probe of the host's NVIDIA devices and their tasks.

    Never raises: `problem` has the reason.
    """

    def __init__(self, gpu_of_task: Mapping[str, int] | None = None) -> None:
        self._gpu_of_task = gpu_of_task or {}
        self.problem: str | None = None
        self.driver_fails = False
        self._nvml: Any = None
        self._handles: list[Any] = []
        if (driver_exists := any(os.path.exists(path) for path in _DEVICES)) or _library_loads():
            self._open(driver_there=driver_exists)

    def read(self) -> tuple[GpuSample, ...] | None:
        """Return a sample of each device; None without a readable one."""
        return tuple(self._read_device(number, handle) for number, handle in enumerate(self._handles)) or None

    def describe(self) -> list[dict[str, Any]] | None:
        """Return the description of each device, or None.

        Its keys are ``name``, ``memory_total_bytes``, ``uuid`` and ``partitions`` (MIG UUIDs).
        """
        return [self._describe_device(handle) for handle in self._handles] or None

    def driver_version(self) -> str | None:
        """Return the driver's release, None without an answer."""
        return None if self._nvml is None else self._ask("nvmlSystemGetDriverVersion")

    def close(self) -> None:
        """Release the driver; `read` then returns None."""
        self._handles = []
        if self._nvml is not None:
            self._ask("nvmlShutdown")
            self._nvml = None

    def _open(self, *, driver_there: bool) -> None:
        """Query the driver's devices.

        A library without a driver is no problem, as container images may have it.
        """
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
        count = self._ask("nvmlDeviceGetCount") or 0
        handles = [self._ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
        self._handles = [handle for handle in handles if handle is not None]

    def _read_device(self, number: int, handle: Any) -> GpuSample:
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        return {
            "name": self._ask("nvmlDeviceGetName", handle),
            "utilization": None if rates is None else rates.gpu / 100,
            "memory_bytes": None if memory is None else int(memory.used),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "power_watts": None if milliwatts is None else milliwatts / 1000,
            "tasks": [task for task, gpu in self._gpu_of_task.items() if gpu == number],
        }

    def _describe_device(self, handle: Any) -> dict[str, Any]:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return {
            "name": self._ask("nvmlDeviceGetName", handle),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "uuid": self._ask("nvmlDeviceGetUUID", handle),
            "partitions": self._partitions(handle),
        }

    def _partitions(self, handle: Any) -> list[str]:
        """Return a device's partition UUIDs, which most devices and older drivers do not support."""
        nvml, uuids = self._nvml, []
        try:
            if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                return []
            most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except nvml.NVMLError:
            return []
        for number in range(min(most, _MAX_PARTITIONS)):
            try:
                uuids.append(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
            except nvml.NVMLError_NotFound:
                continue
            except nvml.NVMLError as error:
                self.problem = f"MIG device {number}: {error}"
        return uuids

    def _ask(self, question: str, *arguments: Any) -> Any:
        """Return the driver's answer, or None where unsupported, as for virtual devices."""
        try:
            return getattr(self._nvml, question)(*arguments)
        except self._nvml.NVMLError as error:
            self.problem = f"{question}: {error}"
            return None


def describe_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, Any]:
    """Return the GPUs of a node, and those usable by a process with this `environment`.

    ``gpus``: ``name``, ``memory_total_bytes`` and ``uuid`` of each, or None; ``gpu_driver``: its release; ``gpu_problem``: why GPUs are
    unreadable; ``visible_gpus``: fields of `VisibleGpu` in order, None if unknown, as for other makers.
    """
    probe = GpuProbe()
    try:
        devices, driver = probe.describe(), probe.driver_version()
    finally:
        probe.close()
    in_pci_order = environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID") == "PCI_BUS_ID"
    usable = _usable(probe, devices, root)
    visible = None if usable is None else visible_gpus(usable, environment.get("CUDA_VISIBLE_DEVICES"), in_pci_order=in_pci_order)
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
    count = nvidia_device_nodes(root)  # known also without a driver's answer
    if probe.driver_fails or (not count and unreadable_gpu_possible(root)):
        return None
    return [Gpu()] * count


def _library_loads() -> bool:
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True
