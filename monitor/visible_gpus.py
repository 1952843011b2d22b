"""Which of a node's GPUs may processes use that are started there, and in which order? CUDA_VISIBLE_DEVICES says it, as CUDA reads it.

Slurm, Ray, Kubernetes and users set the variable, by index, UUID or the name of a partition (MIG). CUDA reads it up to the first entry that
names no device of the machine, and takes one that names a device twice for a list without any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Gpu", "VisibleGpu", "visible_gpus"]

_NUMBER = re.compile(r"[ \t]*([+-]?[0-9]+)")
_GPU, _PARTITION = "GPU-", "MIG-"
_LONGEST_INDEX = 9
"""Digits; no machine has so many devices, and Python refuses to read numbers of thousands of digits."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver names it; `uuid` is None where it is not known. `partitions`: UUIDs of the MIG devices that it is cut into."""

    uuid: str | None = None
    partitions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """A device that a process may be given: what to set ``CUDA_VISIBLE_DEVICES`` to, so that it has this one alone.

    `uuid` tells it from all others, None where it is not known; `gpu` is its number among the node's GPUs, in PCI order.
    """

    visible_as: str
    uuid: str | None
    gpu: int | None


def visible_gpus(gpus: Sequence[Gpu], variable: str | None, *, in_pci_order: bool = True) -> list[VisibleGpu]:
    """Return the devices that `variable` leaves of `gpus`, in its order; without it all of them, each partition for itself.

    `gpus` are in PCI order; with `in_pci_order` False the variable's indices count in another one, and name a device that is not known.
    """
    if variable is None:
        found = list(_all(gpus))
    elif variable.startswith((_GPU, _PARTITION)):
        found = list(_by_uuid(gpus, variable.split(","), _GPU if variable.startswith(_GPU) else _PARTITION))
    else:
        found = list(_by_index(gpus, variable.split(",")))
    if in_pci_order:
        return found
    return [VisibleGpu(one.visible_as, None, None) if one.visible_as.isdigit() else one for one in found]


def _all(gpus: Sequence[Gpu]) -> Iterator[VisibleGpu]:
    for number, gpu in enumerate(gpus):
        if gpu.partitions:
            yield from (VisibleGpu(uuid, uuid, number) for uuid in gpu.partitions)
        else:
            yield VisibleGpu(str(number), gpu.uuid, number)


def _by_index(gpus: Sequence[Gpu], entries: Sequence[str]) -> Iterator[VisibleGpu]:
    """Read entries as C's strtoul would: space before a number and whatever follows it do not count."""
    numbers: list[str] = []
    for entry in entries:
        number = _index(entry)
        if number is None:
            break
        if number in numbers:
            return
        numbers.append(number)
    for number in numbers:
        if len(number) > _LONGEST_INDEX or int(number) >= len(gpus):
            return
        yield VisibleGpu(number, gpus[int(number)].uuid, int(number))


def _index(entry: str) -> str | None:
    """Return the number that an entry begins with, without leading zeros; None where it begins with none, or with one below 0."""
    found = _NUMBER.match(entry)
    if found is None or found[1].startswith("-"):
        return None
    return found[1].lstrip("+0") or "0"


def _by_uuid(gpus: Sequence[Gpu], entries: Sequence[str], prefix: str) -> Iterator[VisibleGpu]:
    """Read entries that begin with `prefix`, each of them a UUID or so much of its beginning as no other device has."""
    found: list[VisibleGpu] = []
    seen: set[str] = set()
    for entry in entries:
        if entry in seen:
            return
        if not entry.startswith(prefix):
            break
        seen.add(entry)
    for entry in entries[: len(seen)]:
        device = _gpu(gpus, entry) if prefix == _GPU else _partition(gpus, entry)
        if device is None:
            break
        if device in found:
            return
        found.append(device)
    yield from found


def _gpu(gpus: Sequence[Gpu], entry: str) -> VisibleGpu | None:
    """Return the GPU whose UUID begins so; where no UUIDs are known the entry is believed."""
    if not any(gpu.uuid for gpu in gpus):
        return VisibleGpu(entry, None, None) if gpus else None
    return _only([VisibleGpu(gpu.uuid, gpu.uuid, number) for number, gpu in enumerate(gpus) if gpu.uuid and gpu.uuid.startswith(entry)])


def _partition(gpus: Sequence[Gpu], entry: str) -> VisibleGpu | None:
    """Return the partition whose UUID begins so, or that is named by its GPU's (``MIG-GPU-…/1/0``, as older drivers have it)."""
    if entry.startswith(f"{_PARTITION}{_GPU}"):
        owner = entry.removeprefix(_PARTITION).partition("/")[0]
        return _only([VisibleGpu(entry, entry, number) for number, gpu in enumerate(gpus) if gpu.uuid in (owner, None)][:1])
    if not any(gpu.uuid for gpu in gpus):
        return VisibleGpu(entry, entry, None) if gpus else None
    known = [VisibleGpu(uuid, uuid, number) for number, gpu in enumerate(gpus) for uuid in gpu.partitions]
    return _only([one for one in known if one.visible_as.startswith(entry)])


def _only(candidates: Sequence[VisibleGpu]) -> VisibleGpu | None:
    return candidates[0] if len(candidates) == 1 else None
