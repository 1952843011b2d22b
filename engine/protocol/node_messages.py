"""Validation of messages from nodes, which may be broken or hostile."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any

import msgspec

from ...core.bounded_json import MOST_LINE_BYTES, MOST_VALUES
from ...metrics.base import MOST_SUMS
from ...records.store.schema import MOST_PROBLEM_CHARACTERS, MOST_PROBLEMS, Count, Seconds, SystemRecord, TaskSample
from .answer_checks import (
    MOST_GPUS,
    MOST_INTERFACES,
    Address,
    Code,
    Duration,
    Host,
    Identity,
    Label,
    Name,
    Number,
    Pid,
    Port,
    Said,
    Text,
    converted,
    is_address,
    unfit_in,
)
from .messages import (
    FILE_PIECE_BYTES,
    MAX_ARRAY_BYTES,
    MOST_ERROR_CHARACTERS,
    MOST_PEERS_PROBED,
    MOST_STACK_CHARACTERS,
    PROTOCOL,
    Message,
    RawArray,
)
from .state_transfer import CHUNK_BYTES

Elapsed = Seconds  # by TensorFlow's wall clock: negative where it was set back
MOST_INTERVAL_SECONDS = 1e7  # between two samples (four months); a record holds sums of thousands
MOST_FIGURE = 2**53  # bound of a sample's figures: means stay finite and readable


class _Hello(Said):
    protocol: int
    node: Number
    pid: Pid
    identity: Identity
    host: Host
    scratch: Name
    address: Name | None


class _Ports(Said):
    ports: Annotated[list[Port], msgspec.Meta(max_length=65535)]


class _Sample(Said):
    record: SystemRecord


class _SampledGpu(msgspec.Struct):
    name: Label | None = None
    tasks: Annotated[list[Any], msgspec.Meta(max_length=MOST_GPUS)] = msgspec.field(default_factory=list)


class _SampleBounds(msgspec.Struct):
    """Bounds of a sample beyond `SystemRecord`'s, as several may be merged into one line."""

    interval_seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_INTERVAL_SECONDS)]
    network_source: Label | None
    interfaces: Annotated[dict[Label, Any], msgspec.Meta(max_length=MOST_INTERFACES)] | None
    gpus: Annotated[list[_SampledGpu], msgspec.Meta(max_length=MOST_GPUS)] | None
    problems: Annotated[list[Annotated[str, msgspec.Meta(max_length=MOST_PROBLEM_CHARACTERS)]], msgspec.Meta(max_length=MOST_PROBLEMS)]


class _ProbePort(Said):
    number: Count
    port: Port | None


_Nodes = Annotated[list[Number], msgspec.Meta(max_length=MOST_PEERS_PROBED)]


class _PeersProbed(Said):
    number: Count
    reached: _Nodes
    heard: _Nodes


class _States(Said):
    states: dict[Name, Annotated[str, msgspec.Meta(min_length=1, max_length=1)]]


class _Stack(Said):
    text: Annotated[str, msgspec.Meta(max_length=MOST_STACK_CHARACTERS)]
    problem: Annotated[str, msgspec.Meta(max_length=1000)] | None


class _Stacks(Said):
    number: Count
    stacks: Annotated[dict[Name, _Stack], msgspec.Meta(max_length=4096)]


class _Nothing(Said):
    pass


class _Log(Said):
    task: Any  # checked as a file name where written


class _Trace(Said):
    path: Any


class _Death(Said):
    task: Name
    pid: Pid | None
    code: Code | None
    signal: Name | None
    order: Number
    cpu_seconds: Duration | None
    max_rss_bytes: Count | None
    tail: Annotated[list[Text], msgspec.Meta(max_length=1000)]
    oom_kills: Count | None = None


class _OfTask(Said):
    from_: Name


class _Ready(_OfTask):
    precision_used: Name | None
    device_used: Name | None


class _CompileTimed(_OfTask):
    plain_seconds: Elapsed
    compiled_seconds: Elapsed | None
    reason: Text | None
    tasks: Number


class _Phase(_OfTask):
    name: Name


class _WorkerStalled(_OfTask):
    worker: Number


_ErrorText = Annotated[str, msgspec.Meta(max_length=MOST_ERROR_CHARACTERS)]


class _Error(_OfTask):
    type: Name
    message: _ErrorText
    errno: Code | None
    exit_code: Code | None
    peer_lost: bool
    out_of_memory: _ErrorText | None = None


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
    profiled_seconds: Duration | None


class _Evaluated(_OfTask):
    sequence: Count
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
    complete: bool


class _Translated(_OfTask):
    order: Count


class _Calibrated(_OfTask):
    worker: Number
    count: Count
    seconds: Elapsed
    native: Annotated[dict[Name, float], msgspec.Meta(max_length=1000)]
    refused: Text | None


class _Memory(Said):
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


