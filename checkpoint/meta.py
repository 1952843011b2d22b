"""``checkpoint.json``: everything of a checkpoint that is not an array."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..data.base import DataInfo
from ..models.base import ModelSpec

__all__ = ["META", "SCHEMA", "Meta", "data_info", "described_data", "described_model", "peek_meta", "read_meta", "write_meta"]

SCHEMA = 1
META = "checkpoint.json"


class Meta(BaseModel):
    """Where a run stood when its state was taken, and what it trained.

    `step` counts the updates applied; `epoch` and `examples` (consumed in that epoch) are the data cursor; `run_seconds` is the run clock.
    `job` has the job's fields, `model` and `data` what `described_model` and `described_data` return. `scalars` are further numbers that
    training changes. `random` says in words how random numbers continue. `metrics` are those of the evaluation of just these
    parameters, if there was one. `spent` are the seconds that the run had spent by then, as its summary counts
    them, and the updates that were applied.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=(), ser_json_inf_nan="strings")

    schema_number: int = Field(SCHEMA, alias="schema")
    step: int = Field(ge=0)
    epoch: int = Field(ge=0)
    examples: int = Field(ge=0)
    run_seconds: float = Field(ge=0)
    seed: int
    job: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    scalars: dict[str, float] = Field(default_factory=dict)
    random: str = "drawn anew for each (seed, step, position); there is no state to keep"
    metrics: dict[str, float] | None = None
    spent: dict[str, Any] = Field(default_factory=dict)
    created_at: str
    backend: str
    mode: str
    workers: int


def described_model(spec: ModelSpec) -> dict[str, Any]:
    """Return what a checkpoint says of its model: name, loss, and the names and shapes of parameters and buffers."""
    return {
        "name": spec.name,
        "loss": spec.loss,
        "parameters": [[parameter.name, list(parameter.shape)] for parameter in spec.parameters],
        "buffers": [[buffer.name, list(buffer.shape)] for buffer in spec.buffers],
    }


def described_data(info: DataInfo, digest: str, data_dir: Path | None) -> dict[str, Any]:
    """Return what a checkpoint says of its data. `digest` is the store's, `data_dir` the folder of the user's original files."""
    return {
        "name": info.name,
        "data_dir": None if data_dir is None else str(data_dir),
        "digest": digest,
        "input_shape": list(info.input_shape),
        "classes": info.classes,
        "sizes": dict(info.sizes),
        "mean": list(info.mean),
        "std": list(info.std),
        "synthetic": info.synthetic,
        "class_names": list(info.class_names),
    }


def data_info(data: Mapping[str, Any]) -> DataInfo:
    """Return the shape of the data that a checkpoint describes, so that its model can be built where the data is not."""
    channels, height, width = data["input_shape"]
    return DataInfo(
        name=data["name"],
        input_shape=(channels, height, width),
        classes=data["classes"],
        sizes=data.get("sizes", {}),
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        synthetic=data.get("synthetic", False),
        class_names=tuple(data.get("class_names", ())),
    )


def write_meta(folder: Path, meta: Meta) -> None:
    """Write ``checkpoint.json``."""
    text = meta.model_dump_json(by_alias=True, indent=1)
    (folder / META).write_text(text + "\n", encoding="utf-8")


def read_meta(folder: Path) -> Meta:
    """Read ``checkpoint.json``. Raises ValueError, saying what is wrong with it."""
    fields = json.loads((folder / META).read_bytes())
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise ValueError(f"has no schema {SCHEMA}, the one that this release reads")
    try:
        return Meta.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def peek_meta(folder: Path) -> Meta | None:
    """Return a checkpoint's description without looking at its arrays or digests; None where it cannot be read."""
    try:
        return read_meta(folder)
    except (OSError, ValueError):
        return None
