"""An agent's part of finding out which nodes reach each other: it listens for the others, and tries to reach them.

A connection needs both directions, so a failed one does not say which of them is dead. Datagrams do: each node says whose it has heard.
Both go to the same port of a node. Only addresses of the run's own nodes are tried, which the agent knows from the cluster of its tasks.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ...core.errors import RunFailedError
from ...engine.protocol.messages import MOST_PEERS_PROBED

__all__ = ["PROBE_SECONDS", "PeerProbe"]

PROBE_SECONDS = 2.5
"""How long the others are tried at most; where all answer, a few milliseconds."""

MOST_DATAGRAM_BYTES, MOST_DATAGRAMS = 64, 1000
"""Of strangers more may arrive; no more are read between two of one's own."""

DATAGRAM_SECONDS = 0.1
"""How often each of the others is sent a datagram."""


class PeerProbe:
    """Listens at this node's own of the run's `addresses`, which are in node order, and probes others. For one thread at a time."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._port: int | None = None
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self.addresses: Sequence[str] = ()

    def listen(self, take: Callable[[int], Sequence[int]]) -> int | None:
        """Listen until `close`; return the port, one that `take` gives, and later the same; None where that cannot be done.

        A node that is known by a name takes no part: looking a name up may take long just when a network is down.
        """
        self.close()
        try:
            if self._port is None:
                (self._port,) = take(1)
            known = socket.getaddrinfo(self.addresses[self._node], self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            family, _, _, _, where = known[0]
            listener = socket.create_server(where[:2], family=family, backlog=2 * MOST_PEERS_PROBED)
            datagrams = socket.socket(family, socket.SOCK_DGRAM)
            self._sockets = listener, datagrams
            datagrams.bind(where)
        except (OSError, IndexError, RunFailedError):
            self.close()
            return None
        return self._port

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        sockets, self._sockets = self._sockets, None
        for each in sockets or ():
            each.close()

    def run(self, ports: Mapping[int, int], token: bytes) -> dict[str, Any]:
        """Try to reach nodes at these ports; return which were ``reached``, and of which a datagram with `token` was ``heard``.

        Stops listening at the end. What answers that nobody listens there was reached.
        """
        known = [node for node in ports if node != self._node and 0 <= node < len(self.addresses)][:MOST_PEERS_PROBED]
        peers = {node: (self.addresses[node], ports[node]) for node in known}
        if self._sockets is None or not peers:
            return {"reached": [], "heard": []}
        deadline = time.monotonic() + PROBE_SECONDS
        try:
            with ThreadPoolExecutor(len(peers)) as pool:
                tried = {node: pool.submit(_reaches, peer, deadline) for node, peer in peers.items()}
                heard = self._exchange(peers, token, deadline, lambda: all(each.done() and each.result() for each in tried.values()))
            return {"reached": [node for node, each in tried.items() if each.result()], "heard": sorted(heard)}
        finally:
            self.close()

    def _exchange(self, peers: Mapping[int, tuple[str, int]], token: bytes, deadline: float, over: Callable[[], bool]) -> set[int]:
        """Send the others datagrams until the deadline or until `over`; return whose have arrived."""
        assert self._sockets is not None
        datagrams = self._sockets[1]
        own = token + self._node.to_bytes(4, "big")
        expected = {token + node.to_bytes(4, "big"): node for node in peers}
        heard: set[int] = set()
        while (now := time.monotonic()) < deadline and not over():
            for peer in peers.values():
                with suppress(OSError):  # there is no way to it, which its own answer shows
                    datagrams.sendto(own, socket.MSG_DONTWAIT, peer)
            _hear(datagrams, expected, heard, now + DATAGRAM_SECONDS)
        _hear(datagrams, expected, heard, 0.0)
        return heard


def _hear(datagrams: socket.socket, expected: Mapping[bytes, int], heard: set[int], until: float) -> None:
    """Take in which nodes have sent a datagram, until a moment; what has arrived by then is taken in all the same."""
    for _ in range(MOST_DATAGRAMS):
        if not select.select([datagrams], [], [], max(0.0, until - time.monotonic()))[0]:
            return
        with suppress(OSError):  # an earlier one was refused
            if (node := expected.get(datagrams.recv(MOST_DATAGRAM_BYTES))) is not None:
                heard.add(node)


def _reaches(peer: tuple[str, int], deadline: float) -> bool:
    """Return whether something at this address answers before the deadline."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection(peer, timeout=left).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            time.sleep(min(DATAGRAM_SECONDS, max(0.0, deadline - time.monotonic())))
            continue
        return True
    return False
