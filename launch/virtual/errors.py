"""The error of this room: what this machine lacks for virtual nodes."""

from __future__ import annotations

from typing import Literal

from ...core.errors import UsageError

__all__ = ["MissingCapabilityError", "VirtualNodeCapability"]

VirtualNodeCapability = Literal["namespaces", "bandwidth", "cpu_quota"]


class MissingCapabilityError(UsageError):
    """The machine cannot do what was asked: which capability is lacking, why (no full stop), and what the user can do about it."""

    def __init__(self, capability: VirtualNodeCapability, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}. {remedy}")
        self.capability: VirtualNodeCapability = capability
        self.reason = reason
        self.remedy = remedy
