"""``checkpoint.json``: all of a checkpoint except arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ..core.bounded_json import JsonObject, UnreadableError, first_problem, read_json
from ..core.console import spelled_value
from ..core.errors import UsageError
from ..core.job import Job
from ..core.settings.job_fields import allowed
from ..data.base import MAX_CLASSES, DataInfo, ImageFeatures
from ..data.columns import ColumnSpec
from ..data.features import described_features, features_from, features_problem
from ..data.preprocessing import statistics_problem
from ..data.sources.translation.tokenizer import Vocabulary
from ..models.base import ModelSpec
from ..records.store.vocabulary import VOCABULARY, read_vocabulary

SCHEMA = 1
META = "checkpoint.json"
MAX_PIXELS = 2**28


Extent = Annotated[int, Field(ge=1, lt=2**31)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]


@cache
def _adapter(field: str) -> TypeAdapter[Any]:
    declared = Job.model_fields[field]
    return TypeAdapter(Annotated[declared.annotation, declared], config=ConfigDict(strict=True))  # type: ignore[arg-type]


class _Job(JsonObject):
    model: str
    data: str = ""
    data_dir: str | None = None
    seed: int = 0
    precision: str = "fp32"
    device: str = "auto"
    beam: int = 4
    length_penalty: float = 0.6
    loss: str | None = None

    @field_validator("seed", "precision", "device", "beam", "length_penalty", "loss", mode="before")
    @classmethod
    def _as_in_a_job(cls, value: Any, info: ValidationInfo) -> Any:
        field = info.field_name or ""
        try:
            return _adapter(field).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"is {repr(value)[:40]}; allowed: {allowed(field)}") from error


class _Model(JsonObject):
    name: str
    loss: str
    parameters: list[Annotated[list[str | list[Extent]], Field(min_length=2, max_length=2)]]
    buffers: list[Annotated[list[str | list[Extent]], Field(min_length=2, max_length=2)]]

    @field_validator("parameters", "buffers")
    @classmethod
    def _named(cls, value: list[list[Any]]) -> list[list[Any]]:
        if not all(isinstance(name, str) and isinstance(shape, list) for name, shape in value):
            raise ValueError("has to be a list of names, each with a shape")
        return value

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        names = [name for name, _ in (*self.parameters, *self.buffers)]
        if len(set(names)) < len(names):
            raise ValueError("names an array twice")
        return self


class _Data(JsonObject):
    name: str
    data_dir: str | None = None
    digest: str
    sizes: dict[str, Annotated[int, Field(ge=0, le=2**53)]] = Field(default_factory=dict)
    synthetic: bool = False


class _ImageData(_Data):
    input_shape: Annotated[list[Extent], Field(min_length=3, max_length=3)]
    classes: Annotated[int, Field(ge=1, le=MAX_CLASSES)]
    mean: list[Number]
    std: list[Number]
    class_names: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _sized(self) -> Self:
        if math.prod(self.input_shape) > MAX_PIXELS:
            raise ValueError(f"input_shape: an example of more than {MAX_PIXELS:,} numbers")
        if problem := statistics_problem(self.mean, self.std, self.input_shape[0]):
            raise ValueError(problem)
        if self.class_names and len(self.class_names) != self.classes:
            raise ValueError(f"class_names: {len(self.class_names)} names for {self.classes} classes")
        return self


class _Column(JsonObject):
    name: Annotated[str, Field(max_length=100)]
    dtype: str
    shape: Annotated[list[Extent | None], Field(max_length=8)]

    @model_validator(mode="after")
    def _sound(self) -> Self:
        ColumnSpec(self.name, self.dtype, tuple(self.shape))
        return self


class _ColumnData(_Data):
    columns: Annotated[list[_Column], Field(min_length=1, max_length=100)]
    vocabulary_sizes: dict[str, Annotated[int, Field(ge=1, le=MAX_CLASSES)]] = Field(default_factory=dict)
    target: Annotated[str, Field(max_length=100)] = ""
    classes: Annotated[int, Field(ge=0, le=MAX_CLASSES)] = 0
    class_names: list[str] = Field(default_factory=list)
    mean: dict[str, list[Number]] | None = None
    std: dict[str, list[Number]] | None = None
    languages: Annotated[list[Annotated[str, Field(max_length=40)]], Field(max_length=10)] = Field(default_factory=list)
    bleu_tokenizer: Annotated[str, Field(max_length=40)] = "13a"
    pieces_sha256: Annotated[str, Field(max_length=64)] | None = None

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std: one of them is missing")
        columns = [ColumnSpec(column.name, column.dtype, tuple(column.shape)) for column in self.columns]
        if problem := features_problem(columns, features_from(self.model_dump())):
            raise ValueError(problem)
        return self


class _Spent(JsonObject):
    init_seconds: Number = 0.0
    train_seconds: Number = 0.0
    eval_seconds: Number = 0.0
    checkpoint_seconds: Number = 0.0
    train_seconds_by_node: list[Number | None] = Field(default_factory=list)
    updates: Annotated[int, Field(ge=0, le=2**53)] = 0


_Arranged = tuple[Annotated[int, Field(ge=0, le=2**53)], Annotated[int, Field(ge=0, le=2**31)], Annotated[int, Field(ge=0, le=2**31)]]


class Meta(BaseModel):
    """The position of a run when its state was taken, and the description of what it trained.

    `step` counts updates; `epoch` and `examples` (consumed in it) are the data cursor, with `arranged`, the history of the epoch's order
    (`data.batching.Arranged`). `run_seconds` is the run clock. `model` and `data` come from `described_model` and `described_data`.
    `scalars` are further numbers that training changes. `metrics` are those of an evaluation of these parameters. `spent` has seconds and
    updates so far, as the run's summary counts them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=(), ser_json_inf_nan="strings")

    schema_number: int = Field(SCHEMA, alias="schema")
    step: int = Field(ge=0, le=2**53)
    epoch: int = Field(ge=0, le=2**53)
    examples: int = Field(ge=0, le=2**53)
    arranged: Annotated[tuple[_Arranged, ...], Field(max_length=1000)] = ()
    run_seconds: float = Field(ge=0, le=1e12)
    seed: int = Field(ge=0, lt=2**63)
    job: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    scalars: dict[str, float] = Field(default_factory=dict)
    random: str = "drawn for each (seed, step, position); there is no state to keep"
    metrics: dict[str, float] | None = None
    spent: dict[str, Any] = Field(default_factory=dict)
    created_at: str
    backend: str
    mode: str
    workers: int

    @field_validator("arranged")
    @classmethod
    def _in_order(cls, value: tuple[_Arranged, ...], info: ValidationInfo) -> tuple[_Arranged, ...]:
        begins = [0, *(begin for begin, _, _ in value), info.data.get("examples", 0)]
        if begins != sorted(begins) or any((tokens == 0) != (batches == 0) for _, tokens, batches in value):
            raise ValueError("has to be a list of examples, tokens and batches, in the order of the epoch")
        return value


