"""What the node's NVIDIA GPUs do, through nvidia-ml-py (module ``pynvml``) where it and a driver are there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["GpuProbe"]

# The driver's control device on Linux, and its stand-in under WSL 2. Without either there is no GPU to observe.
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")


class GpuProbe:
    """Reads every NVIDIA device of the host. Never raises: `problem` says once why a present GPU cannot be observed."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._nvml: Any = None
        self._handles: list[Any] = []
        if any(os.path.exists(path) for path in _DEVICES):
            self._open()

    def read(self) -> tuple[Mapping[str, Any], ...] | None:
        """Return a mapping a device: ``name``, ``utilization`` (0 to 1), ``memory_bytes``, ``memory_total_bytes``, ``power_watts``.

        Null for what a device does not tell; None where there is no device or none can be read.
        """
        if not self._handles:
            return None
        return tuple(self._read_device(handle) for handle in self._handles)

    def close(self) -> None:
        """Let the driver go; afterwards `read` returns None."""
        self._handles = []
        if self._nvml is not None:
            nvml, self._nvml = self._nvml, None
            self._ask(nvml, nvml.nvmlShutdown)

    def _open(self) -> None:
        try:
            import pynvml
        except ImportError:
            self.problem = "an NVIDIA driver is here, but its figures need the package nvidia-ml-py: pip install nvidia-ml-py"
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.problem = f"the NVIDIA driver does not answer: {error}"
            return
        self._nvml = pynvml
        count = self._ask(pynvml, pynvml.nvmlDeviceGetCount) or 0
        handles = [self._ask(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        self._handles = [handle for handle in handles if handle is not None]

    def _read_device(self, handle: Any) -> dict[str, Any]:
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
        }

    def _ask(self, nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
        """Return the driver's answer, or None where it refuses (a partitioned or a virtual device does not tell everything)."""
        try:
            return question(*arguments)
        except nvml.NVMLError as error:
            self.problem = f"{question.__name__}: {error}"
            return None
