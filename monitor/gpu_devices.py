"""Which GPUs has this machine, whether or not a framework sees them? Read from the device files, without any driver library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["GpuHardware", "nvidia_device_nodes", "nvidia_hardware", "unreadable_gpu_possible"]

_NVIDIA_VENDOR = "0x10de"
_OTHERS = ("dev/kfd", "dev/dri/renderD*", "dev/dxg")
"""Of AMD's driver, of any card that computes, and of Windows' Linux."""
_DISPLAY_CLASS = "0x03"  # PCI base class of display controllers; compute cards without a screen are in it too (0x0302)


@dataclass(frozen=True, slots=True)
class GpuHardware:
    """NVIDIA GPUs on the PCI bus, those of them that this process may open (``/dev/nvidia0`` …), and whether a driver is loaded."""

    on_bus: int
    device_nodes: int
    driver_loaded: bool


def nvidia_hardware(root: Path = Path("/")) -> GpuHardware:
    """Count below `root` what the kernel shows. A container sees the whole bus, but only the device nodes that it was given."""
    cards = [folder for folder in (root / "sys/bus/pci/devices").glob("*") if _is_gpu(folder)]
    return GpuHardware(len(cards), nvidia_device_nodes(root), (root / "proc/driver/nvidia/version").exists())


def nvidia_device_nodes(root: Path = Path("/")) -> int:
    """Count the NVIDIA GPUs that this process may open."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in (root / "dev").glob("nvidia*"))


def unreadable_gpu_possible(root: Path = Path("/")) -> bool:
    """Return whether a GPU may be there that shows no device file of NVIDIA's: another maker's, or one behind Windows."""
    return any(next(root.glob(pattern), None) is not None for pattern in _OTHERS)


def _is_gpu(folder: Path) -> bool:
    return _first_word(folder / "vendor") == _NVIDIA_VENDOR and _first_word(folder / "class").startswith(_DISPLAY_CLASS)


def _first_word(path: Path) -> str:
    """Read a one-word file of sysfs; a device that goes away meanwhile has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
