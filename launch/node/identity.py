"""Which machine and which network is this? So that the driver knows which nodes share cores or interfaces, with each other or with it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ADDRESS_VARIABLE", "address_for_others", "address_towards", "node_identity"]

ADDRESS_VARIABLE = "CROSSTRAIN_NODE_ADDRESS"
"""Holds the address by which others reach this machine, where whoever starts our processes knows it."""

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
    """Return the address by which the machine that started this process has reached this one; None where that is not known.

    Whoever knows it says so (`ADDRESS_VARIABLE`). In a step of Slurm, whose environment may have come from a shell that was reached by ssh,
    it is the one from which packets leave for the host where srun runs; else what ssh says.
    """
    if known := environment.get(ADDRESS_VARIABLE):
        return known
    launched_from = environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if launched_from and "SLURM_STEP_ID" in environment:
        return address_towards(launched_from)
    parts = environment.get("SSH_CONNECTION", "").split()  # the client's address and port, then ours
    return parts[2] if len(parts) == 4 else None


def address_towards(host: str) -> str:
    """Return the address of this machine from which packets leave for another. Raises OSError where none do."""
    family, _, _, _, where = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        address: str = probe.getsockname()[0]
        return address
