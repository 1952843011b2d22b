"""The errors of this room: what this machine lacks for virtual nodes, and that they have been lost."""

from __future__ import annotations

from typing import Literal

from ...core.errors import RunFailedError, UsageError

__all__ = ["MissingCapabilityError", "NetworkLostError", "VirtualNodeCapability"]

VirtualNodeCapability = Literal["namespaces", "bandwidth", "cpu_quota"]


class NetworkLostError(RunFailedError):
    """What holds the virtual network has ended, and with it all nodes; another network can be made in its place."""


class MissingCapabilityError(UsageError):
    """The machine cannot do what was asked: which capability is lacking, why (no full stop), and what the user can do about it."""

    def __init__(self, capability: VirtualNodeCapability, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}. {remedy}")
        self.capability: VirtualNodeCapability = capability
        self.reason = reason
        self.remedy = remedy
