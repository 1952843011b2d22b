"""What a node may say to the driver: which fields each kind of message has, and of whose tasks a node may speak.

A node may be broken or hostile, and no message of it may bring the driver down, or speak for the tasks of another node.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from ..engine.messages import Message, RawArray

__all__ = ["wrong_with"]

_NUMBER = (int, float)

_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "hello": {"protocol": int, "identity": object, "host": dict, "scratch": str},
    "ports": {"ports": list},
    "ready": {},
    "sample": {"record": dict},
    "states": {"states": dict},
    "log": {},  # names of files are checked where these are written
    "trace": {},
    "phase": {"name": str},
    "error": {"type": str, "message": str, "errno": (int, NoneType), "exit_code": (int, NoneType)},
    "death": {
        "task": str, "pid": int, "code": (int, NoneType), "signal": (str, NoneType), "order": int,
        "cpu_seconds": _NUMBER, "max_rss_bytes": int, "tail": list,
    },
}  # fmt: skip
"""The kinds that the driver reads itself; others are answers of leading tasks."""

_BYTES = {"log": "text", "trace": "data"}
"""The array of bytes that a kind has."""

_OF_AGENTS = ("hello", "ports", "sample", "sampled", "states", "stopped", "log", "trace", "death")
"""Kinds that agents send; all others come from a task and say from which."""


def wrong_with(node: int, message: Message, node_of: Mapping[str, int]) -> str | None:
    """Return what is wrong with a message of a node, or None; `node_of` says on which node each task is."""
    for name, kinds in _FIELDS.get(message.kind, {}).items():
        if name not in message.fields or not isinstance(message.fields[name], kinds):
            return f"a message {message.kind!r} whose field {name!r} is missing or of another type"
    if message.kind in _BYTES:
        array = message.arrays.get(_BYTES[message.kind])
        if not isinstance(array, RawArray) or array.dtype != "|u1" or list(array.shape) != [len(array.data)]:
            return f"a message {message.kind!r} without its bytes"
    spoken_for = "task" if message.kind == "death" else None if message.kind in _OF_AGENTS else "from"
    if spoken_for is not None:
        task = message.get(spoken_for)
        if not isinstance(task, str) or node_of.get(task) != node:
            return f"a message {message.kind!r} for a task that it does not have"
    return None
