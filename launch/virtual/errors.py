"""What this machine lacks for virtual nodes: the one error that the parts below `virtual_nodes` raise."""

from __future__ import annotations

from typing import Literal

from ...core.errors import UsageError

__all__ = ["MissingCapabilityError", "Part"]

Part = Literal["namespaces", "bandwidth", "cpu_quota"]


class MissingCapabilityError(UsageError):
    """The machine cannot do what was asked: which part of the virtual nodes, why (no full stop), and what the user can do about it."""

    def __init__(self, part: Part, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}. {remedy}")
        self.part: Part = part
        self.reason = reason
        self.remedy = remedy
