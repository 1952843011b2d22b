"""Which machine and which network is this? So that the driver knows which nodes share cores or interfaces, with each other or with it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

__all__ = ["node_identity"]


def node_identity() -> dict[str, str]:
    """Return what tells this machine (``boot``) and its network namespace (``network``) from others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    return {
        "boot": boot.read_text().strip() if boot.exists() else socket.gethostname(),
        "network": os.readlink(network) if network.exists() else "host",
    }
