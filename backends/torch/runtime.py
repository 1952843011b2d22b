"""Torch's configuration: threads, device and number formats; memory for copies of the state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch

from ...core.cluster import Task
from ...core.errors import UsageError
from ...core.job import Job
from ...models.base import Array, ModelSpec, ParameterSpec
from .. import vectors as state_memory
from ..base import Availability, State
from ..capabilities import Device
from ..loading import tune_malloc
from .data import Tensors, share


def availability(name: str, install: str) -> Availability:
    """Return torch's version and devices; a build without torch.distributed is a problem."""
    devices = ["cpu"] + [f"gpu:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    if not torch.distributed.is_available():
        return Availability(name, torch.__version__, tuple(devices), problem="this build of torch has no torch.distributed", hint=install)
    return Availability(name, torch.__version__, tuple(devices))


def prepare(task: Task, job: Job) -> torch.device:
    """Configure the process for its task and return its device.

    Raises UsageError if a required GPU is missing.
    """
    torch.set_num_threads(task.threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    torch.manual_seed(job.seed)
    device = choose_device(job.device, task)
    if job.deterministic:
        _make_deterministic(device, compiled=job.compile != "off")
    return device


def retain_memory() -> None:
    """Retain the memory that a step frees.

    Allocating it again is a third of the CNN's time at batch 256, a fifth of AlexNet's.
    """
    tune_malloc(2**31 - 1, 2**30, one_arena=True)


def choose_device(wanted: str, task: Task) -> torch.device:
    """Return the CPU, or a worker's GPU by its place on the node."""
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


def device_kind(device: torch.device) -> Device:
    """Return a device's name in records."""
    return "gpu" if device.type == "cuda" else "cpu"


def _make_deterministic(device: torch.device, *, compiled: bool) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as cuBLAS documents for repeatable results
    if compiled:
        torch.use_deterministic_algorithms(True)  # also of the compiler, whose import takes a second
    else:
        torch.set_deterministic_debug_mode("error")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False


def cut(flat: torch.Tensor, specs: Sequence[ParameterSpec]) -> list[torch.Tensor]:
    """Return a flat vector's pieces, in canonical shapes on the same memory."""
    pieces = flat.split([spec.size for spec in specs])
    return [piece.view(spec.shape) for piece, spec in zip(pieces, specs, strict=True)]


def each_value(spec: ModelSpec, slots: Sequence[str], state: State) -> Iterator[torch.Tensor | None]:
    """Yield the state's values as tensors on the arrays' memory; see `vectors.each_value`."""
    for value in state_memory.each_value(spec, slots, state):
        yield None if value is None else share(value)


class StateMemory(state_memory.StateMemory):
    """`vectors.StateMemory`, to which a device's tensors are copied."""

    def __init__(self, spec: ModelSpec, slots: Sequence[str], *, pinned: bool = False) -> None:
        held: list[torch.Tensor] = []

        def allocate(size: int) -> Array:
            held.append(torch.empty(size, pin_memory=pinned))
            memory: Array = held[-1].numpy()
            return memory

        super().__init__(spec, slots, allocate)
        *vectors, buffers = held
        self._tensors = [piece for vector in vectors for piece in cut(vector, spec.parameters)] + cut(buffers, spec.buffers)

    def take(self, tensors: Tensors) -> None:
        """Copy the state's tensors, in the order of `each_value`, completely."""
        for kept, tensor in zip(self._tensors, tensors, strict=True):
            kept.copy_(tensor, non_blocking=True)
        if any(tensor.device.type == "cuda" for tensor in tensors[:1]):
            torch.cuda.synchronize()
