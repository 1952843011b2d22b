"""Link probes between nodes: agents try each other, and the driver compares the results.

A failed connection does not show which direction is dead, so datagrams are sent to the same port.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from time import monotonic
from typing import Any

from ...core.errors import RunFailedError
from ...engine.protocol.messages import MAX_PEERS_PROBED, WireMessage
from ...engine.protocol.node_messages import OpenProbe, PeersProbed, ProbePeers, ProbePort

PROBE_SECONDS = 2.5  # time limit of a probe; if all answer, it takes a few milliseconds
MAX_DATAGRAM_BYTES, MAX_DATAGRAMS = 64, 1000  # limits of reading between two sends, as anybody can send more
DATAGRAM_SECONDS = 0.1  # interval of the datagrams to each peer


class PeerProbe:
    """Listens at this node's entry of `addresses`, and probes others. For one thread at a time."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._port: int | None = None
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self.addresses: Sequence[str] = ()

    def listen(self, take: Callable[[int], Sequence[int]]) -> int | None:
        """Listen until `close`; return the port; None on failure and for names (slow look-ups)."""
        self.close()
        try:
            if self._port is None:
                (self._port,) = take(1)
            resolved = socket.getaddrinfo(self.addresses[self._node], self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            family, _, _, _, address = resolved[0]
            listener = socket.create_server(address[:2], family=family, backlog=2 * MAX_PEERS_PROBED)
            datagrams = socket.socket(family, socket.SOCK_DGRAM)
            self._sockets = listener, datagrams
            datagrams.bind(address)
        except (OSError, IndexError, RunFailedError):
            self.close()
            return None
        return self._port

    def close(self) -> None:
        """Stop listening; idempotent."""
        sockets, self._sockets = self._sockets, None
        for opened in sockets or ():
            opened.close()

    def run(self, ports: Mapping[int, int], token: bytes) -> dict[str, Any]:
        """Try nodes; return those ``reached``, also if refused, and ``heard`` with `token`."""
        known = [node for node in ports if node != self._node and 0 <= node < len(self.addresses)][:MAX_PEERS_PROBED]
        peers = {node: (self.addresses[node], ports[node]) for node in known}
        if self._sockets is None or not peers:
            return {"reached": [], "heard": []}
        deadline = time.monotonic() + PROBE_SECONDS
        try:
            with ThreadPoolExecutor(len(peers)) as pool:
                tried = {node: pool.submit(_reaches, peer, deadline) for node, peer in peers.items()}
                heard = self._exchange(peers, token, deadline, lambda: all(trial.done() and trial.result() for trial in tried.values()))
            return {"reached": [node for node, trial in tried.items() if trial.result()], "heard": sorted(heard)}
        finally:
            self.close()

    def _exchange(self, peers: Mapping[int, tuple[str, int]], token: bytes, deadline: float, over: Callable[[], bool]) -> set[int]:
        assert self._sockets is not None
        datagrams = self._sockets[1]
        datagram = token + self._node.to_bytes(4, "big")
        expected = {token + node.to_bytes(4, "big"): node for node in peers}
        heard: set[int] = set()
        while (now := time.monotonic()) < deadline and not over():
            for peer in peers.values():
                with suppress(OSError):  # unreachable, which its own answer shows
                    datagrams.sendto(datagram, socket.MSG_DONTWAIT, peer)
            heard |= _senders(datagrams, expected, now + DATAGRAM_SECONDS)
        return heard | _senders(datagrams, expected, 0.0)


def _senders(datagrams: socket.socket, expected: Mapping[bytes, int], until: float) -> set[int]:
    senders = set()
    for _ in range(MAX_DATAGRAMS):
        if not select.select([datagrams], [], [], max(0.0, until - time.monotonic()))[0]:
            break
        with suppress(OSError):  # an earlier one was refused
            if (node := expected.get(datagrams.recv(MAX_DATAGRAM_BYTES))) is not None:
                senders.add(node)
    return senders


def _reaches(peer: tuple[str, int], deadline: float) -> bool:
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection(peer, timeout=left).close()
            return True
        except ConnectionRefusedError:
            return True
        except OSError:
            time.sleep(min(DATAGRAM_SECONDS, max(0.0, deadline - time.monotonic())))
    return False


MAX_PAIRS_NAMED = 4


@dataclass(frozen=True, slots=True)
class Found:
    """A node's probe: the peers `tried`, `reached` by a connection, and `heard` by datagrams."""

    tried: Collection[int]
    reached: Collection[int]
    heard: Collection[int]


@dataclass(frozen=True, slots=True)
class CutOff:
    """The node to blame, and the text about it."""

    node: int
    described: str


def cut_off(probes: Mapping[int, Found], name: Callable[[int], str]) -> CutOff | None:
    """Return the node that is cut off; None if all nodes that answered reach each other.

    A pair fails if neither node connects to the other and datagrams do not arrive both ways: a full link may delay connections, and a
    firewall may block either. The node to blame is in all failing pairs; if there is not exactly one, it is the last of those in most
    pairs, and the pairs are named.
    """
    lost: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for pair in combinations(sorted(probes), 2):
        ways = (pair, pair[::-1])
        if all(to in probes[sender].tried and to not in probes[sender].reached for sender, to in ways):
            dead = {(sender, to) for sender, to in ways if sender not in probes[to].heard}
            if dead:
                lost[pair] = dead
    if not lost:
        return None
    pairs = Counter(node for pair in lost for node in pair)
    node = max(pairs, key=lambda node: (pairs[node], node))
    if [candidate for candidate in pairs if pairs[candidate] == len(lost)] == [node]:
        *most, last = (name(peer) for peer in sorted(pairs) if peer != node)
        peers = f"{', '.join(most)} and {last}" if most else last
        return CutOff(node, f"{name(node)} is cut off from {peers}{_direction(node, set().union(*lost.values()), len(lost))}")
    texts = [f"{name(first)} and {name(second)} do not reach each other{_way(dead)}" for (first, second), dead in lost.items()]
    more = f"; and {len(texts) - MAX_PAIRS_NAMED} more pairs" if len(texts) > MAX_PAIRS_NAMED else ""
    return CutOff(node, "; ".join(texts[:MAX_PAIRS_NAMED]) + more)


def _direction(node: int, dead: Collection[tuple[int, int]], peers: int) -> str:
    if len(dead) == peers and all(to == node for _, to in dead):
        return f": nothing that they send arrives at node {node}"
    if len(dead) == peers and all(sender == node for sender, _ in dead):
        return f": nothing that node {node} sends arrives there"
    return ""


def _way(dead: Collection[tuple[int, int]]) -> str:
    if len(dead) != 1:
        return ""
    ((sender, to),) = dead
    return f": nothing that node {sender} sends arrives at node {to}"


LISTEN_SECONDS = 1.0  # time limit for an agent to listen; a slower one is ignored
ANSWER_SECONDS = PROBE_SECONDS + 1.0


class LinkInquiry:
    """Has nodes listen, then try each other; `request` gets node, message and the answer's kind."""

    def __init__(self, request: Callable[[int, WireMessage, str], None]) -> None:
        self._request = request
        self._number = secrets.randbelow(2**31)  # distinguishes the answers of other attempts
        self._pending: set[int] = set()
        self._ports: dict[int, int] = {}
        self._tried: dict[int, list[int]] = {}
        self._found: dict[int, Found] = {}
        self._deadline: float | None = None
        self.ended_at = 0.0

    @property
    def under_way(self) -> bool:
        """Whether answers are pending or not fetched yet."""
        return self._deadline is not None

    def begin(self, nodes: Collection[int]) -> None:
        """Ask these nodes, unless an inquiry is under way."""
        if self.under_way or len(nodes) < 2:
            return
        self._number += 1
        self._pending, self._deadline = set(nodes), monotonic() + LISTEN_SECONDS
        self._ports, self._tried, self._found = {}, {}, {}
        for node in nodes:
            self._request(node, OpenProbe(self._number), "probe_port")

    def add_answer(self, node: int, answer: ProbePort | PeersProbed) -> None:
        """Take a node's answer; ignore it if too late."""
        if answer.number != self._number or node not in self._pending:
            return
        if isinstance(answer, ProbePort) and not self._tried:
            self._pending.discard(node)
            if answer.port is not None:
                self._ports[node] = answer.port
        elif isinstance(answer, PeersProbed) and self._tried:
            self._pending.discard(node)
            self._found[node] = Found(self._tried[node], answer.reached, answer.heard)
        self._advance()

    def fetch(self) -> dict[int, Found] | None:
        """Return the results once, when all have answered or timed out; else None."""
        self._advance()
        if self._deadline is None or not self._tried or (self._pending and monotonic() < self._deadline):
            return None
        self._deadline, self.ended_at = None, monotonic()
        return self._found

    def _advance(self) -> None:
        if self._deadline is None or self._tried or (self._pending and monotonic() < self._deadline):
            return
        nodes = sorted(self._ports)
        if len(nodes) < 2:
            self._deadline, self.ended_at = None, monotonic()
            return
        self._pending, self._deadline = set(nodes), monotonic() + ANSWER_SECONDS
        token = secrets.token_hex(16)
        for place, node in enumerate(nodes):
            ring = nodes[place + 1 :] + nodes[:place]
            peers = ring if len(ring) <= MAX_PEERS_PROBED else ring[: MAX_PEERS_PROBED // 2] + ring[-MAX_PEERS_PROBED // 2 :]
            self._tried[node] = peers
            self._request(node, ProbePeers(self._number, {peer: self._ports[peer] for peer in peers}, token), "peers_probed")
