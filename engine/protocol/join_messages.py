"""Messages of processes that connect to the driver, and its answers.

Other releases read them, too, so unknown fields are ignored.
"""

from __future__ import annotations

from typing import Any

from .messages import ProtocolNumber, WireMessage
from .node_messages import Code, Duration, Name


class JoinRequest(WireMessage, tag="join", forbid_unknown_fields=False):
    """A process that was started elsewhere, with the settings that all processes share."""

    node: Code
    local_rank: Code
    asked: dict[Name, Any]
    protocol: ProtocolNumber | None = None


class CommandJoin(WireMessage, tag="join", forbid_unknown_fields=False):
    """A command that the driver had started on a node of a cluster, by its number."""

    number: Code
    protocol: ProtocolNumber | None = None


class Welcome(WireMessage, forbid_unknown_fields=False):
    """The process takes part."""

    node_timeout_seconds: Duration
    protocol: ProtocolNumber | None = None


class Refused(WireMessage, forbid_unknown_fields=False):
    """The process does not take part; `for_now`: a restarted process may try again."""

    reason: str
    for_now: bool = False
