"""Addresses and names of a virtual network, and the limits of both: known to its owner and to its holder without asking each other."""

from __future__ import annotations

__all__ = ["INTERFACE", "LEAST_BITS_PER_SECOND", "MESSAGE_BYTES", "MOST_BITS_PER_SECOND", "MOST_NODES", "PREFIX_BITS", "address"]

INTERFACE = "eth0"
"""The one interface, beside ``lo``, that every node has."""
PREFIX_BITS = 24
MOST_NODES = 250
"""A message carries 253 descriptors, and the network has 254 addresses."""
MESSAGE_BYTES = 65536
LEAST_BITS_PER_SECOND = 12_000.0
"""About one full Ethernet frame a second; below it nothing would move."""
MOST_BITS_PER_SECOND = (2**32 - 1) * 8.0
"""The token bucket filter counts bytes per second in 32 bits."""


def address(node: int) -> str:
    """Return the IPv4 address of a node (from 0): 10.77.0.1 and so on."""
    return f"10.77.0.{node + 1}"
