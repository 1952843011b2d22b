"""What anything that a node says is made of: the types of its fields with their bounds, and the description of its host.

Agents greet their driver with such a description, and probes answer with one (`probe_answers.py`).
"""

from __future__ import annotations

import ipaddress
import math
import threading
from typing import Annotated, Any, TypeVar

import msgspec

from ...records.schema import Count

__all__ = [
    "MOST_GPUS",
    "MOST_INTERFACES",
    "Address",
    "Code",
    "Duration",
    "Host",
    "Identity",
    "Label",
    "Name",
    "Number",
    "Pid",
    "Port",
    "Said",
    "Text",
    "converted",
    "is_address",
    "unfit_in",
]

Label = Annotated[str, msgspec.Meta(max_length=255)]
"""As long as a name of a host may be; those of interfaces and addresses are shorter."""
Flag = Annotated[str, msgspec.Meta(max_length=64)]
"""Of a processor: the longest that there are have some twenty characters."""
Name = Annotated[str, msgspec.Meta(max_length=4096)]
Text = Annotated[str, msgspec.Meta(max_length=1 << 17)]
"""Longer than the longest last line of a log that agents read (64 KiB)."""
Code = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Pid = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
"""Of a node, a worker, a death."""
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Address = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

MOST_DEEP = 6
"""How deep the values of a message nest at most; those of an interface in a greeting have four levels."""

MOST_INTERFACES = MOST_PACKAGES = 4096
MOST_GPUS = 1024
MOST_CPU_FLAGS = 1000


class Said(msgspec.Struct, forbid_unknown_fields=True, rename={"from_": "from"}):
    """The fields of a kind of message, besides its kind."""


class Identity(Said):
    """Which machine and which network a node is on."""

    boot: Name
    network: Name


class _Interface(Said):
    addresses: Annotated[list[Label], msgspec.Meta(max_length=4096)]
    up: bool | None
    mtu_bytes: Count | None
    speed_bits_per_second: Count | None


class _Gpu(Said):
    name: Name | None
    memory_total_bytes: Count | None
    uuid: Name | None


class _VisibleGpu(Said):
    visible_as: Name
    uuid: Name | None
    gpu: Number | None


class Host(Said):
    """What a node is, as ``env.json`` has it."""

    hostname: Label | None
    cpu_model: Name | None
    cpu_flags: Annotated[list[Flag], msgspec.Meta(max_length=MOST_CPU_FLAGS)] | None
    cores_logical: Count | None
    cores_physical: Count | None
    cores_affinity: Count | None
    cores_quota: Duration | None
    cores_available: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None
    memory_total_bytes: Count
    memory_limit_bytes: Count | None
    interfaces: Annotated[dict[Label, _Interface], msgspec.Meta(max_length=MOST_INTERFACES)]
    operating_system: Name
    kernel: Name
    machine: Name
    python: Name
    packages: Annotated[dict[Name, Name | None], msgspec.Meta(max_length=MOST_PACKAGES)]
    gpus: Annotated[list[_Gpu], msgspec.Meta(max_length=MOST_GPUS)] | None
    gpu_driver: Name | None
    gpu_problem: Name | None
    visible_gpus: Annotated[list[_VisibleGpu], msgspec.Meta(max_length=MOST_GPUS)] | None


T = TypeVar("T")

_converting = threading.Lock()
"""msgspec describes a type to itself when it first meets it, and 0.22 crashes where two threads have it do so at the same time."""


def converted(value: Any, kind: type[T]) -> T:
    """Return a value as what it has to be, whichever thread asks. Raises msgspec.ValidationError where it is something else."""
    with _converting:
        return msgspec.convert(value, kind)


def is_address(text: str) -> bool:
    """Whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def unfit_in(values: list[Any], *, may_be_nan: bool = False) -> str | None:
    """Return what of some values, and of all that they consist of, could not be written to files; None where all could.

    That are numbers that are none, texts that are none, and nesting beyond sense.
    """
    waiting = [(value, 1) for value in values]
    while waiting:
        value, depth = waiting.pop()
        if depth > MOST_DEEP:
            return "values nested too deep"
        if isinstance(value, float) and not may_be_nan and not math.isfinite(value):
            return f"a number that is {value}"
        if isinstance(value, int) and abs(value) >= 2**63:
            return "a number that is too large"
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            return "a text that is no Unicode"
        if isinstance(value, dict):
            waiting += [(part, depth + 1) for entry in value.items() for part in entry]
        elif isinstance(value, list):
            waiting += [(part, depth + 1) for part in value]
    return None
