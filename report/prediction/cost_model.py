"""How long would a step take on other nodes and links? The model: processor time, bytes, messages; docs/scaling.md derives it.

Everything here is arithmetic on figures that `fit.py` takes from finished runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...core.direct_exchange import sent_whole
from .queueing import rounds

__all__ = [
    "BACKWARD_SHARE",
    "WIRE_BYTES",
    "Compute",
    "Exchange",
    "Link",
    "Ring",
    "Server",
    "Step",
    "Topology",
    "Traffic",
    "on_link",
    "ring_step",
    "server_rounds",
    "server_step",
    "traffic",
]

Topology = Literal["ring", "ps"]

Exchange = Literal["native", "direct"]
"""How sync workers add up their gradients: round a ring, or each with every other one."""

BACKWARD_SHARE = 2 / 3
"""Of computing: gradients can be on their way while those of earlier layers are computed, and backward takes twice what forward does."""

WIRE_BYTES = 1514 / 1448
"""Bytes on the link for a byte of payload: an Ethernet frame of 1514 bytes carries 1448 (TCP with timestamps over IPv4)."""


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the nodes: payload and headers per second in each direction, None where it sets no limit, and latency one way.

    The latency is what comes on top of that in the runs the model was fitted to.
    """

    bytes_per_second: float | None
    latency_seconds: float = 0.0

    @property
    def seconds_per_byte(self) -> float:
        """Time on the link for a byte."""
        return 0.0 if self.bytes_per_second is None else 1 / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Compute:
    """A worker's own work for a step: gather the batch, forward, backward, update."""

    fixed_seconds: float
    seconds_per_example: float

    def seconds(self, batch_size: float) -> float:
        """Time for a batch of this size."""
        return self.fixed_seconds + self.seconds_per_example * batch_size


@dataclass(frozen=True, slots=True)
class Ring:
    """What an all-reduce costs besides the link; `exchange` says how it goes.

    `hop_seconds` of software for each message that a worker sends, one after another; `seconds_per_byte` of processor time for each byte
    that it sends; `wire_factor`: bytes on the link for a byte of payload. `hidden_fraction` of it goes on behind computing, but no more
    than fits into `window_fraction` of that. Each step has `other_seconds` besides.
    """

    hop_seconds: float = 0.0
    seconds_per_byte: float = 0.0
    wire_factor: float = WIRE_BYTES
    hidden_fraction: float = 0.0
    window_fraction: float = BACKWARD_SHARE
    other_seconds: float = 0.0
    exchange: Exchange = "native"


class Traffic(NamedTuple):
    """What a worker sends in an all-reduce: so many messages and bytes, in so many rounds, each of which waits for the one before."""

    messages: int
    sent_bytes: float
    rounds: int


def traffic(exchange: Exchange, payload_bytes: float, workers: int) -> Traffic:
    """Return what each of `workers` sends. Round a ring every message is a round; the direct exchange has one, or two with shares."""
    shares = 2 * (workers - 1) / workers * payload_bytes
    if exchange == "native":
        return Traffic(2 * (workers - 1), shares, 2 * (workers - 1))
    if sent_whole(payload_bytes, workers):
        return Traffic(workers - 1, (workers - 1) * payload_bytes, 1)
    return Traffic(2 * (workers - 1), shares, 2)


def on_link(exchange: Exchange, payload_bytes: float, workers: int, nodes: int) -> float:
    """Return the bytes of payload that leave a node in an all-reduce: a ring leaves it once, and direct exchanges go to all others."""
    if nodes == 1 or workers == 1:
        return 0.0
    sent = traffic(exchange, payload_bytes, workers).sent_bytes
    here = workers / nodes
    return sent if exchange == "native" else here * sent * (workers - here) / (workers - 1)


@dataclass(frozen=True, slots=True)
class Server:
    """What an exchange with the parameter servers costs besides the links: on a server's processor, and on the worker's.

    These are of one push and one pull. `pulls_per_update`: a worker may pull more often than it pushes. `shared_cores`: the worker on a
    parameter server's node computes on the same cores. `slowdown`: how much longer service takes there than alone, where that node has
    less than a core: computing uses the share up, and the kernel then holds both back.
    """

    service_seconds: float = 0.0
    service_seconds_per_byte: float = 0.0
    worker_seconds: float = 0.0
    worker_seconds_per_byte: float = 0.0
    wire_factor: float = WIRE_BYTES
    pulls_per_update: float = 1.0
    shared_cores: bool = True
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """A predicted step: the `seconds` of one update of a worker, and the updates of all workers (sync: of the global batch) per second.

    `components` say where the time goes and sum to `seconds`; async: the mean over updates.
    """

    seconds: float
    updates_per_second: float
    components: Mapping[str, float]

    @property
    def limited_by(self) -> str:
        """The largest component."""
        return max(self.components, key=lambda name: self.components[name])


