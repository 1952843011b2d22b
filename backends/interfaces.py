"""Which network interface holds an address? For libraries of collectives, which are told an interface and not an address."""

from __future__ import annotations

import ipaddress
import os

import psutil

from ..core.errors import RunFailedError

__all__ = ["interface_of", "set_nccl_interface"]


def interface_of(address: str) -> str:
    """Return the name of the network interface that holds the address (any 127.… address belongs to the loopback interface).

    Raises RunFailedError where no interface does.
    """
    wanted = "127.0.0.1" if ipaddress.ip_address(address).is_loopback and ":" not in address else address
    held: dict[str, str] = {entry.address.partition("%")[0]: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    if wanted not in held:
        raise RunFailedError(f"no network interface of this node has the address {address}; there are: {', '.join(sorted(held))}")
    return held[wanted]


def set_nccl_interface(address: str) -> None:
    """Have nccl in this process use the interface that holds the address, and no other, unless the user has chosen (NCCL_SOCKET_IFNAME).

    By itself it takes whichever comes first in its own order. The equals sign asks for this very name; without one ``eth1`` would stand for
    ``eth10`` too. Raises RunFailedError where no interface holds the address.
    """
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(address)}"
