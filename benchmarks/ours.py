"""One run of the product, started as by a user, and its figures from its run directory."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstrain.data.batching import BucketedTokens, example_lengths
from crosstrain.data.sampler import Sampler
from crosstrain.data.store.stored_dataset import open_dataset

from .contestants import Contestant, Ours
from .figures import Measured, save_costs, window
from .processes import Group, MeasurementError, environment
from .workload import SEED, Work


def run_ours(run: Ours, shorter: int, network: str, threads: int | None, folder: Path, timeout_seconds: float) -> Measured:
    """Run `trainer run` and read its run directory. Raises MeasurementError where it fails.

    `threads` a task, or None for what it chooses. `shorter` divides the steps, and the time between checkpoints.
    """
    steps = steps_of(run, run.work, shorter)
    arguments = {
        "--backend": run.backend,
        "--mode": run.mode,
        "--nodes": run.nodes,
        **run.work.arguments(),
        "--steps": run.work.warmup + steps,
        "--eval-every": "end",
        "--out": folder,
        "--name": "run",
    }
    command = [str(Path(sys.executable).with_name("trainer")), "run", "--json"]
    command += [str(word) for pair in arguments.items() for word in pair]
    command += ["--network", network] if run.nodes > 1 else []
    command += ["--threads", str(threads)] if threads is not None else []
    if run.checkpoint_seconds is not None:
        command += ["--checkpoint-every", f"{run.checkpoint_seconds / shorter:g}s"]
    with Group(folder) as group:
        group.start("trainer", [*command, *run.options], environment({}, gpu=run.gpu))
        group.wait_for("trainer", timeout_seconds)
        peak, tree = group.peak_bytes("trainer"), group.tree_bytes("trainer")
    weights = None if run.work.batch_tokens is None else target_tokens(run.work, run.nodes, run.work.warmup + steps)
    run_figures = replace(read_run(folder / "run", run.work.warmup, weights), peak_memory_bytes=peak, tree_memory_bytes=tree)
    if run.checkpoint_seconds is not None and not run_figures.saves:
        raise MeasurementError(
            "no checkpoint was saved while the clock ran: this machine needs more steps for that (benchmarks/rows/images.py)"
        )
    return run_figures


def target_tokens(work: Work, workers: int, updates: int) -> NDArray[np.float64]:
    """Return how many tokens the targets of each update have, padding not counted."""
    assert work.batch_tokens is not None
    data = open_dataset(work.data)
    weights, lengths = data.weights("train", "target_tokens"), example_lengths(data)
    sampler = Sampler(len(weights), SEED, BucketedTokens(work.batch_tokens, workers, "sync"), workers, weights=weights, lengths=lengths)
    epochs = range(-(-updates // sampler.steps_per_epoch))
    return np.concatenate([sampler.whole(epoch, 0, sampler.steps_per_epoch).weights for epoch in epochs])[:updates]


def steps_of(contestant: Contestant, work: Work, shorter: int) -> int:
    """Return a contestant's steps after the warm-up; a quick pass has fewer."""
    return max(contestant.steps // shorter, min(work.fewest_steps, contestant.steps))


def read_run(path: Path, warmup: int, target_tokens: NDArray[np.float64] | None = None) -> Measured:
    """Return a run's figures; `target_tokens` are those of each update, for text.

    Rates: updates after the warm-up over the wall time, on the driver's clock, from the arrival of the result that completes the warm-up
    to that of the last one, so that the time between two commands is included. First step: from the start of the process to the
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
    times = [record["time_seconds"] for record in records]
    try:
        updates, seconds = window([record["count"] for record in records], times, warmup)
    except ValueError as error:
        raise MeasurementError(str(error)) from error
    tokens = None if target_tokens is None else float(target_tokens[len(losses) - updates : len(losses)].sum())
    watched = [node["monitor_cpu_cores_used"] for node in summary["per_node"]]
    saves = _saves(path, times[-1] - seconds, times[-1])
    while_saving = [(save["end_seconds"] - save["seconds"], save["end_seconds"]) for save in saves]
    costs = save_costs([record["count"] for record in records], times, while_saving)
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
        data_wait_fraction=_data_fraction(summary),
        time_to_target_seconds=summary["time_to_target_seconds"],
        saves=len(saves),
        stall_seconds=max((save["stall_seconds"] for save in saves), default=None),
        checkpoint_bytes=max((save["bytes"] for save in saves), default=None),
        save_cost_seconds=median(costs) if costs else None,
        target_tokens_per_second=None if tokens is None else tokens / seconds,
        padding_share=summary.get("padding_share"),
        exchange_seconds=_exchange(path),
    )


def _data_fraction(summary: Mapping[str, Any]) -> float | None:
    """Return the maximum fraction of a step that a worker gathers its batch.

    None without calibration.
    """
    shares = summary["time_shares"]
    return None if shares is None else max(worker["data_seconds"] / worker["step_seconds"] for worker in shares["workers"])


def _exchange(path: Path) -> float | None:
    """Return the maximum over workers of the seconds of a separate gradient all-reduce.

    None without such a measurement.
    """
    calibrated = path / "calibration.json"
    if not calibrated.exists():
        return None
    taken = [worker["communicate_seconds"] for worker in json.loads(calibrated.read_text())["workers"]]
    return max((seconds for seconds in taken if seconds is not None), default=None)


def _saves(path: Path, begin: float, end: float) -> list[dict[str, Any]]:
    """Return the events of checkpoints saved between two times on the run clock.

    A save that failed is an error.
    """
    events: list[dict[str, Any]] = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    failed = [event["detail"] for event in events if event["event"] == "checkpoint_failed"]
    if failed:
        raise MeasurementError(f"a checkpoint was not saved: {failed[0]}")
    return [
        {"end_seconds": event["time_seconds"], **event["detail"]}
        for event in events
        if event["event"] == "checkpoint_saved" and begin < event["time_seconds"] <= end
    ]