def ring_step(compute_seconds: float, payload_bytes: float, workers: int, nodes: int, ring: Ring, link: Link) -> Step:
    """Return the step of `workers` that all-reduce `payload_bytes`."""
    if workers == 1:
        return _lockstep({"compute": compute_seconds})
    messages, sent, in_turn = traffic(ring.exchange, payload_bytes, workers)
    components = {
        "link": on_link(ring.exchange, payload_bytes, workers, nodes) * ring.wire_factor * link.seconds_per_byte,
        "copying": sent * ring.seconds_per_byte,
        "latency": messages * ring.hop_seconds + (in_turn * link.latency_seconds if nodes > 1 else 0.0),
    }
    exchange = sum(components.values())
    hidden = min(ring.hidden_fraction * exchange, ring.window_fraction * compute_seconds)
    seen = {name: seconds * (1 - hidden / exchange) if exchange else 0.0 for name, seconds in components.items()}
    return _lockstep({"compute": compute_seconds, **seen, "other": ring.other_seconds})


def _lockstep(components: Mapping[str, float]) -> Step:
    seconds = math.fsum(components.values())
    return Step(seconds, 1 / seconds, components)


@dataclass(frozen=True, slots=True)
class _WayThroughServer:
    """Times of an update's way through one of `ps` parameter servers: on its processor, and on its link for pushing and pulling.

    `messages` and `copying` are the software's on the worker, by the message and by the byte; `own_link` is what the worker's own link
    takes longer than its share of one server's.
    """

    service: float
    messages: float
    copying: float
    pushing: float
    pulling: float
    own_link: float

    @classmethod
    def of(cls, payload_bytes: float, ps: int, server: Server, link: Link) -> _WayThroughServer:
        """Return the times for a payload that is cut evenly over `ps` parameter servers."""
        crossing, pulls = payload_bytes * server.wire_factor * link.seconds_per_byte, server.pulls_per_update
        messages = (1 + pulls) / 2
        return cls(
            service=messages * (server.service_seconds + server.service_seconds_per_byte * payload_bytes / ps),
            messages=messages * server.worker_seconds,
            copying=messages * server.worker_seconds_per_byte * payload_bytes,
            pushing=crossing / ps,
            pulling=pulls * crossing / ps,
            own_link=(1 + pulls) * crossing * (1 - 1 / ps),
        )


def server_step(compute_seconds: float, payload_bytes: float, procs_per_node: int, nodes: int, ps: int, server: Server, link: Link) -> Step:
    """Return the step of asynchronous workers, `procs_per_node` on each node, with a parameter server on each of the first `ps` nodes.

    Workers beside a parameter server reach it without the link, and share its node's cores.
    """
    near, far = server_rounds(compute_seconds, payload_bytes, procs_per_node, nodes, ps, server, link)
    beside = min(ps, nodes) * procs_per_node
    rates = (beside / sum(near.values()), (nodes * procs_per_node - beside) / sum(far.values()))
    updates = sum(rates)
    components = {name: (rates[0] * near[name] + rates[1] * far[name]) / updates for name in near}
    return Step(sum(components.values()), updates, components)


def server_rounds(
    compute_seconds: float, payload_bytes: float, procs_per_node: int, nodes: int, ps: int, server: Server, link: Link
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return where an update's time goes on a worker beside a parameter server and on one elsewhere.

    One parameter server stands for all: they are alike, and each update visits all of them at the same time.
    """
    exchange = _WayThroughServer.of(payload_bytes, ps, server, link)
    software = {"messages": exchange.messages, "copying": exchange.copying}
    own, latency = compute_seconds + sum(software.values()), (1 + server.pulls_per_update) * link.latency_seconds
    shared = server.shared_cores
    service = exchange.service * (server.slowdown if shared and compute_seconds > 0 else 1.0)
    stations = [(service + (own if shared else 0.0), service), (0.0, exchange.pushing), (0.0, exchange.pulling)]
    thinks = (0.0 if shared else own, own + latency + exchange.own_link)
    residence, _ = rounds((procs_per_node, (nodes - 1) * procs_per_node), thinks, stations)
    waited = float(residence[0, 0]) - service - (own if shared else 0.0)
    near = {"compute": compute_seconds, **software, "link": 0.0, "server": service + waited, "latency": 0.0}
    on_links = float(residence[1, 1] + residence[2, 1]) + exchange.own_link
    far = {"compute": compute_seconds, **software, "link": on_links, "server": float(residence[0, 1]), "latency": latency}
    return near, far