_KINDS: Mapping[str, type[Said]] = {
    "alive": _Nothing,
    "leaving": _Nothing,
    "hello": _Hello,
    "ports": _Ports,
    "sample": _Sample,
    "sampled": _Nothing,
    "states": _States,
    "probe_port": _ProbePort,
    "peers_probed": _PeersProbed,
    "stacks": _Stacks,
    "stopped": _Nothing,
    "log": _Log,
    "trace": _Trace,
    "death": _Death,
    "ready": _Ready,
    "compile_timed": _CompileTimed,
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
_MOST_BYTES = {"log": FILE_PIECE_BYTES, "trace": FILE_PIECE_BYTES, "state_part": CHUNK_BYTES}  # of chunks
_OF_SAMPLE, _OF_TASK_SAMPLE = (frozenset(field.name for field in fields(kind)) for kind in (SystemRecord, TaskSample))
# Bytes and values recorded as they are: far below readers' limits, as more is added
_MOST_WRITTEN = {"sample": (MOST_LINE_BYTES // 2, MOST_VALUES // 4), "hello": (2**20, 50_000)}
_ITEM_BYTES = {"|u1": 1, "<f4": 4, "<f8": 8, "<i8": 8}
_OPTIONAL = frozenset({"staleness"})
_SPARE = re.compile(r"spare-[1-9][0-9]{0,8}")  # name in samples of a standby process
_MAY_BE_NAN = ("evaluated", "sums")  # not finite after divergence, which `--on-nan` handles; losses of steps are an array
_MAY_BE_NO_UNICODE = ("hello", "scratch")  # the node's folder, used only as a path


def wrong_with(node: int, message: Message, node_of: Mapping[str, int]) -> str | None:
    """Return the problem of a node's message, or None; `node_of` maps tasks to nodes."""
    what = f"a message {message.kind[:100]!r}"
    schema = _KINDS.get(message.kind)
    if schema is None:
        return f"{what}, which is of no kind that there is"
    if message.kind == "hello" and isinstance(protocol := message.get("protocol"), int) and protocol != PROTOCOL:
        return None  # another release, reported with the greeting
    if (unfit := _unfit(message)) is not None:
        return f"{what} with {unfit}"
    if (size := _too_large(message)) is not None:
        return f"{what} with {size}, which nobody could read again"
    try:
        content = converted(dict(message.fields), schema)
    except msgspec.ValidationError as error:
        return f"{what} that is none ({str(error)[:300]})"
    wrong = _wrong_with_arrays(message)
    if wrong is None and any(node_of.get(task) != node for task in _tasks_of(content)):
        wrong = "for a task that it does not have"
    if wrong is None:
        wrong = _wrong_with_sample(node, message["record"], node_of) if message.kind == "sample" else _wrong_with_content(node, content)
    return None if wrong is None else f"{what} {wrong}"


def _tasks_of(content: Said) -> Collection[str]:
    if isinstance(content, _OfTask):
        return (content.from_,)
    if isinstance(content, _Death):
        return (content.task,)
    return content.stacks if isinstance(content, _Stacks) else ()


def _wrong_with_content(node: int, content: Said) -> str | None:
    if isinstance(content, _Hello) and content.node != node:
        return f"of node {content.node}"
    if isinstance(content, _Hello) and content.address is not None and not is_address(content.address):
        return f"from {content.address[:100]!r}, which is no address"
    if isinstance(content, _StateBegin) and len(content.addresses) != len(content.entries):
        return f"with {len(content.addresses)} addresses of {len(content.entries)} arrays"
    return None


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
    """Check a sample beyond field types: all fields, no others, only the node's tasks."""
    for names, value in ((_OF_SAMPLE, record), *((_OF_TASK_SAMPLE, task) for task in record.get("tasks", ()))):
        if names != value.keys():
            return f"whose fields {sorted(names ^ value.keys())!s:.300} are missing or unknown"
    of_gpus = [task for gpu in record["gpus"] or () for task in gpu.get("tasks", ())]
    named = [*(task["task"] for task in record["tasks"] if not _SPARE.fullmatch(task["task"])), *of_gpus]
    if any(node_of.get(task) != node for task in named):
        return "for a task that it does not have"
    try:
        converted(record, _SampleBounds)
    except msgspec.ValidationError as error:
        return f"that is none ({str(error)[:300]})"
    parts = (record, *record["tasks"], *(record["gpus"] or ()))
    if any(isinstance(value, int | float) and abs(value) > MOST_FIGURE for part in parts for value in part.values()):
        return "with a figure that nothing has"
    return None


def _too_large(message: Message) -> str | None:
    if message.kind not in _MOST_WRITTEN:
        return None
    most_bytes, most_values = _MOST_WRITTEN[message.kind]
    written = json.dumps(dict(message.fields))
    values = written.count(",") + written.count("[") + written.count("{")
    return f"{len(written):,} bytes in {values:,} values" if len(written) > most_bytes or values > most_values else None


def _unfit(message: Message) -> str | None:
    for key, value in message.fields.items():
        is_path = (message.kind, key) == _MAY_BE_NO_UNICODE and isinstance(value, str)
        may_be_nan = (message.kind, key) == _MAY_BE_NAN
        unfit = unfit_in([key] if is_path else [key, value], may_be_nan=may_be_nan)
        if unfit is not None:
            return unfit
    return None
