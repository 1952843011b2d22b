"""Validates what a node says to the driver: the fields and arrays of each kind of message, their bounds, and whose tasks it may speak for.

A node may be broken or hostile: no message of it may bring the driver down, or speak for the tasks of another node. Whether a message is
awaited at the moment is checked in `outstanding_requests.py`, and whether an answer's content is possible in the training loop.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import msgspec

from ...metrics.base import MOST_SUMS
from ...records.schema import Count, Seconds, SystemRecord, TaskSample
from .messages import FILE_PIECE_BYTES, MAX_ARRAY_BYTES, MOST_STACK_CHARACTERS, PROTOCOL, Message, RawArray
from .state_transfer import CHUNK_BYTES

__all__ = ["wrong_with"]

Name = Annotated[str, msgspec.Meta(max_length=4096)]
Text = Annotated[str, msgspec.Meta(max_length=1 << 17)]
"""Longer than the longest last line of a log that agents read (64 KiB), and than the message of an error."""
Code = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Pid = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
"""Of a node, a worker, a death."""
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Elapsed = Seconds
"""A duration by the wall clock, as TensorFlow's graphs measure it: below 0 where that was set back meanwhile."""
Address = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

MOST_DEEP = 6
"""How deep the values of a message nest at most; those of an interface in a greeting have four levels."""


class _Said(msgspec.Struct, forbid_unknown_fields=True, rename={"from_": "from"}):
    """The fields of a kind of message, besides its kind."""


class _Identity(_Said):
    boot: Name
    network: Name


class _Interface(_Said):
    addresses: Annotated[list[Name], msgspec.Meta(max_length=4096)]
    up: bool | None
    mtu_bytes: Count | None
    speed_bits_per_second: Count | None


class _Gpu(_Said):
    name: Name | None
    memory_total_bytes: Count | None
    uuid: Name | None


class _VisibleGpu(_Said):
    visible_as: Name
    uuid: Name | None
    gpu: Number | None


class _Host(_Said):
    hostname: Name | None
    cpu_model: Name | None
    cores_logical: Count | None
    cores_physical: Count | None
    cores_affinity: Count | None
    cores_quota: Duration | None
    cores_available: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None
    memory_total_bytes: Count
    memory_limit_bytes: Count | None
    interfaces: Annotated[dict[Name, _Interface], msgspec.Meta(max_length=4096)]
    operating_system: Name
    kernel: Name
    machine: Name
    python: Name
    packages: Annotated[dict[Name, Name | None], msgspec.Meta(max_length=4096)]
    gpus: Annotated[list[_Gpu], msgspec.Meta(max_length=4096)] | None
    gpu_driver: Name | None
    gpu_problem: Text | None
    visible_gpus: Annotated[list[_VisibleGpu], msgspec.Meta(max_length=4096)] | None


class _Hello(_Said):
    protocol: int
    node: Number
    pid: Pid
    identity: _Identity
    host: _Host
    scratch: Name
    address: Name | None


class _Ports(_Said):
    ports: Annotated[list[Port], msgspec.Meta(max_length=65535)]


class _Sample(_Said):
    record: SystemRecord


class _States(_Said):
    states: dict[Name, Annotated[str, msgspec.Meta(min_length=1, max_length=1)]]


class _Stack(_Said):
    text: Annotated[str, msgspec.Meta(max_length=MOST_STACK_CHARACTERS)]
    problem: Name | None


class _Stacks(_Said):
    number: Count
    stacks: Annotated[dict[Name, _Stack], msgspec.Meta(max_length=4096)]


class _Nothing(_Said):
    pass


class _Log(_Said):
    task: Any  # what is no name of a file is told by whoever would write it


class _Trace(_Said):
    path: Any


class _Death(_Said):
    task: Name
    pid: Pid
    code: Code | None
    signal: Name | None
    order: Number
    cpu_seconds: Duration | None
    max_rss_bytes: Count | None
    tail: Annotated[list[Text], msgspec.Meta(max_length=1000)]
    oom_kills: Count | None = None


class _OfTask(_Said):
    from_: Name


class _Ready(_OfTask):
    precision_used: Name | None
    device_used: Name | None


class _Phase(_OfTask):
    name: Name


