"""Which machine and which network is this? So that the driver knows which nodes share cores or interfaces, with each other or with it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ADDRESS_TOWARDS_VARIABLE", "ADDRESS_VARIABLE", "address_for_others", "address_towards", "node_identity"]

ADDRESS_VARIABLE = "CROSSTRAIN_NODE_ADDRESS"
"""Holds the address by which others reach this machine, where whoever starts our processes knows it."""

ADDRESS_TOWARDS_VARIABLE = "CROSSTRAIN_NODE_ADDRESS_TOWARDS"
"""Holds a host that all nodes reach, where that is all that whoever starts our processes knows: the address is that towards it."""

ANY_PORT = 9
"""Nothing is sent there."""


def node_identity() -> dict[str, str]:
    """Return what tells this machine (``boot``) and its network namespace (``network``) from others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    return {
        "boot": boot.read_text().strip() if boot.exists() else socket.gethostname(),
        "network": os.readlink(network) if network.exists() else "host",
    }


def address_for_others(environment: Mapping[str, str]) -> str | None:
    """Return the address by which others reach this machine, as whoever started this process has said; None where nobody has.

    It is in `ADDRESS_VARIABLE`, or that from which packets leave for the host in `ADDRESS_TOWARDS_VARIABLE`. Nothing else in the
    environment counts: it may have come from the driver's machine, and be about that.
    """
    if known := environment.get(ADDRESS_VARIABLE):
        return known
    towards = environment.get(ADDRESS_TOWARDS_VARIABLE)
    return address_towards(towards) if towards else None


def address_towards(host: str) -> str:
    """Return the address of this machine from which packets leave for another. Raises OSError where none do."""
    family, _, _, _, where = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        address: str = probe.getsockname()[0]
        return address
