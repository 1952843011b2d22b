"""What readers may rely on in the documents of a run directory; a file that lacks it is damaged, and is named with its field.

What every release has written has to be there. Of other fields only the type is checked, since a file of an earlier release lacks them:
readers get null for those, and pass over fields that they do not know. Bounds are those of sense, far from what is measured: a figure
beyond them was not written by a run, and would make figures that are computed from it none. docs/run-directory.md has all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)

from ..core.job import Job
from ..core.reading import first_problem
from .lines import DamagedRunError
from .records import SCHEMA

__all__ = ["checked_document", "summary_type"]

MOST_NODES = 4096
MOST_TASKS = 1 << 16


def _as_it_is(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Check a number, and leave a whole one whole."""
    validate(value)
    return value


Figure = Annotated[float, Field(ge=-1e30, le=1e30), WrapValidator(_as_it_is)]
Loss = Annotated[float, Field(ge=-1e40, le=1e40), WrapValidator(_as_it_is)] | Literal["NaN", "Infinity", "-Infinity"]
"""A float32, or the mean of such; as `finite_json` writes it."""

Seconds = Annotated[float, Field(ge=-1e12, le=1e12), WrapValidator(_as_it_is)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Node = Annotated[int, Field(ge=0, lt=MOST_NODES)]
Worker = Annotated[int, Field(ge=0, lt=MOST_TASKS)]
Text = Annotated[str, Field(max_length=1 << 16)]
Name = Annotated[str, Field(max_length=4096)]


def _moment(text: str) -> str:
    try:
        datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise ValueError("a time as ISO 8601 writes it, such as 2026-05-01T10:00:00.000+00:00, is needed") from None
    return text


Moment = Annotated[str, Field(max_length=100), AfterValidator(_moment)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


# summary.json --------------------------------------------------------------------------------------------------------


class _StepSeconds(_Part):
    p50: Seconds | None = None
    p95: Seconds | None = None
    max: Seconds | None = None
    group_size: Figure | None = None


class _Evaluation(_Part):
    split: Name | None = None
    step: Count | None = None
    epoch: Figure | None = None
    time_seconds: Seconds | None = None
    examples: Count | None = None
    loss: Loss | None = None
    accuracy: Loss | None = None


class _Staleness(_Part):
    mean: Figure | None = None
    p95: Figure | None = None
    max: Figure | None = None


class _RunShares(_Part):
    train_seconds: Seconds = 0.0
    eval_seconds: Seconds = 0.0
    checkpoint_seconds: Seconds = 0.0
    other_seconds: Seconds = 0.0


class _StepShares(_Part):
    node: Node
    step_seconds: Seconds | None = None
    data_seconds: Seconds | None = None
    compute_seconds: Seconds | None = None
    peers_seconds: Seconds | None = None
    communicate_seconds: Seconds | None = None
    spread: Figure | None = None


class _WorkerShares(_StepShares):
    worker: Worker


class _TimeShares(_Part):
    method: Name | None = None
    overlap_fraction: Figure | None = None
    run: _RunShares = Field(default_factory=_RunShares)
    workers: Annotated[list[_WorkerShares], Field(max_length=MOST_TASKS)] = Field(default_factory=list)
    nodes: Annotated[list[_StepShares], Field(max_length=MOST_NODES)] = Field(default_factory=list)
    native: dict[Name, Figure | None] = Field(default_factory=dict)


class _MeanMax(_Part):
    mean: Figure | None = None
    max: Figure | None = None


class _Gpu(_Part):
    name: Name | None = None
    utilization: _MeanMax | None = None
    memory_bytes: _MeanMax | None = None
    power_watts: _MeanMax | None = None


class _Node(_Part):
    node: Node | None = None
    train_seconds: Seconds | None = None
    samples: Count | None = None
    cores_available: Figure | None = None
    cpu_seconds: Seconds | None = None
    cpu_cores_used: _MeanMax | None = None
    cpu_fraction: _MeanMax | None = None
    memory_rss_bytes: _MeanMax | None = None
    memory_pss_bytes: _MeanMax | None = None
    network_source: Name | list[Name] | None = None
    network_sent_bytes: Count | None = None
    network_received_bytes: Count | None = None
    network_sent_bytes_per_second: Figure | None = None
    network_received_bytes_per_second: Figure | None = None
    disk_read_bytes: Count | None = None
    disk_written_bytes: Count | None = None
    gpus: Annotated[list[_Gpu], Field(max_length=MOST_NODES)] | None = None
    monitor_cpu_seconds: Seconds | None = None
    monitor_cpu_cores_used: Figure | None = None


class _Checkpoints(_Part):
    saved: Count
    failed: Count
    stall_seconds: _MeanMax | None = None
    bytes: Count | None = None


class _Summary(_Part):
    state: Name
    run: Name
    backend: Name | None = None
    mode: Name | None = None
    model: Name | None = None
    data: Name | None = None
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] | None = None
    workers: Annotated[int, Field(ge=1, le=MOST_TASKS)] | None = None
    parameter_servers: Worker | None = None
    batch_size: Count | None = None
    global_batch_size: Count | None = None
    optimizer: Name | None = None
    learning_rate: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    precision: Name | None = None
    precision_used: Name | None = None
    synthetic: bool | None = None
    resumed: Count | None = None
    network_source: Name | list[Name] | None = None
    nodes_sharing_cores: Node | None = None
    steps: Count
    updates_scheduled: Count | None = None
    updates_applied: Count | None = None
    examples: Count | None = None
    epochs: Figure | None = None
    init_seconds: Seconds | None = None
    train_seconds: Seconds | None = None
    eval_seconds: Seconds | None = None
    checkpoint_seconds: Seconds | None = None
    run_seconds: Seconds | None = None
    total_seconds: Seconds | None = None
    steps_per_second: Figure | None = None
    examples_per_second: Figure | None = None
    step_seconds: _StepSeconds | None = None
    data_wait_seconds: Seconds | None = None
    network_wait_seconds: Seconds | None = None
    final_train_loss: Loss | None = None
    non_finite_losses: Count | None = None
    eval: _Evaluation | None = None
    best_eval: _Evaluation | None = None
    target: Name | None = None
    target_reached: bool | None = None
    time_to_target_seconds: Seconds | None = None
    staleness: _Staleness | None = None
    updates_by_worker: Annotated[list[Count], Field(max_length=MOST_TASKS)] | None = None
    checkpoints: _Checkpoints | None = None
    time_shares: _TimeShares | None = None
    per_node: Annotated[list[_Node], Field(max_length=MOST_NODES)]

    @model_validator(mode="after")
    def _numbered(self) -> Self:
        for number, node in enumerate(self.per_node):  # they are in node order
            node.node = number
        return self


# env.json, status.json, calibration.json -----------------------------------------------------------------------------


class _Interface(_Part):
    addresses: list[Name] = Field(default_factory=list)
    speed_bits_per_second: Figure | None = None


class _HostGpu(_Part):
    name: Name | None = None
    memory_total_bytes: Count | None = None


class _Host(_Part):
    hostname: Name | None = None
    cpu_model: Name | None = None
    cores_affinity: Count | None = None
    cores_quota: Figure | None = None
    cores_available: Annotated[float, Field(ge=0, le=1e9)] | None = None
    memory_total_bytes: Count | None = None
    memory_limit_bytes: Count | None = None
    interfaces: dict[Name, _Interface] | None = None
    operating_system: Name | None = None
    kernel: Name | None = None
    machine: Name | None = None
    python: Name | None = None
    packages: dict[Name, Name | None] | None = None
    gpus: Annotated[list[_HostGpu], Field(max_length=MOST_NODES)] | None = None


class _Environment(_Part):
    nodes: Annotated[list[_Host], Field(max_length=MOST_NODES)]


class _Driver(_Part):
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    host: Name
    process_started_unix_seconds: Seconds | None


class _Status(_Part):
    state: Name
    cause: Text | None
    exit_code: int | None = None
    task: Name | None = None
    driver: _Driver
    created_at: Moment
    changed_at: Moment | None = None


class _CalibratedWorker(_Part):
    worker: Worker
    node: Node
    data_seconds: Seconds
    compute_seconds: Seconds
    half_compute_seconds: Seconds | None = None
    communicate_seconds: Seconds | None = None
    message_seconds: Seconds | None = None
    spread: Figure | None = None


class _Calibration(_Part):
    seconds: Seconds | None = None
    payload_bytes: Count
    batch_size: Annotated[int, Field(ge=1, le=2**53)]
    half_batch_size: Count
    workers: Annotated[list[_CalibratedWorker], Field(max_length=MOST_TASKS)]
    native: dict[Name, Figure | None] = Field(default_factory=dict)


# job.json ------------------------------------------------------------------------------------------------------------


_LACKING: Any = None
"""A field may be lacking; where it is there, it is no null."""


class _Segment(_Part):
    started_at: Moment = _LACKING
    command: list[Text] = _LACKING
    step: Count = _LACKING
    epoch: Count = _LACKING
    examples: Count = _LACKING
    run_seconds: Seconds
    checkpoint: Name = _LACKING
    changed: dict[str, Any] = _LACKING


class _Dataset(_Part):
    name: Name = _LACKING
    digest: Name = _LACKING
    sizes: dict[Name, Count] = _LACKING
    input_shape: Annotated[list[Count], Field(max_length=8)]
    classes: Count


class _Cluster(_Part):
    addresses: Annotated[list[Name | None], Field(max_length=MOST_NODES)] = Field(default_factory=list)


class _Decided(_Part):
    """What the driver adds to the fields of the job."""

    global_batch_size_resolved: Count = _LACKING
    total_steps: Count = _LACKING
    dataset: _Dataset = _LACKING
    sources: dict[Name, Text] = _LACKING
    command: list[Text] = _LACKING
    cluster: _Cluster = _LACKING
    threads_per_task: Annotated[list[Count], Field(max_length=MOST_NODES)] = _LACKING
    segments: Annotated[list[_Segment], Field(max_length=MOST_TASKS)] = _LACKING


def _in_json(declared: Any) -> Any:
    """Return a field's type as JSON has it: a path is a text there, a tuple a list."""
    if declared is Path:
        return Name
    if declared is str:
        return Text
    if get_origin(declared) in (Union, UnionType):
        return Union[tuple(map(_in_json, get_args(declared)))]  # noqa: UP007 — the types are known at run time alone
    return list[get_args(declared)[0]] if get_origin(declared) is tuple else declared  # type: ignore[misc]


_BOUNDED: Mapping[str, int] = {"nodes": MOST_NODES, "procs_per_node": MOST_TASKS, "ps": MOST_NODES}
"""Fields that say how many there are of something, which readers may go through."""


def _recorded(name: str) -> Any:
    info = Job.model_fields[name]
    default = str(info.default) if isinstance(info.default, Path) else info.default
    return Annotated[(_in_json(info.annotation), *info.metadata, Field(le=_BOUNDED.get(name)))], default


_Recorded = create_model("_Recorded", __base__=_Decided, **{name: _recorded(name) for name in Job.model_fields})
"""``job.json``: a field that the release which wrote it did not have yet is what the job does without."""

_DEFAULTS = {name: default for name, (_, default) in ((name, _recorded(name)) for name in Job.model_fields)}

_KINDS: Mapping[str, type[_Part]] = {
    "summary.json": _Summary,
    "env.json": _Environment,
    "status.json": _Status,
    "job.json": _Recorded,
    "calibration.json": _Calibration,
}


def summary_type(path: Sequence[str]) -> Any:
    """Return the type of a figure of ``summary.json``, which lies at `path`, or None in its place."""
    declared: Any = _Summary
    for name in path:
        info = next(kind for kind in _parts(declared) if isinstance(kind, type) and issubclass(kind, _Part)).model_fields[name]
        declared = Annotated[(info.annotation, *info.metadata, Field())]
    return declared | None


def _parts(declared: Any) -> Iterator[Any]:
    """Yield what a type consists of: itself, the types of a union or list, and so on."""
    yield declared
    for part in get_args(declared):
        yield from _parts(part)


def checked_document(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with null for every field of this release that it lacks; a job with the default of every setting that it lacks.

    Raises DamagedRunError, naming file and field, where it is of another schema, or a field is missing, of another type or out of bounds.
    """
    found = fields.get("schema")
    if found != SCHEMA:
        raise DamagedRunError(f"{path}: has schema {found!r}; this release reads {SCHEMA}.")
    try:
        checked = _KINDS[path.name].model_validate(fields)
        return {**_DEFAULTS, **fields} if isinstance(checked, _Recorded) else checked.model_dump()
    except ValidationError as error:
        raise DamagedRunError(f"{path}: {first_problem(error)}.") from error
