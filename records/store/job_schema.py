"""The schema of ``job.json``: the fields of the job, as the job itself declares them, and what the driver adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import AfterValidator, Field, create_model, model_validator

from ...core.job import Job
from ...core.units import Cadence, Target, parse_bandwidth
from ...core.worker_layout import workers_by_node
from ...metrics import Better
from ...metrics.base import MOST_METRICS
from .bounded_types import MOST_NODES, MOST_TASKS, Count, Duration, JsonObject, Moment, Name, Text

__all__ = ["JOB_DEFAULTS", "RecordedJob"]


MOST_PACKAGES = 64
"""Of one framework."""

_LACKING: Any = None
"""A field may be lacking; where it is there, it is no null."""


class _Segment(JsonObject):
    started_at: Moment = _LACKING
    command: list[Text] = _LACKING
    step: Count = _LACKING
    epoch: Count = _LACKING
    examples: Count = _LACKING
    run_seconds: Duration
    checkpoint: Name = _LACKING
    changed: dict[str, Any] = _LACKING


class _Stored(JsonObject):
    bytes: Count = _LACKING
    elements: Annotated[dict[Name, Count], Field(max_length=100)] = _LACKING


class _Dataset(JsonObject):
    name: Name = _LACKING
    digest: Name = _LACKING
    sizes: dict[Name, Count] = _LACKING
    input_shape: Annotated[list[Count], Field(max_length=8)] = _LACKING
    classes: Count = _LACKING
    commonest_class_fraction: Annotated[float, Field(ge=0, le=1)] | None = _LACKING
    columns: Annotated[list[dict[str, Any]], Field(max_length=100)] = _LACKING
    vocabulary_sizes: Annotated[dict[Name, Count], Field(max_length=100)] = _LACKING
    stored: Annotated[dict[Name, _Stored], Field(max_length=100)] = _LACKING


class _TaskGpu(JsonObject):
    visible_as: Name
    uuid: Name | None = None
    gpu: Count | None = None


class _Cluster(JsonObject):
    addresses: Annotated[list[Name | None], Field(max_length=MOST_NODES)] = Field(default_factory=list)


_MetricName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]


class _Metric(JsonObject):
    name: _MetricName
    label: Name
    better: Better


class _Signatures(JsonObject):
    training: Name | None = None
    end: Name | None = None


class _Decided(JsonObject):
    """What the driver adds to the fields of the job."""

    global_batch_size_resolved: Count | None = _LACKING
    total_steps: Count = _LACKING
    compiled: bool | None = _LACKING
    dataset: _Dataset = _LACKING
    sources: dict[Name, Text] = _LACKING
    command: list[Text] = _LACKING
    cluster: _Cluster = _LACKING
    threads_per_task: Annotated[list[Count | None], Field(max_length=MOST_NODES)] = _LACKING
    gpu_of_task: Annotated[dict[Name, _TaskGpu | None], Field(max_length=MOST_TASKS)] = _LACKING
    segments: Annotated[list[_Segment], Field(max_length=MOST_TASKS)] = _LACKING
    framework_packages: Annotated[list[Name], Field(max_length=MOST_PACKAGES)] = _LACKING
    metrics: Annotated[list[_Metric], Field(max_length=MOST_METRICS)] = _LACKING
    translation_metrics: Annotated[list[_MetricName], Field(max_length=MOST_METRICS)] | None = _LACKING
    translation_signatures: _Signatures | None = _LACKING

    @model_validator(mode="after")
    def _workers_of_each_node(self) -> Self:
        fields = dict(self)
        try:
            workers_by_node(fields["procs_per_node"], fields["nodes"])
        except ValueError as error:
            raise ValueError(f"procs_per_node: {error}") from None
        return self


def _in_json(declared: Any) -> Any:
    """Return a field's type as JSON has it: a path is a text there, a tuple a list."""
    if declared is Path:
        return Name
    if declared is str:
        return Text
    if get_origin(declared) in (Union, UnionType):
        return Union[tuple(map(_in_json, get_args(declared)))]  # noqa: UP007 — the types are known at run time alone
    return Annotated[list[get_args(declared)[0]], Field(min_length=1)] if get_origin(declared) is tuple else declared  # type: ignore[misc]


_READ: Mapping[str, Callable[[str], Any]] = {
    "bandwidth": parse_bandwidth,
    "eval_every": Cadence.parse,
    "checkpoint_every": Cadence.parse,
    "until": Target.parse,
}
"""Fields whose text readers take apart; each raises ValueError for one that means nothing."""


_LONGEST_QUANTITY = 60


def _read_by(read: Callable[[str], Any]) -> AfterValidator:
    def check(text: str | None) -> str | None:
        if text is not None and len(text) > _LONGEST_QUANTITY:
            raise ValueError(f"is a text of {len(text)} characters")
        if text is not None:
            read(text)
        return text

    return AfterValidator(check)


def _recorded(name: str) -> Any:
    info = Job.model_fields[name]
    read = [_read_by(_READ[name])] if name in _READ else []
    default = str(info.default) if isinstance(info.default, Path) else info.default
    return Annotated[(_in_json(info.annotation), Field(), *info.metadata, *read)], default


RecordedJob = create_model("RecordedJob", __base__=_Decided, **{name: _recorded(name) for name in Job.model_fields})
"""``job.json``: a field that the release which wrote it did not have yet is what the job does without."""

JOB_DEFAULTS = {name: default for name, (_, default) in ((name, _recorded(name)) for name in Job.model_fields)}