def _kind_of_data(data: Any) -> str:
    return "columns" if isinstance(data, dict) and "columns" in data else "images"


class _Described(BaseModel):
    job: _Job
    model: _Model
    data: Annotated[Annotated[_ImageData, Tag("images")] | Annotated[_ColumnData, Tag("columns")], Discriminator(_kind_of_data)]
    spent: _Spent = Field(default_factory=_Spent)


def described_model(spec: ModelSpec) -> dict[str, Any]:
    """Return a checkpoint's description of its model."""
    return {
        "name": spec.name,
        "loss": spec.objective.loss,
        "parameters": [[parameter.name, list(parameter.shape)] for parameter in spec.parameters],
        "buffers": [[buffer.name, list(buffer.shape)] for buffer in spec.buffers],
        **({"source": spec.source} if spec.source else {}),
    }


def described_data(info: DataInfo, digest: str, data_dir: Path | None, pieces_sha256: str | None = None) -> dict[str, Any]:
    """Return a checkpoint's description of its data.

    `pieces_sha256`: digest of the vocabulary's pieces.
    """
    return {
        "name": info.name,
        "data_dir": None if data_dir is None else str(data_dir),
        "digest": digest,
        **_describe_features(info),
        **({} if pieces_sha256 is None else {"pieces_sha256": pieces_sha256}),
        "sizes": dict(info.sizes),
        "synthetic": info.synthetic,
    }


