"""Nodes of measured processes: virtual ones, or this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crosstrain.launch.node.scratch import PortBlock
from crosstrain.launch.virtual.network import VirtualNetwork

from .processes import Start

PORTS = 8


@dataclass(frozen=True)
class Nodes:
    """Nodes of a run: an address each, the interface between them, and how to start a process."""

    addresses: tuple[str, ...]
    interface: str
    ports: tuple[int, ...]
    start: Callable[[int], Start]


@contextmanager
def nodes(count: int, network: str, bits_per_second: float | None = None) -> Iterator[Nodes]:
    """Make the nodes; a single one is this machine, as for the product.

    Virtual ones may have links of limited speed.
    """
    if count == 1 or network == "host":
        block = PortBlock()
        try:
            yield Nodes(("127.0.0.1",) * count, "lo", tuple(block.take(PORTS)), lambda node: subprocess.Popen)
        finally:
            block.release()
        return
    with VirtualNetwork(count, bits_per_second, lambda node: None) as virtual:

        def start(node: int) -> Start:
            return lambda argv, **options: virtual.popen(node, argv, **options)

        yield Nodes(virtual.addresses, virtual.interface, tuple(range(29500, 29500 + PORTS)), start)
