"""Collectives of a single rank or of a process group, formed on the first rank's port.

`direct.py` has the direct exchange.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from ...core.cluster import Task
from ...core.job import Job
from ..base import find_interface, set_nccl_interface


class Collectives:
    """Collectives of all ranks of a job, called in the same order on all.

    This class is a single rank, which does nothing.
    """

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over all ranks."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast the first rank's contiguous tensor."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def leave(self, *, healthy: bool) -> None:
        """Wait for all, so that none ends while another needs it, and disconnect.

        Do not wait after a failure.
        """


class NativeCollectives(Collectives):
    """Collectives of torch's default process group."""

    def __init__(self, task: Task, job: Job, device: torch.device) -> None:
        """Form the group: gloo, or nccl if each rank has a GPU.

        Raises OSError with EADDRINUSE, or DistError for missing ranks.
        """
        os.environ["GLOO_SOCKET_IFNAME"] = find_interface(task.address)
        store = _store(task, job)
        collectives = _choose_backend(store, task, device)
        if collectives == "nccl":
            set_nccl_interface(task.address)
        waits = timedelta(seconds=job.stall_timeout)
        dist.init_process_group(collectives, store=store, rank=task.rank, world_size=task.cluster.workers, timeout=waits)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """All-reduce."""
        dist.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast."""
        dist.broadcast(tensor, 0)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def leave(self, *, healthy: bool) -> None:
        """Destroy the group; see `Collectives`."""
        if not dist.is_initialized():
            return
        try:
            if healthy:
                dist.barrier()
        finally:
            dist.destroy_process_group()


def _store(task: Task, job: Job) -> dist.TCPStore:
    """Return the key-value store by which ranks find each other.

    The first rank serves it, on its address only.
    """
    host, port = task.cluster.endpoint(task.cluster.tasks_with_role("worker")[0])
    waits = timedelta(seconds=job.start_timeout)
    if task.rank:
        return dist.TCPStore(host, port, task.cluster.workers, is_master=False, timeout=waits)
    with socket.create_server((host, port), backlog=128, reuse_port=False) as listener:
        return dist.TCPStore(
            host, port, task.cluster.workers, is_master=True, timeout=waits, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _choose_backend(store: dist.TCPStore, task: Task, device: torch.device) -> str:
    """Return ``nccl`` if no two ranks share a GPU (nccl refuses that), else ``gloo``.

    The same on every rank.
    """
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"device/{task.rank}", mine)
    devices = [store.get(f"device/{rank}").decode() for rank in range(task.cluster.workers)]
    return "nccl" if all(devices) and len(set(devices)) == len(devices) and dist.is_nccl_available() else "gloo"
