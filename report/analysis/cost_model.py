"""The cost model of a step: processor time, bytes, messages; docs/scaling.md derives it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.cluster import sends_whole_vectors

# Mean value analysis of a closed network with two classes of customers: exact for processor-sharing stations, such as TCP links and fair
# schedulers, whatever the service times (Reiser and Lavenberg 1980; Baskett, Chandy, Muntz and Palacios 1975).

Pair = tuple[float, float]


class Rounds(NamedTuple):
    """A customer's round in each class (even without any): residence [stations, 2], seconds [2]."""

    residence_seconds: NDArray[np.float64]
    seconds: NDArray[np.float64]


def rounds(customers: tuple[int, int], think_seconds: Pair, demand_seconds: Sequence[Pair]) -> Rounds:
    """Return the rounds of `customers` of two classes. Raises ValueError for rounds of no time."""
    demands, thinks = np.array(demand_seconds, dtype=np.float64).reshape(-1, 2), np.array(think_seconds, dtype=np.float64)
    if np.any(demands.sum(axis=0) + thinks <= 0):
        raise ValueError("a round has to take some time")
    first, second = customers
    before: list[NDArray[np.float64]] = []
    for first_count in range(first + 1):
        row: list[NDArray[np.float64]] = []
        for second_count in range(second + 1):
            queue = np.zeros(len(demands))
            if first_count:
                queue += _customers_present(demands[:, 0], thinks[0], before[second_count], first_count)
            if second_count:
                queue += _customers_present(demands[:, 1], thinks[1], row[second_count - 1], second_count)
            row.append(queue)
        last, before = before, row
    met = [last[second] if first else before[second], before[second - 1] if second else before[second]]
    residence = np.stack([demands[:, kind] * (1 + met[kind]) for kind in (0, 1)], axis=1)
    return Rounds(residence, residence.sum(axis=0) + thinks)


def _customers_present(demands: NDArray[np.float64], think: float, met: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    residence = demands * (1 + met)
    present: NDArray[np.float64] = count * residence / (think + residence.sum())
    return present


Topology = Literal["ring", "ps"]
Exchange = Literal["native", "direct"]  # ring all-reduce, or each worker with each other
BACKWARD_SHARE = 2 / 3  # of computation: gradients are sent while those of earlier layers are computed
WIRE_BYTES = 1514 / 1448  # an Ethernet frame of 1514 bytes carries 1448 of payload (TCP with timestamps over IPv4)


@dataclass(frozen=True, slots=True)
class Link:
    """The nodes' links: bytes per second, if limited, and latency beyond the fitted runs'."""

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
        """Return the time for a batch."""
        return self.fixed_seconds + self.seconds_per_example * batch_size


@dataclass(frozen=True, slots=True)
class Ring:
    """The cost of an all-reduce in addition to the link."""

    hop_seconds: float = 0.0  # of software for each message in turn
    seconds_per_byte: float = 0.0  # of processor time
    wire_factor: float = WIRE_BYTES  # bytes on the link for a byte of payload
    hidden_fraction: float = 0.0  # behind computation
    window_fraction: float = BACKWARD_SHARE  # part of computation that hides communication
    other_seconds: float = 0.0  # further time of each step
    exchange: Exchange = "native"


class Traffic(NamedTuple):
    """What a worker sends in an all-reduce: messages and bytes, in dependent rounds."""

    messages: int
    sent_bytes: float
    rounds: int


def traffic(exchange: Exchange, payload_bytes: float, workers: int) -> Traffic:
    """Return what each worker sends: in a ring every message is a round, else one or two."""
    shares = 2 * (workers - 1) / workers * payload_bytes
    if exchange == "native":
        return Traffic(2 * (workers - 1), shares, 2 * (workers - 1))
    if sends_whole_vectors(payload_bytes, workers):
        return Traffic(workers - 1, (workers - 1) * payload_bytes, 1)
    return Traffic(2 * (workers - 1), shares, 2)


def link_bytes(exchange: Exchange, payload_bytes: float, workers: int, nodes: int) -> float:
    """Return the bytes that leave a node in an all-reduce: a ring leaves it only once."""
    if nodes == 1 or workers == 1:
        return 0.0
    sent = traffic(exchange, payload_bytes, workers).sent_bytes
    here = workers / nodes
    return sent if exchange == "native" else here * sent * (workers - here) / (workers - 1)


@dataclass(frozen=True, slots=True)
class Server:
    """The cost of one push and one pull in addition to the links, on server and worker."""

    service_seconds: float = 0.0
    service_seconds_per_byte: float = 0.0
    worker_seconds: float = 0.0
    worker_seconds_per_byte: float = 0.0
    wire_factor: float = WIRE_BYTES
    pulls_per_update: float = 1.0
    shared_cores: bool = True  # the worker on a server's node uses the same cores
    slowdown: float = 1.0  # of service on a node with less than a core, as computation uses up its quota


@dataclass(frozen=True, slots=True)
class Step:
    """A predicted step: a worker's `seconds`, its mean `components`, and updates of all workers."""

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
        "link": link_bytes(ring.exchange, payload_bytes, workers, nodes) * ring.wire_factor * link.seconds_per_byte,
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


def server_step(compute_seconds: float, payload_bytes: float, procs_per_node: int, nodes: int, ps: int, server: Server, link: Link) -> Step:
    """Return the step of async workers; those on the first `ps` nodes share cores with a server."""
    near, far = server_rounds(compute_seconds, payload_bytes, procs_per_node, nodes, ps, server, link)
    near_workers = min(ps, nodes) * procs_per_node
    rates = (near_workers / sum(near.values()), (nodes * procs_per_node - near_workers) / sum(far.values()))
    updates = sum(rates)
    components = {name: (rates[0] * near[name] + rates[1] * far[name]) / updates for name in near}
    return Step(sum(components.values()), updates, components)


def server_rounds(
    compute_seconds: float, payload_bytes: float, procs_per_node: int, nodes: int, ps: int, server: Server, link: Link
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return an update's times on a worker on a server's node and elsewhere, for one server."""
    pulls, crossing = server.pulls_per_update, payload_bytes * server.wire_factor * link.seconds_per_byte
    messages = (1 + pulls) / 2
    software = {"messages": messages * server.worker_seconds, "copying": messages * server.worker_seconds_per_byte * payload_bytes}
    work, latency = compute_seconds + sum(software.values()), (1 + pulls) * link.latency_seconds
    own_link = (1 + pulls) * crossing * (1 - 1 / ps)
    shared = server.shared_cores
    service = messages * (server.service_seconds + server.service_seconds_per_byte * payload_bytes / ps)
    service *= server.slowdown if shared and compute_seconds > 0 else 1.0
    stations = [(service + (work if shared else 0.0), service), (0.0, crossing / ps), (0.0, pulls * crossing / ps)]
    thinks = (0.0 if shared else work, work + latency + own_link)
    residence, _ = rounds((procs_per_node, (nodes - 1) * procs_per_node), thinks, stations)
    waited = float(residence[0, 0]) - service - (work if shared else 0.0)
    near = {"compute": compute_seconds, **software, "link": 0.0, "server": service + waited, "latency": 0.0}
    on_links = float(residence[1, 1] + residence[2, 1]) + own_link
    far = {"compute": compute_seconds, **software, "link": on_links, "server": float(residence[0, 1]), "latency": latency}
    return near, far
