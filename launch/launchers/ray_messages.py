"""Messages between the driver and its child, the client of a Ray cluster (`ray_client.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ...engine.protocol.messages import MessageParser, WireMessage
from ...engine.protocol.node_messages import Code, FileName, Name, Number, Text


class RayRequest(WireMessage):
    """Request of the driver."""


class Place(RayRequest):
    """Request nodes: one per entry of `workers_by_node`, or a place on each node of the cluster."""

    address: Name
    workers_by_node: Sequence[int]
    threads: int | None
    device: Literal["auto", "cpu", "gpu"]
    whole_cluster: bool


class StartCommand(RayRequest, tag="start"):
    """Start a numbered command on a node, with a line of input; `tries` counts the starts."""

    node: Number
    number: Number
    command: Sequence[FileName]
    first_line: str
    tries: int = 1


class KillCommand(RayRequest, tag="kill"):
    """Kill a command."""

    node: Number
    number: Number


class RayEvent(WireMessage):
    """Message of the client."""


class Waiting(RayEvent):
    """What the cluster is waited for."""

    text: Text


class Placed(RayEvent):
    """The nodes are there; they reach this machine at `own_address`."""

    own_address: Name
    nodes: Number


class Failed(RayEvent):
    """Why Ray has failed."""

    text: Text


class CommandLine(RayEvent, tag="line"):
    """A line of a command's standard error."""

    number: Number
    value: Text


class CommandEnded(RayEvent, tag="ended"):
    """A command's exit code."""

    number: Number
    value: Code


class CommandsLost(RayEvent, tag="lost"):
    """Commands whose node is gone, and why."""

    numbers: Sequence[Number]
    text: Text


REQUESTS = MessageParser(RayRequest)
EVENTS = MessageParser(RayEvent)
