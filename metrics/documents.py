"""What readers may rely on in the documents of a run directory; a file that lacks it is damaged, and is named.

Only types are checked of most fields, since a release may add some: a file of an earlier one lacks them. docs/run-directory.md has all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from .lines import DamagedRunError
from .records import SCHEMA

__all__ = ["check_document"]

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""As `finite_json` writes it."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class _StepSeconds(_Part):
    p50: Number | None = None
    p95: Number | None = None
    max: Number | None = None


class _Evaluation(_Part):
    split: str | None = None
    step: int | None = None
    epoch: float | None = None
    time_seconds: float | None = None
    loss: Number | None = None
    accuracy: Number | None = None


class _Staleness(_Part):
    mean: float | None = None
    p95: float | None = None
    max: float | None = None


class _RunShares(_Part):
    train_seconds: float | None = None
    eval_seconds: float | None = None
    checkpoint_seconds: float | None = None
    other_seconds: float | None = None


class _StepShares(_Part):
    node: int | None = None
    step_seconds: float | None = None
    data_seconds: float | None = None
    compute_seconds: float | None = None
    peers_seconds: float | None = None
    communicate_seconds: float | None = None


class _TimeShares(_Part):
    run: _RunShares | None = None
    workers: list[_StepShares] | None = None
    nodes: list[_StepShares] | None = None


class _MeanMax(_Part):
    mean: float | None = None
    max: float | None = None


class _Node(_Part):
    node: int | None = None
    cpu_cores_used: _MeanMax | None = None
    memory_rss_bytes: _MeanMax | None = None
    network_sent_bytes_per_second: float | None = None
    network_received_bytes_per_second: float | None = None


class _Checkpoints(_Part):
    saved: int | None = None
    failed: int | None = None


class _Summary(_Part):
    state: str
    run: str
    backend: str | None = None
    mode: str | None = None
    model: str | None = None
    data: str | None = None
    nodes: int | None = None
    workers: int | None = None
    batch_size: int | None = None
    global_batch_size: int | None = None
    learning_rate: float | None = None
    seed: int | None = None
    precision: str | None = None
    synthetic: bool | None = None
    steps: int
    examples: int | None = None
    epochs: float | None = None
    init_seconds: float | None = None
    train_seconds: float | None = None
    run_seconds: float | None = None
    total_seconds: float | None = None
    steps_per_second: float | None = None
    examples_per_second: float | None = None
    step_seconds: _StepSeconds | None = None
    final_train_loss: Number | None = None
    non_finite_losses: int | None = None
    eval: _Evaluation | None = None
    best_eval: _Evaluation | None = None
    target: str | None = None
    time_to_target_seconds: float | None = None
    staleness: _Staleness | None = None
    updates_by_worker: list[int] | None = None
    checkpoints: _Checkpoints | None = None
    time_shares: _TimeShares | None = None
    per_node: list[_Node]


class _Environment(_Part):
    nodes: list[dict[str, Any]]


class _Driver(_Part):
    pid: int | None = None
    host: str | None = None
    process_started_unix_seconds: float | None = None


class _Status(_Part):
    state: str
    cause: str | None = None
    driver: _Driver | None = None
    created_at: str | None = None


_KINDS: Mapping[str, type[_Part]] = {
    "summary.json": _Summary,
    "env.json": _Environment,
    "status.json": _Status,
    "job.json": _Part,
    "calibration.json": _Part,
}


def check_document(path: Path, fields: Mapping[str, Any]) -> None:
    """Raise DamagedRunError, naming file and field, where a document is of another schema or lacks what readers rely on."""
    found = fields.get("schema")
    if found != SCHEMA:
        raise DamagedRunError(f"{path}: has schema {found!r}; this release reads {SCHEMA}.")
    try:
        _KINDS[path.name].model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedRunError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}.") from error
