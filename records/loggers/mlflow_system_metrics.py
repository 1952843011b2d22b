"""A node's resource samples under the names of MLflow's own monitor (the package ``mlflow.system_metrics``), and in its units."""

from __future__ import annotations

from ..schema import SystemRecord
from ..summary.node_usage import Counter
from .curve_points import Spacing

__all__ = ["NodeFigures"]

FIRST_SPACING_SECONDS = 1.0
"""Distance of the points at first; MLflow's monitor makes one every 10 s."""


class NodeFigures:
    """A node's samples as points under MLflow's names. Traffic counts from the first sample of training, over all segments of the run."""

    def __init__(self) -> None:
        """`told` counts the points."""
        self.told = 0
        self._segment: float | None = None
        self._traffic = {name: Counter() for name in ("network_sent_bytes", "network_received_bytes")}
        self._spacing = Spacing(FIRST_SPACING_SECONDS)
        self._since: float | None = None

    def values(self, record: SystemRecord) -> dict[str, float] | None:
        """Return what to tell of a sample, or None where it shows initialisation, or the last one told is too near."""
        self._count(record)
        if record.initialising:
            return None
        now = record.time_seconds
        if self._since is not None and not self._spacing.over(self._since, now):
            return None
        self._since = now
        self._spacing.count()
        self.told += 1
        known = {
            "cpu_utilization_percentage": _scaled(record.cpu_fraction, 100),
            "system_memory_usage_megabytes": _scaled(record.memory_rss_bytes, 1e-6),
            "network_transmit_megabytes": self._megabytes(record, "network_sent_bytes"),
            "network_receive_megabytes": self._megabytes(record, "network_received_bytes"),
        }
        for number, gpu in enumerate(record.gpus or ()):
            known[f"gpu_{number}_utilization_percentage"] = _scaled(gpu.get("utilization"), 100)
            known[f"gpu_{number}_memory_usage_megabytes"] = _scaled(gpu.get("memory_bytes"), 1e-6)
            known[f"gpu_{number}_power_usage_watts"] = gpu.get("power_watts")
        return {name: value for name, value in known.items() if value is not None}

    def _count(self, record: SystemRecord) -> None:
        """Add up the traffic: from the first sample of training on, and in a later segment from the last one before its clock started."""
        if record.initialising or record.part_began_seconds != self._segment:
            for counter in self._traffic.values():
                counter.reset()
        self._segment = record.part_began_seconds
        if self.told or not record.initialising:
            for name, counter in self._traffic.items():
                counter.add(getattr(record, name), record.time_seconds)

    def _megabytes(self, record: SystemRecord, name: str) -> float | None:
        return None if getattr(record, name) is None else (self._traffic[name].increase or 0.0) * 1e-6


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
