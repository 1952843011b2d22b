"""How the chief and workers join a parameter server: as `exchange.authentication` has it, with a hello of their own."""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

from ...core.untrusted.listener import Exchange
from ..authentication import admit_client
from ..authentication import connect as open_connection
from .wire_protocol import Connection

__all__ = ["PROTOCOL", "Hello", "admit", "connect"]

PROTOCOL = 2
_MAGIC = b"ctps"
_LAYOUT = struct.Struct("<4sHBxIQ")
_ROLES: tuple[Literal["chief", "worker"], ...] = ("chief", "worker")


class Hello(NamedTuple):
    """Who connects (role and index within it), and the size of the shard (in elements) that it expects to find."""

    role: Literal["chief", "worker"]
    place: int
    elements: int

    def packed(self) -> bytes:
        """Return it as bytes."""
        return _LAYOUT.pack(_MAGIC, PROTOCOL, _ROLES.index(self.role), self.place, self.elements)

    @classmethod
    def read(cls, data: bytes) -> Hello:
        """Read what `packed` wrote. Raises ConnectionError for another protocol's."""
        magic, protocol, role, place, elements = _LAYOUT.unpack(data)
        if magic != _MAGIC or protocol != PROTOCOL or role >= len(_ROLES):
            raise ConnectionError(f"it does not speak protocol {PROTOCOL} of the parameter server")
        return cls(_ROLES[role], place, elements)


def admit(exchange: Exchange, secret: str, elements: int) -> Hello:
    """Check a client, of which no more than 84 bytes are read. Raises OSError, with the reason, where it must not join."""

    def check(hello: Hello) -> None:
        if hello.elements != elements:
            raise ConnectionError(f"it expects a shard of {hello.elements} elements, this one has {elements}")

    return admit_client(exchange, secret, _LAYOUT.size, Hello.read, check)


def connect(endpoint: tuple[str, int], secret: str, hello: Hello, deadline: float) -> Connection:
    """Connect to a shard and greet it, until `deadline` (of time.monotonic).

    Raises RunFailedError where no shard lets us in in time, or it refuses for good.
    """
    return Connection(open_connection(endpoint, secret, hello.packed(), deadline, "the parameter server"))
