"""Run directories with hand-written time shares, for tests of `explain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from run_samples import async_run, summary_of, sync_run

from crosstrain.records.store.jsonl import write_document

BATCH = 32


def explained_run(
    out: Path,
    workers: list[dict[str, float]],
    *,
    mode: str = "sync",
    calibrated: bool = True,
    message_seconds: float | None = 1e-4,
    half_fraction: float = 0.5,
    direct: dict[str, float] | str | None = None,
    figures: dict[str, Any] | None = None,
    node_figures: list[dict[str, Any]] | None = None,
    **job: Any,
) -> Path:
    """Write a run with one worker per node.

    Each of `workers` has seconds of a step: data, compute, peers, communicate, and maybe spread. A second of the run clock is all
    training unless `figures` (fields of the summary) say otherwise. `half_fraction` is the time of half a batch relative to a whole one.
    `direct` is the calibration of the direct exchange, or why it was not tried.
    """
    job = {"name": "explained", "nodes": len(workers), "batch_size": BATCH, **job}
    path = (sync_run if mode == "sync" else async_run)(out, **job)
    summary = summary_of(path)
    shares = time_shares(workers)
    clock = {"run_seconds": 1.0, "train_seconds": 1.0, "eval_seconds": 0.0, "checkpoint_seconds": 0.0}
    if mode == "async":
        clock["updates_by_worker"] = [round(1.0 / worker["step_seconds"]) for worker in shares["workers"]]
    per_node = [{**node, **(node_figures[index] if node_figures else {})} for index, node in enumerate(summary["per_node"])]
    summary |= {**clock, "per_node": per_node, "time_shares": shares if calibrated else None, **(figures or {})}
    write_document(path / "summary.json", summary)
    described = json.loads((path / "job.json").read_text())
    addresses = [f"10.77.0.{node + 1}" for node in range(len(workers))]
    write_document(path / "job.json", {**described, "cluster": {"addresses": addresses}, "threads_per_task": [1] * len(workers)})
    if calibrated:
        entries = [_calibrated(index, worker, message_seconds, half_fraction) for index, worker in enumerate(workers)]
        entries = [{**entry, **(direct if isinstance(direct, dict) else {})} for entry in entries]
        document = {"seconds": 1.0, "payload_bytes": 31400, "batch_size": BATCH, "half_batch_size": BATCH // 2, "workers": entries}
        write_document(path / "calibration.json", document | ({"direct_untried": direct} if isinstance(direct, str) else {}))
    return path


def using(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    """Return figures of nodes that used so many of their usable cores: (used, usable) of each."""
    return [
        {"cores_available": cores, "cpu_cores_used": {"mean": used, "max": used}, "cpu_fraction": {"mean": used / cores, "max": 1.0}}
        for used, cores in pairs
    ]


def time_shares(workers: list[dict[str, float]]) -> dict[str, Any]:
    """Return the summary's `time_shares`."""
    shares = [_shares(index, worker) for index, worker in enumerate(workers)]
    nodes = [{**worker, "worker": None} for worker in shares]
    return {"method": "calibration", "overlap_fraction": None, "run": {}, "workers": shares, "nodes": nodes, "native": {}}


def _shares(index: int, worker: dict[str, float]) -> dict[str, Any]:
    names = ("data", "compute", "peers", "communicate")
    seconds = {f"{name}_seconds": worker.get(name, 0.0) for name in names}
    return {
        "worker": index,
        "node": worker.get("node", index),
        "step_seconds": sum(seconds.values()),
        **seconds,
        "spread": worker.get("spread", 0.02),
    }


def _calibrated(index: int, worker: dict[str, float], message_seconds: float | None, half_fraction: float) -> dict[str, Any]:
    compute, communicate = worker.get("compute", 0.0), worker.get("communicate", 0.0)
    return {
        "worker": index,
        "node": worker.get("node", index),
        "data_seconds": worker.get("data", 0.0),
        "compute_seconds": compute,
        "half_compute_seconds": compute * half_fraction,
        "communicate_seconds": communicate or None,
        "message_seconds": message_seconds if communicate else None,
    }
