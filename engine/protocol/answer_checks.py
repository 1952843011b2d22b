"""Field types, bounds and validation of untrusted messages, hosts and probe answers."""

from __future__ import annotations

import ipaddress
import math
import threading
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from ...records.store.schema import Count
from .messages import MOST_ERROR_CHARACTERS, PROTOCOL, Message

Label = Annotated[str, msgspec.Meta(max_length=255)]  # a host's name; names of interfaces and addresses are shorter
Flag = Annotated[str, msgspec.Meta(max_length=64)]  # of a processor: the longest have about twenty characters
Name = Annotated[str, msgspec.Meta(max_length=4096)]
Text = Annotated[str, msgspec.Meta(max_length=1 << 17)]  # longer than a log's longest last line (64 KiB)
Code = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Pid = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Address = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
MOST_DEEP = 6  # nesting of values; an interface in a greeting has four levels
MOST_INTERFACES = MOST_PACKAGES = 4096
MOST_GPUS = 1024
MOST_CPU_FLAGS = 1000


class Said(msgspec.Struct, forbid_unknown_fields=True, rename={"from_": "from"}):
    """Fields of a message, without its kind."""


class Identity(Said):
    """Machine and network of a node."""

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
    """Description of a node, as in ``env.json``."""

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
_converting = threading.Lock()  # msgspec 0.22 crashes where two threads inspect a type for the first time


def converted(value: Any, kind: type[T]) -> T:
    """Convert a value to a type, from any thread. Raises msgspec.ValidationError."""
    with _converting:
        return msgspec.convert(value, kind)


def is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def unfit_in(values: list[Any], *, may_be_nan: bool = False) -> str | None:
    """Return the value that cannot be written to files (numbers, texts, nesting), or None."""
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


MOST_PEERS = 4096
MOST_PORTS = 4
_Digest = Annotated[str, msgspec.Meta(max_length=255)]


class _Described(Said):
    protocol: int
    identity: Identity
    host: Host
    address: Label | None


class _Time(Said):
    seconds: Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class _Data(Said):
    digest: _Digest


class _Model(Said):
    digest: _Digest | None
    package: Label | None


class _Listens(Said):
    ports: Annotated[list[Port], msgspec.Meta(min_length=1, max_length=MOST_PORTS)]


class _Connected(Said):
    problems: Annotated[list[Name | None], msgspec.Meta(max_length=MOST_PEERS)]


class _Problem(Said):
    text: Annotated[str, msgspec.Meta(max_length=MOST_ERROR_CHARACTERS)]


_FOUND: Mapping[str, type[Said]] = {
    "describe": _Described,
    "time": _Time,
    "data": _Data,
    "model": _Model,
    "listen": _Listens,
    "connect": _Connected,
}


def wrong_with_answer(question: str, asked: Mapping[str, Any], answer: Message) -> str | None:
    """Return the problem of a probe's answer, or None; another protocol's is not checked further."""
    kinds: Mapping[str, type[Said]] = {"found": _FOUND[question], "problem": _Problem}
    schema = kinds.get(answer.kind)
    if schema is None or answer.arrays:
        return f"a message {answer.kind[:100]!r}, which is none"
    if question == "describe" and answer.kind == "found" and type(answer.get("protocol")) is int and answer["protocol"] != PROTOCOL:
        return None
    if (unfit := unfit_in([dict(answer.fields)])) is not None:
        return unfit
    try:
        said = converted(dict(answer.fields), schema)
    except msgspec.ValidationError as error:
        return f"what is none ({str(error)[:300]})"
    if isinstance(said, _Described) and said.address is not None and not is_address(said.address):
        return f"{said.address[:100]!r} as its address, which is none"
    if isinstance(said, _Connected) and len(said.problems) != len(asked["peers"]):
        return f"{len(said.problems)} answers about {len(asked['peers'])} peers"
    return None
