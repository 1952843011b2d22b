"""One run of the product, as a user starts it, and its figures from the run directory that it wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from .figures import Measured, window
from .processes import Group, MeasurementError, environment
from .rows import BATCH_SIZE, Ours
from .workload import DATA, LEARNING_RATE, SEED

__all__ = ["read_run", "run_ours"]


def run_ours(run: Ours, steps: int, warmup: int, network: str, threads: int | None, folder: Path, timeout_seconds: float) -> Measured:
    """Run `trainer run` and read its run directory. Raises MeasurementError where it fails.

    `threads` a task, or None for what it chooses.
    """
    arguments = {
        "--backend": run.backend,
        "--mode": run.mode,
        "--nodes": run.nodes,
        "--data": DATA,
        "--batch-size": BATCH_SIZE,
        "--lr": LEARNING_RATE,
        "--seed": SEED,
        "--steps": warmup + steps,
        "--eval-every": "end",
        "--out": folder,
        "--name": "run",
    }
    command = [str(Path(sys.executable).with_name("trainer")), "run", "--json"]
    command += [str(word) for pair in arguments.items() for word in pair]
    command += ["--network", network] if run.nodes > 1 else []
    command += ["--threads", str(threads)] if threads is not None else []
    with Group(folder) as group:
        group.start("trainer", [*command, *run.options], environment({}))
        group.wait_for("trainer", timeout_seconds)
    return read_run(folder / "run", warmup)


def read_run(path: Path, warmup: int) -> Measured:
    """Return a run's figures.

    Rates: updates after the warm-up over the wall time, on the driver's clock, from the arrival of the result that completes the warm-up
    to that of the last one, so that nothing between two commands is left out. First step: from the start of the process to the
    arrival of the first result.
    """
    summary = json.loads((path / "summary.json").read_text())
    job = json.loads((path / "job.json").read_text())
    records = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    losses = np.full(summary["steps"], np.nan)
    for record in records:
        losses[record["step"] : record["step"] + record["count"]] = record["losses"]
    if summary["state"] != "succeeded" or not np.all(np.isfinite(losses)):
        raise MeasurementError(f"the run in {path} has not finished every update with a finite loss")
    updates, seconds = window([record["count"] for record in records], [record["time_seconds"] for record in records], warmup)
    watched = [node["monitor_cpu_cores_used"] for node in summary["per_node"]]
    return Measured(
        steps_per_second=updates / seconds,
        examples_per_second=updates / seconds * summary["examples"] / summary["steps"],
        first_step_seconds=summary["init_seconds"] + records[0]["time_seconds"],
        monitor_cores=None if None in watched else max(watched),
        threads=max(job["threads_per_task"]),
        warmup=warmup,
        steps=len(losses) - warmup,
        losses=tuple(losses.tolist()),
        mean_loss=float(losses[warmup:].mean()),
        mean_over=len(losses) - warmup,
    )
