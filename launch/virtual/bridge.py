"""Links of virtual nodes: a bridge, and a veth pair to each node, shaped at both ends."""

from __future__ import annotations

import errno
from collections.abc import Callable

from pyroute2 import IPRoute  # takes a tenth of a second, so only the holder imports this file
from pyroute2.netlink.exceptions import NetlinkError

from .namespaces import INTERFACE, PREFIX_BITS, MissingCapabilityError, address, join_network, new_network, silence_ipv6

_LOOPBACK_INDEX = 1  # the first interface of every network namespace

# 1 ms: small compared to a training step, large compared to the timer's resolution; the bucket must hold two full frames.
_BURST_SECONDS = 1e-3
_MIN_BURST_BYTES = 2 * 1600
# A queue of 50 ms, as in a small switch; the rest is dropped, and TCP slows down.
_QUEUE_SECONDS = 0.05
_MAX_SEGMENT_BYTES = 65536  # the kernel's default gso_max_size
# Headers count: 1514 bytes for 1448. Larger segments cost the receiver five times the CPU time (measured, 200 to 500 Mbit/s).
_PAYLOAD_SHARE = 1448 / 1514


class Bridge:
    """The bridge's namespace, in which the building process stays, and the connected nodes."""

    def __init__(self, bits_per_second: float | None) -> None:
        self._bits_per_second = bits_per_second
        self.namespace = new_network()  # descriptor of the bridge's network namespace
        silence_ipv6()
        self._route = IPRoute()
        self.nodes: list[int] = []  # descriptors of the nodes' network namespaces, in order
        quiet = {"br_stp_state": 0, "br_forward_delay": 0, "br_mcast_snooping": 0}
        _netlink(lambda: self._route.link("add", ifname="bridge0", kind="bridge", **quiet), "a bridge")
        self._bridge = _index(self._route, "bridge0")
        self._route.link("set", index=self._bridge, state="up")

    def add_node(self) -> None:
        """Make a namespace with loopback and its own address, and connect it to the bridge."""
        node = len(self.nodes)
        port = f"port{node}"
        namespace = new_network()
        silence_ipv6()
        with IPRoute() as inside:
            peer = {"ifname": INTERFACE, "net_ns_fd": namespace}
            _netlink(lambda: self._route.link("add", ifname=port, kind="veth", peer=peer), "a veth pair")
            outer, inner = _index(self._route, port), _index(inside, INTERFACE)
            if self._bits_per_second is not None:
                _shape(self._route, outer, self._bits_per_second)
                _shape(inside, inner, self._bits_per_second)
            inside.link("set", index=_LOOPBACK_INDEX, state="up")
            inside.addr("add", index=inner, address=address(node), prefixlen=PREFIX_BITS)
            inside.link("set", index=inner, state="up")
        self._route.link("set", index=outer, master=self._bridge, state="up")
        join_network(self.namespace)
        self.nodes.append(namespace)


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
    indices: list[int] = list(route.link_lookup(ifname=name))
    return indices[0]


def _shape(route: IPRoute, index: int, bits_per_second: float) -> None:
    burst = max(_MIN_BURST_BYTES, int(bits_per_second / 8 * _BURST_SECONDS))
    bytes_per_second = max(1, round(bits_per_second / 8))
    route.link("set", index=index, gso_max_size=min(_MAX_SEGMENT_BYTES, int(burst * _PAYLOAD_SHARE)))
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
