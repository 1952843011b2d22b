"""Schemas of run documents: fields of every release are required, others optional."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import AfterValidator, Field, ValidationError, create_model, model_validator

from ...core.bounded_json import JsonObject, first_problem
from ...core.cluster import workers_by_node
from ...core.job import MAX_NODES, Job
from ...metrics import Better
from ...metrics.base import MAX_METRICS
from .jsonl import MAX_TASKS, Count, DamagedRunError, Duration, Figure, Moment, Name, Node, Seconds, State, Text, Worker
from .schema import SCHEMA
from .summary_schema import Summary

MAX_PACKAGES = 64  # per framework
_OPTIONAL: Any = None  # default of a field that may be missing, but not null


class _Segment(JsonObject):
    started_at: Moment = _OPTIONAL
    command: list[Text] = _OPTIONAL
    step: Count = _OPTIONAL
    epoch: Count = _OPTIONAL
    examples: Count = _OPTIONAL
    run_seconds: Duration
    checkpoint: Name = _OPTIONAL
    changed: dict[str, Any] = _OPTIONAL


class _Stored(JsonObject):
    bytes: Count = _OPTIONAL
    elements: Annotated[dict[Name, Count], Field(max_length=100)] = _OPTIONAL


class _Dataset(JsonObject):
    name: Name = _OPTIONAL
    digest: Name = _OPTIONAL
    sizes: dict[Name, Count] = _OPTIONAL
    input_shape: Annotated[list[Count], Field(max_length=8)] = _OPTIONAL
    classes: Count = _OPTIONAL
    commonest_class_fraction: Annotated[float, Field(ge=0, le=1)] | None = _OPTIONAL
    columns: Annotated[list[dict[str, Any]], Field(max_length=100)] = _OPTIONAL
    vocabulary_sizes: Annotated[dict[Name, Count], Field(max_length=100)] = _OPTIONAL
    stored: Annotated[dict[Name, _Stored], Field(max_length=100)] = _OPTIONAL


class _VisibleGpu(JsonObject):
    visible_as: Name
    uuid: Name | None = None
    gpu: Count | None = None


class _Cluster(JsonObject):
    addresses: Annotated[list[Name | None], Field(max_length=MAX_NODES)] = Field(default_factory=list)


_MetricName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]


class _Metric(JsonObject):
    name: _MetricName
    label: Name
    better: Better


class _Signatures(JsonObject):
    training: Name | None = None
    end: Name | None = None


class _Decided(JsonObject):
    """Driver's additions to the job's fields."""

    global_batch_size_resolved: Count | None = _OPTIONAL
    total_steps: Count = _OPTIONAL
    compiled: bool | None = _OPTIONAL
    dataset: _Dataset = _OPTIONAL
    sources: dict[Name, Text] = _OPTIONAL
    command: list[Text] = _OPTIONAL
    cluster: _Cluster = _OPTIONAL
    threads_per_task: Annotated[list[Count | None], Field(max_length=MAX_NODES)] = _OPTIONAL
    gpu_of_task: Annotated[dict[Name, _VisibleGpu | None], Field(max_length=MAX_TASKS)] = _OPTIONAL
    segments: Annotated[list[_Segment], Field(max_length=MAX_TASKS)] = _OPTIONAL
    model_method: Name | None = _OPTIONAL
    adapter_cost: Figure | None = _OPTIONAL
    framework_packages: Annotated[list[Name], Field(max_length=MAX_PACKAGES)] = _OPTIONAL
    metrics: Annotated[list[_Metric], Field(max_length=MAX_METRICS)] = _OPTIONAL
    translation_metrics: Annotated[list[_MetricName], Field(max_length=MAX_METRICS)] | None = _OPTIONAL
    translation_signatures: _Signatures | None = _OPTIONAL

    @model_validator(mode="after")
    def _workers_of_each_node(self) -> Self:
        try:
            workers_by_node(self.procs_per_node, self.nodes)  # type: ignore[attr-defined] # fields of the job
        except ValueError as error:
            raise ValueError(f"procs_per_node: {error}") from None
        return self


def _in_json(declared: Any) -> Any:
    if declared is Path:
        return Name
    if declared is str:
        return Text
    if get_origin(declared) in (Union, UnionType):
        return Union[tuple(map(_in_json, get_args(declared)))]  # noqa: UP007 — the types are known at run time only
    return Annotated[list[get_args(declared)[0]], Field(min_length=1)] if get_origin(declared) is tuple else declared  # type: ignore[misc]


_MAX_QUANTITY = 60  # characters of a text that the job parses


def _recorded(name: str) -> Any:
    info = Job.model_fields[name]
    short = [Field(max_length=_MAX_QUANTITY)] if any(isinstance(item, AfterValidator) for item in info.metadata) else []
    default = str(info.default) if isinstance(info.default, Path) else info.default
    return Annotated[(_in_json(info.annotation), Field(), *short, *info.metadata)], default


_JOB_FIELDS = {name: _recorded(name) for name in Job.model_fields}
# Settings of later releases have their defaults.
RecordedJob = create_model("RecordedJob", __base__=_Decided, **_JOB_FIELDS)
JOB_DEFAULTS = {name: default for name, (_, default) in _JOB_FIELDS.items()}


class _Interface(JsonObject):
    addresses: list[Name] = Field(default_factory=list)
    speed_bits_per_second: Figure | None = None


class _HostGpu(JsonObject):
    name: Name | None = None
    memory_total_bytes: Count | None = None
    uuid: Name | None = None


class _Host(JsonObject):
    hostname: Name | None = None
    cpu_model: Name | None = None
    cores_affinity: Count | None = None
    cores_quota: Figure | None = None
    cores_available: Annotated[float, Field(ge=0, le=1e9)] | None = None
    memory_total_bytes: Figure | None = None
    memory_limit_bytes: Figure | None = None
    interfaces: dict[Name, _Interface] | None = None
    operating_system: Name | None = None
    kernel: Name | None = None
    machine: Name | None = None
    cpu_flags: Annotated[list[Name], Field(max_length=1000)] | None = None
    python: Name | None = None
    packages: dict[Name, Name | None] | None = None
    gpus: Annotated[list[_HostGpu], Field(max_length=MAX_NODES)] | None = None
    gpu_driver: Name | None = None
    visible_gpus: Annotated[list[_VisibleGpu], Field(max_length=MAX_NODES)] | None = None


class _WorkTree(JsonObject):
    commit: Name
    changed: bool | None = None


class _Code(JsonObject):
    packages: dict[Name, Name] = Field(default_factory=dict)
    typed_in: _WorkTree | None = None
    crosstrain: _WorkTree | None = None


class _Environment(JsonObject):
    nodes: Annotated[list[_Host], Field(max_length=MAX_NODES)]
    code: _Code | None = None


class _Driver(JsonObject):
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    host: Name
    process_started_unix_seconds: Seconds | None


class _Status(JsonObject):
    state: State
    cause: Text | None
    exit_code: int | None = None
    task: Name | None = None
    driver: _Driver
    created_at: Moment
    changed_at: Moment | None = None


Measured = Annotated[Duration, Field(ge=1e-12)]  # what a clock can distinguish from zero


class _CalibratedWorker(JsonObject):
    worker: Worker
    node: Node
    data_seconds: Duration
    compute_seconds: Measured
    half_compute_seconds: Measured | None = None
    communicate_seconds: Measured | None = None
    message_seconds: Measured | None = None
    direct_seconds: Measured | None = None
    direct_message_seconds: Measured | None = None
    direct_step_seconds: Measured | None = None
    direct_spread: Figure | None = None
    spread: Figure | None = None


class _Calibration(JsonObject):
    seconds: Duration | None = None
    payload_bytes: Count
    batch_size: Annotated[int, Field(ge=1, le=2**53)]
    half_batch_size: Count
    workers: Annotated[list[_CalibratedWorker], Field(max_length=MAX_TASKS)]
    half_untried: Text | None = None
    direct_untried: Text | None = None
    native: dict[Name, Figure | None] = Field(default_factory=dict)


_KINDS: Mapping[str, type[JsonObject]] = {
    "summary.json": Summary,
    "env.json": _Environment,
    "status.json": _Status,
    "job.json": RecordedJob,
    "calibration.json": _Calibration,
}


def checked_document(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with defaults or null for missing fields.

    Raises DamagedRunError, naming file and field.
    """
    version = fields.get("schema")
    if version != SCHEMA:
        raise DamagedRunError(f"{path}: has schema {version!r}; this release reads {SCHEMA}.")
    try:
        checked = _KINDS[path.name].model_validate(fields)
        return {**JOB_DEFAULTS, **fields} if isinstance(checked, RecordedJob) else checked.model_dump()
    except ValidationError as error:
        raise DamagedRunError(f"{path}: {first_problem(error)}.") from error
