"""Which network interface holds an address? For libraries of collectives, which are told an interface and not an address."""

from __future__ import annotations

import ipaddress

import psutil

from ..core.errors import RunFailedError

__all__ = ["interface_of"]


def interface_of(address: str) -> str:
    """Return the name of the network interface that holds the address (any 127.… address belongs to the loopback interface).

    Raises RunFailedError where no interface does.
    """
    wanted = "127.0.0.1" if ipaddress.ip_address(address).is_loopback and ":" not in address else address
    held: dict[str, str] = {entry.address.partition("%")[0]: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    if wanted not in held:
        raise RunFailedError(f"no network interface of this node has the address {address}; there are: {', '.join(sorted(held))}")
    return held[wanted]