def _describe_features(info: DataInfo) -> dict[str, Any]:
    features = info.features
    if not isinstance(features, ImageFeatures):
        columns = [{"name": column.name, "dtype": column.dtype, "shape": list(column.shape)} for column in info.columns]
        return {"columns": columns, **described_features(features)}
    return {
        "input_shape": list(features.shape),
        "classes": features.classes,
        "mean": list(features.mean),
        "std": list(features.std),
        "class_names": list(features.class_names),
    }


def data_info(data: Mapping[str, Any]) -> DataInfo:
    """Return the description of the data, from which a model can be built without the data."""
    if "columns" in data:
        columns = tuple(ColumnSpec(column["name"], column["dtype"], tuple(column["shape"])) for column in data["columns"])
        return DataInfo(data["name"], data.get("sizes", {}), columns, features_from(data), data.get("synthetic", False))
    channels, height, width = data["input_shape"]
    images = ImageFeatures(
        (channels, height, width),
        data["classes"],
        tuple(data["mean"]),
        tuple(data["std"]),
        class_names=tuple(data.get("class_names", ())),
    )
    return DataInfo.of_images(data["name"], data.get("sizes", {}), images, data.get("synthetic", False))


def write_meta(folder: Path, meta: Meta) -> None:
    """Write ``checkpoint.json``."""
    written = meta.model_copy(update={field: spelled_value(getattr(meta, field)) for field in ("job", "model", "data")})  # lone surrogates
    text = written.model_dump_json(by_alias=True, indent=1, exclude=None if meta.arranged else {"arranged"})
    (folder / META).write_text(text + "\n", encoding="utf-8")


def read_meta(folder: Path) -> Meta:
    """Read ``checkpoint.json``. Raises ValueError for invalid content."""
    fields = read_json(folder / META)
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise ValueError(f"has no schema {SCHEMA}, the one that this release reads")
    try:
        meta = Meta.model_validate(fields)
        _Described.model_validate(fields)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
    known = {"seed": meta.seed, "data": meta.data["name"], "data_dir": meta.data.get("data_dir")}  # for jobs without these fields
    return meta.model_copy(update={"job": {**known, **meta.job}})


def peek_meta(folder: Path) -> Meta | None:
    """Return a checkpoint's description without verifying its files; None if it is unreadable."""
    try:
        return read_meta(folder)
    except (OSError, ValueError):
        return None


def trained_vocabulary(checkpoint: Path, meta: Meta) -> bytes:
    """Return the sentencepiece model of a checkpoint's run.

    Raises UsageError if it is missing or differs.
    """
    run = checkpoint.parent.parent
    try:
        model = read_vocabulary(run)
    except UnreadableError as error:
        raise UsageError(f"run: {str(run)!r}: {error}; text cannot be made pieces of by it.") from error
    if model is None:
        raise UsageError(
            f"checkpoint: {str(checkpoint)!r} lies in no run with a {VOCABULARY}, without which nobody could make pieces of a text."
            " Give the run directory."
        )
    try:
        vocabulary = Vocabulary(model)
    except ValueError as error:
        raise UsageError(f"run: {str(run / VOCABULARY)!r} is {error}; text cannot be made pieces of by it.") from error
    sizes, pieces = set(meta.data["vocabulary_sizes"].values()), meta.data.get("pieces_sha256")
    if sizes != {vocabulary.size} or pieces not in (None, vocabulary.pieces_sha256):
        raise UsageError(f"run: {str(run / VOCABULARY)!r} is not the vocabulary that the model was trained with.")
    return model
