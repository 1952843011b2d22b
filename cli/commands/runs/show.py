"""``trainer runs show``: everything about one run that a person looks for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ....checkpoint import list_checkpoints, peek_meta
from ....core.errors import TrainerError
from ....core.untrusted.console import one_line
from ....records.store.file_index import describe_folder
from ....records.text.numbers import bytes_text, count_text
from ....records.text.provenance import code_text, instructions_text
from ....report.catalog.index import run_row
from ....report.catalog.lost_updates import lost_updates
from ....report.catalog.rerun_command import repeat_command
from ....report.catalog.run import Run
from ....report.tables.run_tables import one_run, to_text

__all__ = ["as_text", "shown"]


def shown(path: Path) -> dict[str, Any]:
    """Return what is known of a run. Documents that it lacks are null; one that cannot be read is named under ``damaged``.

    Records that are not whole are named there too.
    """
    run = Run(path)
    damaged: list[str] = []

    def read(document: str) -> Any:
        try:
            return getattr(run, document)
        except (TrainerError, OSError, KeyError) as error:
            damaged.append(str(error))
            return None

    row, status, job, nodes = run_row(run), read("status"), read("job"), read("nodes")
    code = None if nodes is None else read("code")
    summary = read("summary") if read("has_summary") else None
    if summary is not None and (lost := lost_updates(run)) is not None:
        damaged.append(lost)
    files = describe_folder(path)
    return {
        "path": str(path.resolve()),
        "run": run.own_name,
        "state": row["state"],
        "created_at": row["created_at"],
        "cause": (status or {}).get("cause"),
        "damaged": damaged,
        "row": row,
        "command": repeat_command(job, os.environ) if job else None,
        "typed": (job or {}).get("command"),
        "resumed": max(len((job or {}).get("segments", ())) - 1, 0),
        "bytes": sum(file.bytes for file in files),
        "files": [{"path": file.path, "bytes": file.bytes, "purpose": file.purpose} for file in files],
        "checkpoints": [_checkpoint(path, checkpoint) for checkpoint in list_checkpoints(path)],
        "nodes": nodes,
        "code": code,
        "job": job,
        "status": status,
        "summary": summary,
    }


def _checkpoint(run: Path, path: Path) -> dict[str, Any]:
    meta = peek_meta(path)
    return {
        "path": path.relative_to(run).as_posix(),
        "step": meta.step if meta else None,
        "epoch": meta.epoch if meta else None,
        "metrics": meta.metrics if meta else None,
        "bytes": sum(file.bytes for file in describe_folder(path)),
    }


def as_text(found: Mapping[str, Any]) -> str:
    """Return the same as text for people."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield found["run"]
    yield ""
    if found["summary"] is not None:
        yield to_text(one_run(found["summary"], found["job"], Path(found["path"]))).rstrip("\n")
    if found["summary"] is None or found["state"] != found["summary"].get("state"):
        yield f"state: {found['state']}; {'no summary yet' if found['state'] in ('starting', 'running') else 'no summary'}"
    if found["cause"]:
        yield f"cause: {one_line(found['cause'])}"
    yield from (f"damaged: {one_line(problem)}" for problem in found["damaged"])
    yield ""
    for number, node in enumerate(found["nodes"] or ()):
        yield one_line(f"node {number}: {_node(node)}")
    if (code := code_text(found["code"])) is not None:
        yield one_line(f"code: {code}")
    yield f"made: {found['created_at'] or 'unknown'}{_resumed(found['resumed'])}"
    size = f"{len(found['files'])} files, {bytes_text(found['bytes'])}"
    yield f"files: {one_line(found['path'])} ({size}; trainer export --describe lists them)"
    for checkpoint in found["checkpoints"]:
        step = "cannot be read" if checkpoint["step"] is None else f"{count_text(checkpoint['step'])} updates"
        yield f"checkpoint: {checkpoint['path']} ({step}, {bytes_text(checkpoint['bytes'])})"
    if found["command"]:
        yield f"again: {one_line(found['command'])}"


def _resumed(times: int) -> str:
    return f"; resumed {times} time{'s' if times > 1 else ''}" if times else ""


def _node(node: Mapping[str, Any]) -> str:
    """Say in a line what a node is, as far as it is known."""
    cores, memory = node.get("cores_available"), node.get("memory_limit_bytes") or node.get("memory_total_bytes")
    gpus = [str(gpu.get("name")) for gpu in node.get("gpus") or ()]
    packages = [f"{name} {version}" for name, version in (node.get("packages") or {}).items() if version]
    parts = [
        node.get("hostname"),
        node.get("cpu_model"),
        instructions_text(node.get("cpu_flags")),
        None if cores is None else f"{cores:g} cores",
        None if memory is None else bytes_text(memory),
        *gpus,
        f"{node['operating_system']} {node.get('kernel') or ''}".strip() if node.get("operating_system") else None,
        f"Python {node['python']}" if node.get("python") else None,
        *packages,
    ]
    return ", ".join(part for part in parts if part) or "unknown"
