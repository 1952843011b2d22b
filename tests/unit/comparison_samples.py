"""Finished runs with figures that are easy to compute by hand, in memory and on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from crosstrain.core.job import Job
from crosstrain.records.store.jsonl import encode, write_document
from crosstrain.records.store.schema import StepRecord
from crosstrain.report.compare.comparison import Comparison, compare_runs
from crosstrain.report.compare.formats import as_text
from crosstrain.report.runs.columns import row
from crosstrain.report.runs.run import Run, finished_run, labelled

NODE: dict[str, Any] = {
    "cpu_model": "Made Up 3000",
    "cores_affinity": 2,
    "cores_available": 2.0,
    "memory_total_bytes": 8_000_000_000,
    "memory_limit_bytes": None,
    "interfaces": {"eth0": {"speed_bits_per_second": None}},
    "kernel": "6.1.0",
    "python": "3.11.7",
    "packages": {"crosstrain": "0.1.0", "numpy": "2.0", "tensorflow": "2.21.0", "torch": "2.15.0"},
    "gpus": None,
}

DATASET: dict[str, Any] = {
    "name": "digits",
    "digest": "ab12",
    "input_shape": [1, 8, 8],
    "classes": 10,
    "sizes": {"train": 1437, "test": 360},
}


def made(
    name: str = "one",
    *,
    node: dict[str, Any] | None = None,
    dataset: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
    described: dict[str, Any] | None = None,
    folder: Path = Path("runs"),
    **job: Any,
) -> Run:
    """Return a run of 10 epochs at 1000 examples/s.

    The arguments change its job, its nodes, its data, its summary and further fields of job.json.
    """
    settings = Job.model_validate({"backend": "torch", "out": folder, **job})
    node_facts = {**NODE, **(node or {})}
    values = {
        "run": name,
        "state": "succeeded",
        "backend": settings.backend,
        "mode": settings.mode,
        "model": settings.model,
        "data": settings.data,
        "nodes": settings.nodes,
        "workers": settings.workers,
        "parameter_servers": settings.ps if settings.mode == "async" else None,
        "batch_size": settings.per_worker_batch,
        "global_batch_size": settings.global_batch,
        "optimizer": settings.optimizer,
        "learning_rate": settings.lr,
        "seed": settings.seed,
        "precision": settings.precision,
        "precision_used": settings.precision,
        "synthetic": False,
        "resumed": 0,
        "network_source": "interface",
        "nodes_sharing_cores": 1,
        "steps": 450,
        "examples": 14370,
        "epochs": 10.0,
        "examples_per_second": 1000.0,
        "steps_per_second": 31.25,
        "init_seconds": 3.0,
        "train_seconds": 14.37,
        "run_seconds": 15.0,
        "total_seconds": 18.5,
        "final_train_loss": 0.25,
        "eval": {"split": "test", "examples": 360, "loss": 0.5, "accuracy": 0.875},
        "best_eval": {"accuracy": 0.9},
        "target": settings.until,
        "target_reached": None if settings.until is None else True,
        "time_to_target_seconds": None if settings.until is None else 8.0,
        "per_node": [used() for _ in range(settings.nodes)],
        **(summary or {}),
    }
    written = {**settings.model_dump(mode="json"), "threads_per_task": [1] * settings.nodes, "dataset": {**DATASET, **(dataset or {})}}
    return Run.of_documents(values, {**written, **(described or {})}, [node_facts] * settings.nodes, path=folder / name)


def used(cores: float = 0.5, memory: int = 100_000_000, sent: float = 2e6, received: float = 4e6) -> dict[str, Any]:
    """Return a node's usage as in a summary, without other programs."""
    return {
        "node": 0,
        "cores_available": 2.0,
        "foreign_cpu_cores_used": 0.0,
        "cpu_cores_lost": 0.0,
        "starved_fraction": 0.0,
        "cpu_cores_used": {"mean": cores, "max": cores},
        "cpu_fraction": {"mean": cores / 2, "max": cores / 2},
        "memory_rss_bytes": {"mean": memory, "max": memory},
        "memory_pss_bytes": {"mean": 0.5 * memory, "max": 0.6 * memory},
        "network_sent_bytes_per_second": sent,
        "network_received_bytes_per_second": received,
        "network_sent_bytes_per_train_second": 1.25 * sent,
        "network_received_bytes_per_train_second": 1.25 * received,
    }


def starved_node(fraction: float) -> dict[str, Any]:
    """Return usage of a node whose tasks lost this part of their CPU time to other programs.

    The other programs had 1.5 of its 2 cores.
    """
    return {**used(), "foreign_cpu_cores_used": 1.5, "cpu_cores_lost": 1.5, "starved_fraction": fraction}


def compare_paths(paths: list[str | Path], *, fold: bool = True) -> Comparison:
    """Compare the runs in some directories."""
    return compare_runs([finished_run(path) for path in paths], fold=fold)


def side_by_side(summaries: list[dict[str, Any]]) -> str:
    """Compare runs known only by these summaries, with a column each."""
    runs = [Run.of_documents(summary, {}, label=summary["run"]) for summary in summaries]
    return as_text(compare_runs(runs, fold=False), layout="columns")


def rows(paths: list[str | Path]) -> list[dict[str, Any]]:
    """Return a flat row for each run."""
    return [{**row(run.summary), "run": run.name} for run in labelled([finished_run(path) for path in paths])]


def written(folder: Path, *runs: Run) -> list[str]:
    """Write runs as run directories below `folder`; return their paths."""
    paths = []
    for run in runs:
        path = folder / run.name
        path.mkdir(parents=True)
        driver = {"pid": 4711, "host": "elsewhere", "process_started_unix_seconds": 1.0}
        status = {"state": run.summary["state"], "cause": None, "created_at": "2026-11-20T10:00:00.000+00:00", "driver": driver}
        for file, value in (("job", run.job), ("summary", run.summary), ("status", status), ("env", {"nodes": list(run.nodes)})):
            write_document(path / f"{file}.json", json.loads(json.dumps(value, default=str)))
        updates = run.summary["steps"]
        record = StepRecord(0, updates, 0, 1.0, 1.0, run.summary["examples"], (0.5,) * updates, (0.05,) * updates)
        (path / "steps.jsonl").write_bytes(encode(record))
        paths.append(str(path))
    return paths
