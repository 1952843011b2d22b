"""What has to be set before torch computes: threads, device and number formats."""

from __future__ import annotations

import os

import torch

from ...core.cluster import Task
from ...core.errors import UsageError
from ...core.job import Job
from ..base import Availability
from ..capabilities import Device
from ..malloc_tuning import keep_freed_memory

__all__ = ["availability", "keep_steps_memory", "kind_of", "prepare"]


def availability(name: str, install: str) -> Availability:
    """Return torch's version and devices; a build without the processes' collectives is reported as a problem."""
    devices = ["cpu"] + [f"gpu:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    if not torch.distributed.is_available():
        return Availability(name, torch.__version__, tuple(devices), problem="this build of torch has no torch.distributed", hint=install)
    return Availability(name, torch.__version__, tuple(devices))


def prepare(task: Task, job: Job) -> torch.device:
    """Set up the process for its task and return the device it computes on.

    Raises UsageError where a GPU is asked for and torch finds none.
    """
    torch.set_num_threads(task.threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    torch.manual_seed(job.seed)
    device = choose_device(job.device, task)
    if job.deterministic:
        _make_deterministic(device)
    return device


def keep_steps_memory() -> None:
    """Keep all that a step frees: taking it anew is a third of the CNN's time at batch 256, and a fifth of AlexNet's."""
    keep_freed_memory(2**31 - 1, 2**30, one_arena=True)


def choose_device(wanted: str, task: Task) -> torch.device:
    """Return the CPU, or the GPU that the task's place on its node gives it; a chief or parameter server stays on the CPU."""
    if task.placed.role != "worker":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if wanted == "gpu" and not count:
        raise UsageError(
            "device: got 'gpu', but torch finds no GPU here; allowed: cpu, auto, or gpu with a torch built for it and its driver."
        )
    if wanted == "cpu" or not count:
        return torch.device("cpu")
    device = torch.device("cuda", task.local_index % count)
    torch.cuda.set_device(device)
    return device


def kind_of(device: torch.device) -> Device:
    """Return what a device is called for people and in records."""
    return "gpu" if device.type == "cuda" else "cpu"


def _make_deterministic(device: torch.device) -> None:
    """Ask for bitwise repeatable kernels, and on a GPU for full float32 instead of TF32."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS documents for repeatable results
    torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