class _WorkerStalled(_OfTask):
    worker: Number


class _Error(_OfTask):
    type: Name
    message: Text
    errno: Code | None
    exit_code: Code | None
    peer_lost: bool
    out_of_memory: Text | None = None


class _Done(_OfTask):
    sequence: Count
    command: Name
    seconds: Duration
    drain_seconds: Duration


class _Steps(_OfTask):
    first_step: Count
    examples: Count
    seconds: Elapsed
    data_wait_seconds: Duration | None
    network_wait_seconds: Duration | None
    worker: Number | None


class _Evaluated(_OfTask):
    split: Name
    sums: Annotated[dict[Name, float], msgspec.Meta(max_length=MOST_SUMS)]
    seconds: Duration
    updates_applied: Count


class _Predicted(_OfTask):
    start: Count


class _Decoded(_OfTask):
    start: Count
    sums: Annotated[dict[Name, float], msgspec.Meta(max_length=MOST_SUMS)]
    without_numbers: Count
    seconds: Duration


class _Translated(_OfTask):
    order: Count


class _Calibrated(_OfTask):
    worker: Number
    count: Count
    seconds: Elapsed
    native: Annotated[dict[Name, float], msgspec.Meta(max_length=1000)]


class _Memory(_Said):
    pid: Pid
    mark_address: Address
    mark: Name


_Shape = Annotated[list[Count], msgspec.Meta(max_length=64)]


class _StateBegin(_OfTask):
    sequence: Count
    entries: list[tuple[Name, Name, _Shape]]
    updates: Count
    scalars: Annotated[dict[Name, float], msgspec.Meta(max_length=1000)]
    memory: _Memory
    addresses: list[Address]


class _StateChunk(_OfTask):
    sequence: Count


_KINDS: Mapping[str, type[_Said]] = {
    "alive": _Nothing,
    "leaving": _Nothing,
    "hello": _Hello,
    "ports": _Ports,
    "sample": _Sample,
    "sampled": _Nothing,
    "states": _States,
    "stacks": _Stacks,
    "stopped": _Nothing,
    "log": _Log,
    "trace": _Trace,
    "death": _Death,
    "ready": _Ready,
    "phase": _Phase,
    "worker_stalled": _WorkerStalled,
    "error": _Error,
    "done": _Done,
    "steps": _Steps,
    "evaluated": _Evaluated,
    "predicted": _Predicted,
    "decoded": _Decoded,
    "translated": _Translated,
    "calibrated": _Calibrated,
    "state_begin": _StateBegin,
    "state_part": _StateChunk,
    "state_end": _StateChunk,
}

_ARRAYS: Mapping[str, Mapping[str, tuple[str, int]]] = {
    "log": {"text": ("|u1", 1)},
    "trace": {"data": ("|u1", 1)},
    "state_part": {"data": ("|u1", 1)},
    "steps": {"losses": ("<f4", 1), "staleness": ("<i8", 1)},
    "predicted": {"logits": ("<f4", 2)},
    "translated": {
        **dict.fromkeys(("counts", "lengths", "pieces", "ended"), ("<i8", 1)),
        **dict.fromkeys(("scores", "log_probabilities"), ("<f8", 1)),
    },
}
"""The arrays that a kind has: their type and number of dimensions."""

_MOST_BYTES = {"log": FILE_PIECE_BYTES, "trace": FILE_PIECE_BYTES, "state_part": CHUNK_BYTES}
"""Of what comes in chunks: how large each may be."""

_OF_SAMPLE, _OF_TASK_SAMPLE = (frozenset(field.name for field in fields(kind)) for kind in (SystemRecord, TaskSample))
"""The fields that a sample of a node has, and those of each of its tasks."""

_ITEM_BYTES = {"|u1": 1, "<f4": 4, "<f8": 8, "<i8": 8}
_OPTIONAL = frozenset({"staleness"})
_SPARE = re.compile(r"spare-[1-9][0-9]{0,8}")
"""What a sample calls a process that is kept for a restart."""

_MAY_BE_NAN = ("evaluated", "sums")
"""What diverged is not finite; `--on-nan` says what becomes of the run. Losses of steps are an array."""

