"""Which GPUs has this machine, whether or not a framework sees them? Read from the device files, without any driver library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["GpuHardware", "nvidia_hardware"]

_NVIDIA_VENDOR = "0x10de"
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
    nodes = [path for path in (root / "dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    return GpuHardware(len(cards), len(nodes), (root / "proc/driver/nvidia/version").exists())


def _is_gpu(folder: Path) -> bool:
    return _first_word(folder / "vendor") == _NVIDIA_VENDOR and _first_word(folder / "class").startswith(_DISPLAY_CLASS)


def _first_word(path: Path) -> str:
    """Read a one-word file of sysfs; a device that goes away meanwhile has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
