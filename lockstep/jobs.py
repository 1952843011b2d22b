"""The jobs of two trainings, as they are compared on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import UsageError
from ..core.job import Job
from ..models.base import ModelSpec
from ..records.store.lockstep_results import Finding

KEPT = (  # settings that decide an update, or how it is computed
    "backend", "distributed", "exchange", "model", "data", "data_dir", "vocabulary", "accumulate", "batch_tokens", "epochs", "steps",
    "examples", "loss", "optimizer", "lr", "momentum", "nesterov", "weight_decay", "weight_decay_except", "beta1", "beta2", "epsilon",
    "schedule", "schedule_step_epochs", "schedule_gamma", "schedule_coefficient", "warmup_steps", "scale_lr", "base_batch_size",
    "clip_norm", "ema_decay", "augment", "precision", "device", "threads", "seed", "initial_weights", "initial_weights_except",
    "start_timeout",
)  # fmt: skip
PART_OF_SETTING = {
    "seed": "weights", "initial_weights": "weights", "data": "data", "data_dir": "data", "augment": "data", "batch_tokens": "data",
    "loss": "loss", "clip_norm": "clipping",
}  # fmt: skip
OF_UPDATES = (*KEPT[KEPT.index("optimizer") : KEPT.index("clip_norm")], "ema_decay")


def refuse_uncomparable(first: Job, second: Job) -> None:
    """Raise UsageError for trainings that have no updates from equal states."""
    for job in (first, second):
        if job.mode != "sync":
            raise UsageError(
                f"mode: got {job.mode!r}; an asynchronous run has no update that another one makes too: the order of its workers' updates"
                " differs each time. Compare sync runs, or the end results with `trainer compare`."
            )
    for name in ("model", "data"):
        if getattr(first, name) != getattr(second, name):
            raise UsageError(f"{name}: {getattr(first, name)!r} and {getattr(second, name)!r} differ, so no update of the two is the same.")


def on_this_machine(job: Job, *, deterministic: bool, compiled: bool | None = None) -> Job:
    """Return a job with its workers on one node, which makes the same updates and no records."""
    settings = {name: getattr(job, name) for name in KEPT}
    if job.batch_tokens is None:
        settings["global_batch_size"] = job.global_batch
    compiles = job.compile == "on" if job.compile != "auto" else bool(compiled)
    return Job.model_validate(
        {
            **settings,
            "procs_per_node": job.workers,
            "compile": "on" if compiles else "off",
            "deterministic": deterministic or job.deterministic,
            "eval_every": "end",
            "monitor": False,
            "tensorboard": False,
            "calibrate": False,
            "save_final": False,
        }
    )


def differing_settings(first: Job, second: Job) -> list[Finding]:
    """Return the settings that make updates different, each as a finding."""
    findings = []
    if first.global_batch != second.global_batch:
        cause = f"the global batch is {second.global_batch} instead of {first.global_batch}"
        findings.append(Finding(0, "data", cause=cause))
    for name in (*PART_OF_SETTING, *OF_UPDATES):
        before, after = getattr(first, name), getattr(second, name)
        if before != after:
            findings.append(Finding(0, PART_OF_SETTING.get(name, "optimiser"), cause=f"the setting {name} is {after} instead of {before}"))
    return findings


def expected_differences(first: Job, second: Job, spec: ModelSpec) -> list[str]:
    """Return in words what differs by design."""
    expected = []
    if spec.dropout and not (first.deterministic and second.deterministic):
        expected.append(
            "without --deterministic each framework draws dropout by its own generator, so the runs dropped differently."
            " Here both drop alike."
        )
    if first.precision != second.precision:
        expected.append(f"products are computed in {first.precision} and {second.precision}, as the settings ask.")
    return expected


def with_settings(fields: Mapping[str, Any]) -> str:
    """Return settings as the name of a side."""
    return "with " + ", ".join(f"{name}={value}" for name, value in fields.items())