_MAY_BE_NO_UNICODE = ("hello", "scratch")
"""The path of a folder on the node, which is only used as such."""


def wrong_with(node: int, message: Message, node_of: Mapping[str, int]) -> str | None:
    """Return what is wrong with a message of a node, or None; `node_of` says on which node each task is."""
    what = f"a message {message.kind[:100]!r}"
    schema = _KINDS.get(message.kind)
    if schema is None:
        return f"{what}, which is of no kind that there is"
    if message.kind == "hello" and isinstance(protocol := message.get("protocol"), int) and protocol != PROTOCOL:
        return None  # an agent of another release: whoever awaits the greeting says so
    if (unfit := _unfit(message)) is not None:
        return f"{what} with {unfit}"
    try:
        said = msgspec.convert(dict(message.fields), schema)
    except msgspec.ValidationError as error:
        return f"{what} that is none ({str(error)[:300]})"
    if (arrays := _wrong_with_arrays(message)) is not None:
        return f"{what} {arrays}"
    if isinstance(said, _OfTask | _Death) and node_of.get(said.from_ if isinstance(said, _OfTask) else said.task) != node:
        return f"{what} for a task that it does not have"
    if isinstance(said, _Stacks) and any(node_of.get(task) != node for task in said.stacks):
        return f"{what} for a task that it does not have"
    if isinstance(said, _Hello) and said.node != node:
        return f"{what} of node {said.node}"
    if isinstance(said, _Hello) and said.address is not None and not _is_address(said.address):
        return f"{what} from {said.address[:100]!r}, which is no address"
    if isinstance(said, _Sample):
        return _wrong_with_sample(node, message["record"], node_of)
    if isinstance(said, _StateBegin) and len(said.addresses) != len(said.entries):
        return f"{what} with {len(said.addresses)} addresses of {len(said.entries)} arrays"
    return None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _wrong_with_arrays(message: Message) -> str | None:
    wanted = _ARRAYS.get(message.kind, {})
    for name in message.arrays:
        if name not in wanted:
            return f"with an array {str(name)[:100]!r}"
    for name, (dtype, dimensions) in wanted.items():
        array = message.arrays.get(name)
        if array is None and name in _OPTIONAL:
            continue
        if not isinstance(array, RawArray):
            return f"without its array {name!r}"
        if array.dtype != dtype or len(array.shape) != dimensions or math.prod(array.shape) * _ITEM_BYTES[dtype] != len(array.data):
            return f"whose array {name!r} is of another type or shape"
        if len(array.data) > _MOST_BYTES.get(message.kind, MAX_ARRAY_BYTES) or (message.kind == "state_part" and not array.data):
            return f"of {len(array.data)} bytes"
    return None


def _wrong_with_sample(node: int, record: Mapping[str, Any], node_of: Mapping[str, int]) -> str | None:
    """Return what is wrong with a sample beyond the types of its fields: all are there, no others, and its tasks are the node's own."""
    for names, value in ((_OF_SAMPLE, record), *((_OF_TASK_SAMPLE, task) for task in record.get("tasks", ()))):
        if names != value.keys():
            return f"a message 'sample' whose fields {sorted(names ^ value.keys())!s:.300} are missing or unknown"
    of_gpus = [task for gpu in record["gpus"] or () for task in gpu.get("tasks", ())]
    named = [*(task["task"] for task in record["tasks"] if not _SPARE.fullmatch(task["task"])), *of_gpus]
    if any(node_of.get(task) != node for task in named):
        return "a message 'sample' for a task that it does not have"
    return None


def _unfit(message: Message) -> str | None:
    """Return what of a message's values could not be written to files: numbers that are none, texts that are none, nesting beyond sense."""
    for key, value in message.fields.items():
        is_path = (message.kind, key) == _MAY_BE_NO_UNICODE and isinstance(value, str)
        may_be_nan = (message.kind, key) == _MAY_BE_NAN
        unfit = _unfit_in([key] if is_path else [key, value], may_be_nan=may_be_nan)
        if unfit is not None:
            return unfit
    return None


def _unfit_in(values: list[Any], *, may_be_nan: bool) -> str | None:
    """Return what of some values, and of all that they consist of, could not be written."""
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
