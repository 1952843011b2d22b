"""What readers may rely on in the documents of a run directory; a file that lacks it is damaged, and is named with its field.

What every release has written has to be there. Of other fields only the type is checked, since a file of an earlier release lacks them:
readers get null for those, and pass over fields that they do not know. docs/run-directory.md has all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ...core.untrusted.bounded_json import first_problem
from ..schema import SCHEMA
from .bounded_types import MOST_NODES, MOST_TASKS, Count, Duration, Figure, JsonObject, Moment, Name, Node, Seconds, State, Text, Worker
from .job_schema import JOB_DEFAULTS, RecordedJob
from .jsonl import DamagedRunError
from .summary_schema import Summary

__all__ = ["checked_document"]


class _Interface(JsonObject):
    addresses: list[Name] = Field(default_factory=list)
    speed_bits_per_second: Figure | None = None


class _HostGpu(JsonObject):
    name: Name | None = None
    memory_total_bytes: Count | None = None
    uuid: Name | None = None


class _VisibleGpu(JsonObject):
    visible_as: Name
    uuid: Name | None = None
    gpu: Count | None = None


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
    gpus: Annotated[list[_HostGpu], Field(max_length=MOST_NODES)] | None = None
    gpu_driver: Name | None = None
    visible_gpus: Annotated[list[_VisibleGpu], Field(max_length=MOST_NODES)] | None = None


class _WorkTree(JsonObject):
    commit: Name
    changed: bool | None = None


class _Code(JsonObject):
    packages: dict[Name, Name] = Field(default_factory=dict)
    typed_in: _WorkTree | None = None
    crosstrain: _WorkTree | None = None


class _Environment(JsonObject):
    nodes: Annotated[list[_Host], Field(max_length=MOST_NODES)]
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


Measured = Annotated[Duration, Field(ge=1e-12)]
"""What a clock can tell from nothing."""


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
    workers: Annotated[list[_CalibratedWorker], Field(max_length=MOST_TASKS)]
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
    """Return a document with null for every field of this release that it lacks; a job with the default of every setting that it lacks.

    Raises DamagedRunError, naming file and field, where it is of another schema, or a field is missing, of another type or out of bounds.
    """
    found = fields.get("schema")
    if found != SCHEMA:
        raise DamagedRunError(f"{path}: has schema {found!r}; this release reads {SCHEMA}.")
    try:
        checked = _KINDS[path.name].model_validate(fields)
        return {**JOB_DEFAULTS, **fields} if isinstance(checked, RecordedJob) else checked.model_dump()
    except ValidationError as error:
        raise DamagedRunError(f"{path}: {first_problem(error)}.") from error
