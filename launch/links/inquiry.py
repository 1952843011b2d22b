"""The driver's part of finding out which nodes reach each other: it asks the agents, in two rounds, and waits for none of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from time import monotonic

from ...engine.protocol.messages import MOST_PEERS_PROBED, Message
from .probe import PROBE_SECONDS
from .verdict import Found

__all__ = ["LinkInquiry"]

LISTEN_SECONDS = 1.0
"""How long an agent may take to listen. Nothing is concluded of one that takes longer."""

ANSWER_SECONDS = PROBE_SECONDS + 1.0


class LinkInquiry:
    """Asks nodes by `ask`, which gets a node, a message and the kind of its answer. First they listen, then each tries the others."""

    def __init__(self, ask: Callable[[int, Message, str], None]) -> None:
        self._ask = ask
        self._number = secrets.randbelow(2**31)  # so that no answer to an earlier attempt's is taken for one to this one's
        self._awaited: set[int] = set()
        self._ports: dict[int, int] = {}
        self._tried: dict[int, list[int]] = {}
        self._found: dict[int, Found] = {}
        self._deadline: float | None = None
        self.ended_at = 0.0

    @property
    def under_way(self) -> bool:
        """Whether answers are awaited, or have not been fetched."""
        return self._deadline is not None

    def begin(self, nodes: Collection[int]) -> None:
        """Ask these nodes, unless that is under way."""
        if self.under_way or len(nodes) < 2:
            return
        self._number += 1
        self._awaited, self._deadline = set(nodes), monotonic() + LISTEN_SECONDS
        self._ports, self._tried, self._found = {}, {}, {}
        for node in nodes:
            self._ask(node, Message("open_probe", {"number": self._number}), "probe_port")

    def hear(self, node: int, answer: Message) -> None:
        """Take a node's answer, which is sound (`node_messages`); one that comes too late is none."""
        if answer["number"] != self._number or node not in self._awaited:
            return
        if answer.kind == "probe_port" and not self._tried:
            self._awaited.discard(node)
            if answer["port"] is not None:
                self._ports[node] = answer["port"]
        elif answer.kind == "peers_probed" and self._tried:
            self._awaited.discard(node)
            self._found[node] = Found(self._tried[node], answer["reached"], answer["heard"])
        self._advance()

    def fetch(self) -> dict[int, Found] | None:
        """Return what was found once all have answered, or have had the time to; None before, and after it has been fetched."""
        self._advance()
        if self._deadline is None or not self._tried or (self._awaited and monotonic() < self._deadline):
            return None
        self._deadline, self.ended_at = None, monotonic()
        return self._found

    def _advance(self) -> None:
        """Begin the second round once all listen, or have had the time to."""
        if self._deadline is None or self._tried or (self._awaited and monotonic() < self._deadline):
            return
        nodes = sorted(self._ports)
        if len(nodes) < 2:
            self._deadline, self.ended_at = None, monotonic()
            return
        self._awaited, self._deadline = set(nodes), monotonic() + ANSWER_SECONDS
        token = secrets.token_hex(16)
        for place, node in enumerate(nodes):
            ring = nodes[place + 1 :] + nodes[:place]
            others = ring if len(ring) <= MOST_PEERS_PROBED else ring[: MOST_PEERS_PROBED // 2] + ring[-MOST_PEERS_PROBED // 2 :]
            self._tried[node] = others
            ports = {str(other): self._ports[other] for other in others}
            self._ask(node, Message("probe_peers", {"number": self._number, "ports": ports, "token": token}), "peers_probed")
