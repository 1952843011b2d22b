"""What each host says of its GPUs, and which hosts have fewer than a run asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .gpu_demand import MIXED, REMEDY, GpuPlan, NodeGpus, counted, gpus_of, plan_gpus

__all__ = ["AskedGpus", "GpuRow", "described_gpus", "gpu_rows"]


@dataclass(frozen=True, slots=True)
class AskedGpus:
    """What a run asks for: the device (``auto``, ``cpu``, ``gpu``) and how many workers each host has."""

    device: str
    workers: Sequence[int]


@dataclass(frozen=True, slots=True)
class GpuRow:
    """What was found on a host. ``bad``: the run cannot be; ``odd``: it can, and the user should know."""

    state: Literal["ok", "odd", "bad"]
    found: str
    remedy: str = ""


def gpu_rows(hosts: Sequence[tuple[str, Mapping[str, Any]]], asked: AskedGpus | None) -> list[list[GpuRow]]:
    """Return the rows of each host, given as its machine and its description; none where no host has a GPU and none is asked for."""
    plan = _plan(hosts, asked)
    needed = asked is not None and asked.device == "gpu"
    if not needed and not any(host.get("gpus") or host.get("visible_gpus") or host.get("gpu_problem") for _, host in hosts):
        return [[] for _ in hosts]
    return [list(_rows(host, plan.short.get(number), plan, asked)) for number, (_, host) in enumerate(hosts)]


def _plan(hosts: Sequence[tuple[str, Mapping[str, Any]]], asked: AskedGpus | None) -> GpuPlan:
    if asked is None:
        return GpuPlan(())
    nodes = [NodeGpus(machine, workers, gpus_of(host)) for (machine, host), workers in zip(hosts, asked.workers, strict=True)]
    return plan_gpus(asked.device, nodes)


def _rows(host: Mapping[str, Any], short: str | None, plan: GpuPlan, asked: AskedGpus | None) -> Iterator[GpuRow]:
    found = described_gpus(host)
    if host.get("gpu_problem"):
        yield GpuRow("odd", host["gpu_problem"])
    if short is None or asked is None:
        yield GpuRow("ok", found)
    elif not plan.refused:
        yield GpuRow("odd" if host.get("visible_gpus") else "ok", f"{short}: computing on CPUs")
    elif asked.device == "auto":
        yield GpuRow("bad", f"{short} ({found}); {MIXED}", REMEDY)
    else:
        yield GpuRow("bad", f"{short} ({found})", REMEDY)


def described_gpus(host: Mapping[str, Any]) -> str:
    """Say in a line which GPUs a host has: number, model, memory, driver; and how many its processes may use, where that is not all."""
    visible = host.get("visible_gpus")
    names = Counter(_named(gpu) for gpu in host.get("gpus") or ())
    if not names:
        return "not known" if visible is None else f"{counted(len(visible), 'NVIDIA GPU')}"
    listed = ", ".join(f"{count} × {name}" for name, count in names.items())
    driver = f", driver {host['gpu_driver']}" if host.get("gpu_driver") else ""
    if visible is None or len(visible) == names.total():
        return f"{listed}{driver}"
    return f"{listed}{driver}; its processes may use {len(visible) or 'none'} (CUDA_VISIBLE_DEVICES, MIG)"


def _named(gpu: Mapping[str, Any]) -> str:
    memory = gpu.get("memory_total_bytes")
    return f"{gpu.get('name') or 'GPU of an unknown model'}{'' if memory is None else f' ({memory / 2**30:.1f} GiB)'}"
