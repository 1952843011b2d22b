"""The transport of agents that dial back: they prove that they know the run's secret, and say who they are.

The other transport is an agent's standard input and output (`engine.protocol.transport`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from ...core.untrusted.listener import Exchange
from ...engine.protocol.messages import Message, Stream
from ...engine.protocol.transport import accept

__all__ = ["Joiner", "prove", "refuse"]


class Joiner(NamedTuple):
    """A process that knows the secret, and its first message."""

    stream: Stream
    message: Message


def prove(exchange: Exchange, secret: bytes, well_formed: Callable[[Message], bool]) -> Joiner:
    """Return who joins, if it knows the secret; what it says of itself belongs to the proof's time.

    `well_formed` says whether that is what a process of this run would say. Raises OSError otherwise.
    """
    stream = accept(exchange, secret)
    try:
        message = stream.receive()
        if message is None or message.kind != "join" or not well_formed(message):
            raise ConnectionError("it knows the secret, but did not ask to join; is it another version of trainer?")
    except OSError:
        stream.close()
        raise
    return Joiner(stream, message)


def refuse(joiner: Joiner, reason: str) -> None:
    """Turn a process away that knows the secret, and tell it why."""
    with contextlib.suppress(OSError):  # it has gone by itself
        joiner.stream.send(Message("refused", {"reason": reason}))
    joiner.stream.close()
