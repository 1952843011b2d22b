"""Checks of messages of nodes beyond the bounds of their types."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Collection, Mapping

from ...core.bounded_json import MAX_LINE_BYTES, MAX_VALUES
from . import task_messages as _task_messages  # noqa: F401 — declares the types that tasks send
from .messages import PROTOCOL, Alive, Message, MessageParser, ProtocolError, WireMessage
from .node_messages import Death, FromNode, Hello, OtherRelease, Sample, Stacks, TaskReport
from .state_transfer import StateBegin, StatePart

# Bytes and values recorded as they are: far below readers' limits, as more is added
_MAX_WRITTEN = {"sample": (MAX_LINE_BYTES // 2, MAX_VALUES // 4), "hello": (2**20, 50_000)}
_SPARE = re.compile(r"spare-[1-9][0-9]{0,8}")  # name in samples of a standby process
_NODE_MESSAGES = MessageParser(Alive, FromNode)


def read_node_message(node: int, message: Message, node_of: Mapping[str, int]) -> WireMessage:
    """Return a node's message; `node_of` maps tasks to nodes.

    Raises ProtocolError, with what is wrong with the message.
    """
    what = f"a message {message.kind[:100]!r}"
    if message.kind == "hello" and (protocol := message.protocol) not in (None, PROTOCOL):
        return OtherRelease(protocol)
    if (size := _too_large(message)) is not None:
        raise ProtocolError(f"{what} with {size}, which nobody could read again")
    parsed = _NODE_MESSAGES.parse(message)
    if any(node_of.get(name) != node for name in _tasks_of(parsed)):
        raise ProtocolError(f"{what} for a task that it does not have")
    if (wrong := _wrong_with_content(node, parsed)) is not None:
        raise ProtocolError(f"{what} {wrong}")
    return parsed


def _tasks_of(message: WireMessage) -> Collection[str]:
    if isinstance(message, TaskReport | Death):
        return (message.task,)
    if isinstance(message, Sample):
        of_gpus = [name for gpu in message.record.gpus or () for name in gpu.get("tasks", ())]
        return [*(sampled.task for sampled in message.record.tasks if not _SPARE.fullmatch(sampled.task)), *of_gpus]
    return message.stacks if isinstance(message, Stacks) else ()


def _wrong_with_content(node: int, message: WireMessage) -> str | None:
    if isinstance(message, Hello) and message.node != node:
        return f"of node {message.node}"
    if isinstance(message, Hello) and message.address is not None and not is_address(message.address):
        return f"from {message.address[:100]!r}, which is no address"
    if isinstance(message, StateBegin) and len(message.addresses) != len(message.entries):
        return f"with {len(message.addresses)} addresses of {len(message.entries)} arrays"
    if isinstance(message, StatePart) and not message.arrays["data"].data:
        return "of 0 bytes"
    return None


def _too_large(message: Message) -> str | None:
    if message.kind not in _MAX_WRITTEN:
        return None
    line = message.line
    written = len(line) if line.isascii() else len(json.dumps(line.decode(errors="replace")))  # records are written in ASCII
    values = line.count(b",") + line.count(b"[") + line.count(b"{")
    most_bytes, most_values = _MAX_WRITTEN[message.kind]
    return f"{written:,} bytes in {values:,} values" if written > most_bytes or values > most_values else None


def is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
