"""The links between virtual nodes: a bridge in a namespace of its own, and a veth pair to each node, shaped at both ends.

Imported only by the holder process: pyroute2 takes a tenth of a second to import.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from .addressing import INTERFACE, PREFIX_BITS, address
from .errors import MissingCapabilityError
from .namespaces import join_network, new_network, silence_ipv6

__all__ = ["Bridge"]

_LOOPBACK_INDEX = 1  # the first interface of every network namespace

# A bucket of one millisecond is small against a training step, so that a message does not pass for free, and large against the
# timer's resolution; it has to hold two full Ethernet frames.
_BURST_SECONDS = 1e-3
_SMALLEST_BURST_BYTES = 2 * 1600
# A queue of 50 ms, as in a small switch; what comes on top is dropped, and TCP slows down.
_QUEUE_SECONDS = 0.05
_LARGEST_SEGMENT_BYTES = 65536  # what the kernel hands to an interface in one piece by default
# The bucket weighs a piece with the headers of all its frames: 1514 bytes for 1448. A piece that is heavier than the bucket is cut up
# frame by frame, which costs the receiver five times the processor time (measured from 200 to 500 Mbit/s).
_PAYLOAD_SHARE = 1448 / 1514


def _port(node: int) -> str:
    return f"port{node}"


class Bridge:
    """The bridge's namespace and the nodes plugged into it; the process that builds it stays in the bridge's namespace."""

    def __init__(self, bits_per_second: float | None) -> None:
        self._bits_per_second = bits_per_second
        self.namespace = new_network()
        """Descriptor of the bridge's network namespace."""
        silence_ipv6()
        self._route = IPRoute()
        self.nodes: list[int] = []
        """Descriptors of the nodes' network namespaces, in order."""
        quiet = {"br_stp_state": 0, "br_forward_delay": 0, "br_mcast_snooping": 0}
        _netlink(lambda: self._route.link("add", ifname="bridge0", kind="bridge", **quiet), "a bridge")
        self._bridge = _index(self._route, "bridge0")
        self._route.link("set", index=self._bridge, state="up")

    def add_node(self) -> None:
        """Make a namespace, give it loopback and an address of its own, and plug it into the bridge."""
        node = len(self.nodes)
        namespace = new_network()
        silence_ipv6()
        with IPRoute() as inside:
            peer = {"ifname": INTERFACE, "net_ns_fd": namespace}
            _netlink(lambda: self._route.link("add", ifname=_port(node), kind="veth", peer=peer), "a veth pair")
            outer, inner = _index(self._route, _port(node)), _index(inside, INTERFACE)
            if self._bits_per_second is not None:
                _shape(self._route, outer, self._bits_per_second)
                _shape(inside, inner, self._bits_per_second)
            inside.link("set", index=_LOOPBACK_INDEX, state="up")
            inside.addr("add", index=inner, address=address(node), prefixlen=PREFIX_BITS)
            inside.link("set", index=inner, state="up")
        self._route.link("set", index=outer, master=self._bridge, state="up")
        join_network(self.namespace)
        self.nodes.append(namespace)

    def counters(self) -> list[tuple[int, int]]:
        """Return for each node the bytes that its port of the bridge received from it and sent to it (whole frames)."""
        table = _interface_table()
        return [table[_port(node)] for node in range(len(self.nodes))]


def _netlink(request: Callable[[], object], what: str) -> None:
    try:
        request()
    except NetlinkError as error:
        if error.code not in (errno.EOPNOTSUPP, errno.EPERM, errno.EACCES):
            raise
        raise MissingCapabilityError(
            "namespaces",
            f"Virtual nodes need {what}, and this kernel does not give it ({error})",
            "Load the kernel modules bridge and veth (modprobe bridge veth) or use --network host.",
        ) from error


def _index(route: IPRoute, name: str) -> int:
    found: list[int] = list(route.link_lookup(ifname=name))
    return found[0]


def _burst_bytes(bits_per_second: float) -> int:
    """Return the size of the token bucket for a rate."""
    return max(_SMALLEST_BURST_BYTES, int(bits_per_second / 8 * _BURST_SECONDS))


def _shape(route: IPRoute, index: int, bits_per_second: float) -> None:
    """Limit what leaves through this end of the pair; the pieces that TCP hands down are cut to fit into the bucket."""
    burst = _burst_bytes(bits_per_second)
    bytes_per_second = max(1, round(bits_per_second / 8))
    route.link("set", index=index, gso_max_size=min(_LARGEST_SEGMENT_BYTES, int(burst * _PAYLOAD_SHARE)))
    try:
        route.tc("add", "tbf", index, 0x10000, rate=bytes_per_second, burst=burst, limit=burst + int(bytes_per_second * _QUEUE_SECONDS))
    except NetlinkError as error:
        if error.code not in (errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        raise MissingCapabilityError(
            "bandwidth",
            f"A limited bandwidth needs the token bucket filter, and this kernel does not give it ({error})",
            "Load the kernel module sch_tbf (modprobe sch_tbf) or leave --bandwidth out.",
        ) from error


def _interface_table() -> dict[str, tuple[int, int]]:
    """Return (received, sent) bytes of every interface in this thread's network namespace (proc_pid_net(5))."""
    table = {}
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        name, _, figures = line.partition(":")
        columns = figures.split()
        table[name.strip()] = (int(columns[0]), int(columns[8]))
    return table
