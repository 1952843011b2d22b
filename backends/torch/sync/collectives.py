"""How the ranks meet: not at all, in a process group of torch's, or by the direct exchange; the same methods for all three.

A process group comes about on the first rank's reserved port, and its collectives have bounded waits.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ....core.cluster import Task
from ....core.job import Job
from ...interfaces import interface_of, set_nccl_interface

__all__ = ["ProcessGroup", "Ranks", "SingleProcess"]


class Ranks(Protocol):
    """All ranks of a job, as one of them sees them; called on all alike."""

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over all ranks."""
        ...

    def spread(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by the first rank's."""
        ...

    def barrier(self) -> None:
        """Wait until all are here."""
        ...

    def leave(self, *, healthy: bool) -> None:
        """Wait for all, so that none ends while another still needs it, and end the connections; after a failure do not wait."""
        ...


class SingleProcess:
    """A single rank, which meets nobody."""

    def add_up(self, tensor: torch.Tensor) -> None:
        """Leave the tensor as it is."""

    def spread(self, tensor: torch.Tensor) -> None:
        """Leave the tensor as it is."""

    def barrier(self) -> None:
        """Nobody is waited for."""

    def leave(self, *, healthy: bool) -> None:
        """Nobody is waiting."""


class ProcessGroup:
    """The ranks of torch's default process group."""

    def __init__(self, task: Task, job: Job, device: torch.device) -> None:
        """Form the group; see `_join_group`."""
        _join_group(task, job, device)

    def add_up(self, tensor: torch.Tensor) -> None:
        """All-reduce."""
        dist.all_reduce(tensor)

    def spread(self, tensor: torch.Tensor) -> None:
        """Broadcast."""
        dist.broadcast(tensor, 0)

    def barrier(self) -> None:
        """Wait until all are here."""
        dist.barrier()

    def leave(self, *, healthy: bool) -> None:
        """Dissolve the group; see `Ranks`."""
        if not dist.is_initialized():
            return
        try:
            if healthy:
                dist.barrier()
        finally:
            dist.destroy_process_group()


def _join_group(task: Task, job: Job, device: torch.device) -> None:
    """Form the group of all ranks: gloo, or nccl where every rank has a GPU of its own.

    Raises OSError with errno EADDRINUSE on the first rank where its port was taken, and torch's DistError where the others do not
    come within `start_timeout`.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(task.address)
    store = _store(task, job)
    if (collectives := _choose_collectives(store, task, device)) == "nccl":
        set_nccl_interface(task.address)
    dist.init_process_group(
        collectives,
        store=store,
        rank=task.rank,
        world_size=task.cluster.workers,
        timeout=timedelta(seconds=job.stall_timeout),
    )


def _store(task: Task, job: Job) -> dist.TCPStore:
    """Return the key-value store through which the ranks find each other, served by the first rank on its own address only."""
    host, port = task.cluster.endpoint(task.cluster.of_role("worker")[0])
    waits = timedelta(seconds=job.start_timeout)
    if task.rank:
        return dist.TCPStore(host, port, task.cluster.workers, is_master=False, timeout=waits)
    with socket.create_server((host, port), backlog=128, reuse_port=False) as listener:
        return dist.TCPStore(
            host, port, task.cluster.workers, is_master=True, timeout=waits, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _choose_collectives(store: dist.TCPStore, task: Task, device: torch.device) -> str:
    """Return ``nccl`` where no two ranks share a GPU (nccl refuses that), else ``gloo``; every rank finds the same answer."""
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"device/{task.rank}", mine)
    devices = [store.get(f"device/{rank}").decode() for rank in range(task.cluster.workers)]
    return "nccl" if all(devices) and len(set(devices)) == len(devices) and dist.is_nccl_available() else "gloo"
