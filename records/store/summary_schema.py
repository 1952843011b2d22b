"""Schema of ``summary.json``: fields of every release are required, others' types checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self, get_args

from pydantic import Field, model_validator

from ...core.bounded_json import JsonObject
from ...core.job import MAX_NODES
from .jsonl import MAX_TASKS, Count, Duration, Figure, Loss, Name, Node, Seconds, State, Worker


class _StepSeconds(JsonObject):
    p50: Duration | None = None
    p95: Duration | None = None
    max: Duration | None = None
    group_size: Figure | None = None


class _Evaluation(JsonObject):
    split: Name | None = None
    step: Count | None = None
    epoch: Figure | None = None
    time_seconds: Seconds | None = None
    examples: Count | None = None
    loss: Loss | None = None
    __pydantic_extra__: dict[str, Loss | None] = Field(init=False)  # the objective's metrics by name


class _Translated(JsonObject):
    split: Name | None = None
    step: Count | None = None
    sentences: Count | None = None
    signature: Name | None = None
    seconds: Duration | None = None
    __pydantic_extra__: dict[str, Loss | None] = Field(init=False)  # scores by name


class _Staleness(JsonObject):
    mean: Figure | None = None
    p95: Figure | None = None
    max: Figure | None = None


class _RunShares(JsonObject):
    train_seconds: Duration = 0.0
    eval_seconds: Duration = 0.0
    checkpoint_seconds: Duration = 0.0
    translate_seconds: Duration = 0.0
    profile_seconds: Duration = 0.0
    other_seconds: Duration = 0.0


class _StepShares(JsonObject):
    node: Node
    step_seconds: Duration | None = None
    data_seconds: Duration | None = None
    compute_seconds: Duration | None = None
    peers_seconds: Duration | None = None
    communicate_seconds: Duration | None = None
    spread: Figure | None = None


class _WorkerShares(_StepShares):
    worker: Worker
    updates: Count | None = None


class _TimeShares(JsonObject):
    method: Name | None = None
    part_began_seconds: Duration | None = None
    overlap_fraction: Figure | None = None
    run: _RunShares = Field(default_factory=_RunShares)
    workers: Annotated[list[_WorkerShares], Field(max_length=MAX_TASKS)] = Field(default_factory=list)
    nodes: Annotated[list[_StepShares], Field(max_length=MAX_NODES)] = Field(default_factory=list)
    native: dict[Name, Figure | None] = Field(default_factory=dict)


class _MeanMax(JsonObject):
    mean: Figure | None = None
    max: Figure | None = None


class _Gpu(JsonObject):
    name: Name | None = None
    utilization: _MeanMax | None = None
    memory_bytes: _MeanMax | None = None
    power_watts: _MeanMax | None = None
    tasks: Annotated[list[Name], Field(max_length=MAX_TASKS)] = Field(default_factory=list)


class NodeSummary(JsonObject):
    """What a node used."""

    node: Node | None = None
    train_seconds: Duration | None = None
    samples: Count | None = None
    cores_available: Figure | None = None
    cpu_seconds: Duration | None = None
    cpu_cores_used: _MeanMax | None = None
    cpu_fraction: _MeanMax | None = None
    memory_rss_bytes: _MeanMax | None = None
    memory_pss_bytes: _MeanMax | None = None
    network_source: Name | list[Name] | None = None
    network_sent_bytes: Count | None = None
    network_received_bytes: Count | None = None
    network_sent_bytes_per_second: Figure | None = None
    network_received_bytes_per_second: Figure | None = None
    network_sent_bytes_per_train_second: Figure | None = None
    network_received_bytes_per_train_second: Figure | None = None
    disk_read_bytes: Count | None = None
    disk_written_bytes: Count | None = None
    gpus: Annotated[list[_Gpu], Field(max_length=MAX_NODES)] | None = None
    monitor_cpu_seconds: Duration | None = None
    monitor_cpu_cores_used: Figure | None = None
    cpu_wait_seconds: Seconds | None = None
    cpu_pressure_fraction: Figure | None = None
    foreign_cpu_cores_used: Figure | None = None
    cpu_cores_lost: Figure | None = None
    starved_fraction: Annotated[float, Field(ge=0, le=1)] | None = None


class _Checkpoints(JsonObject):
    saved: Count = 0
    failed: Count = 0
    stall_seconds: _MeanMax | None = None
    write_seconds: _MeanMax | None = None
    bytes: Count | None = None


class _SamplesThinned(JsonObject):
    samples: Count
    lines: Count
    most_samples_of_a_line: Count


class _Patience(JsonObject):
    metric: Name
    evaluations: Count
    without_improvement: Count
    exhausted: bool
    best: Figure | None = None
    best_step: Count | None = None


class Summary(JsonObject):
    """Entire document."""

    state: State
    run: Name
    backend: Name
    mode: Name
    model: Name
    data: Name
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)]
    workers: Annotated[int, Field(ge=1, le=MAX_TASKS)]
    parameter_servers: Worker | None = None
    batch_size: Annotated[int, Field(ge=1, le=2**53)]
    global_batch_size: Annotated[int, Field(ge=1, le=2**53)]
    batch_tokens: Annotated[int, Field(ge=1, le=2**53)] | None = None
    padding_share: Annotated[float, Field(ge=0, le=1)] | None = None
    optimizer: Name | None = None
    learning_rate: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    precision: Name | None = None
    precision_used: Name | None = None
    device_used: Name | None = None
    compiled: bool | None = None
    model_method: Name | None = None
    adapter_cost: Figure | None = None
    exchange: Name | None = None
    synthetic: bool | None = None
    resumed: Count | None = None
    network_source: Name | list[Name] | None = None
    nodes_sharing_cores: Node | None = None
    steps: Count
    updates_scheduled: Count | None = None
    updates_applied: Count | None = None
    examples: Count
    epochs: Figure | None = None
    init_seconds: Duration
    train_seconds: Duration
    eval_seconds: Duration = 0.0
    checkpoint_seconds: Duration = 0.0
    translate_seconds: Duration = 0.0
    profile_seconds: Duration = 0.0
    profiled_updates: Count | None = None
    run_seconds: Duration
    total_seconds: Duration
    steps_per_second: Figure | None = None
    examples_per_second: Figure | None = None
    step_seconds: _StepSeconds | None = None
    data_wait_seconds: Duration | None = None
    network_wait_seconds: Duration | None = None
    final_train_loss: Loss | None = None
    non_finite_losses: Count | None = None
    non_finite_from_step: Count | None = None
    eval: _Evaluation | None = None
    best_eval: _Evaluation | None = None
    translated: _Translated | None = None
    target: Name | None = None
    target_reached: bool | None = None
    time_to_target_seconds: Annotated[Duration, Field(gt=0)] | None = None
    patience: _Patience | None = None
    staleness: _Staleness | None = None
    updates_by_worker: Annotated[list[Count], Field(max_length=MAX_TASKS)] | None = None
    checkpoints: _Checkpoints | None = None
    restarts: Count | None = None
    restart_seconds_lost: Duration | None = None
    worker_restarts: Count | None = None
    worker_absent_seconds: Duration | None = None
    time_shares: _TimeShares | None = None
    samples_thinned: _SamplesThinned | None = None
    per_node: Annotated[list[NodeSummary], Field(max_length=MAX_NODES)]

    @model_validator(mode="after")
    def _complete_nodes(self) -> Self:
        complete_nodes(vars(self), [vars(node) for node in self.per_node])
        return self


MODELS_WITH_METRICS: Mapping[str, type[JsonObject]] = {"eval": _Evaluation, "best_eval": _Evaluation, "translated": _Translated}


def complete_nodes(summary: Mapping[str, Any], nodes: Sequence[dict[str, Any]]) -> None:
    """Number the nodes of a summary, and add missing training rates.

    Earlier releases did not write them.
    """
    for number, (node, rates) in enumerate(zip(nodes, training_rates(summary, nodes), strict=True)):
        node["node"] = number
        for name, rate in rates.items():
            if node[name] is None:
                node[name] = rate


def training_rates(summary: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> list[dict[str, float | None]]:
    """Return each node's sent and received bytes per second of training.

    Profiled updates are included. A node in some segments only has their training time. None after a restart, whose repeated work has bytes
    but no training time, and below a microsecond.
    """
    whole = summary["train_seconds"] + (summary.get("profile_seconds") or 0.0)
    longest = max((node.get("train_seconds") or 0.0 for node in nodes), default=0.0) if summary.get("resumed") else 0.0
    rates = []
    for node in nodes:
        node_seconds = node.get("train_seconds")
        seconds = whole * node_seconds / longest if longest and node_seconds is not None else whole
        known = seconds >= 1e-6 and not summary.get("restart_seconds_lost")
        amounts = {name: node.get(name) if known else None for name in ("network_sent_bytes", "network_received_bytes")}
        rates.append({f"{name}_per_train_second": None if amount is None else amount / seconds for name, amount in amounts.items()})
    return rates


def summary_type(path: Sequence[str]) -> Any:
    """Return the type, or None, of the figure at `path`.

    Other figures of evaluations are metrics. Raises KeyError.
    """
    declared: Any = Summary
    for name in path:
        owner = next(kind for kind in type_parts(declared) if isinstance(kind, type) and issubclass(kind, JsonObject))
        if issubclass(owner, _Evaluation) and name not in owner.model_fields:
            return Loss | None
        info = owner.model_fields[name]
        declared = Annotated[(info.annotation, *info.metadata, Field())]
    return declared | None


def type_parts(declared: Any) -> Iterator[Any]:
    """Yield a type and, recursively, its parts."""
    yield declared
    for part in get_args(declared):
        yield from type_parts(part)
