"""What the report's page says about a single run: settings, verdict, environment, and the command that repeats it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ...core.job import Job
from ...core.worker_layout import workers_by_node
from ...records.text.numbers import UNKNOWN, bytes_text, count_text, number_text
from ...records.text.provenance import code_text, instructions_text
from ..catalog.lost_updates import lost_updates
from ..catalog.rerun_command import repeat_command
from ..catalog.run import Run
from ..catalog.unfinished import as_recorded
from ..diagnosis.advice import advise
from ..diagnosis.batch_size_advice import Advice
from ..diagnosis.headline import headline
from ..diagnosis.text import notes
from ..diagnosis.verdict import explain
from ..questions.answers import answers

__all__ = ["ENVIRONMENT", "SETTINGS", "config_text", "described"]

SETTINGS = ("run", "state", "backend", "mode", "model", "data", "precision", "nodes", "workers", "parameter servers", "global batch")
ENVIRONMENT = ("node", "host", "processor", "cores available", "memory", "kernel", "Python", "packages", "GPUs")

_PLACE = ("out", "name")


def described(run: Run) -> dict[str, Any]:
    """Return what the page's template shows of a run."""
    segments = run.job.get("segments") or [{"command": run.job.get("command") or ()}]
    return {
        "number": run.number,
        "label": run.name,
        "state": run.state,
        "cause": run.cause,
        "synthetic": _synthetic(run),
        "lost": lost_updates(run),
        "settings": _settings(run),
        "started": _when(segments[0].get("started_at")),
        "path": str(run.path.resolve()),
        **_explained(run),
        "environment": [_node(number, node) for number, node in enumerate(run.nodes)],
        "code": code_text(run.code),
        "segments": [shlex.join(map(str, segment.get("command") or ())) for segment in segments],
        "repeat": repeat_command(run.job, {}),
        "config": config_text(run.job),
    }


def _when(text: str | None) -> str:
    """Return an ISO time as people write it, to the second."""
    return UNKNOWN if text is None else datetime.fromisoformat(text).isoformat(sep=" ", timespec="seconds")


def _synthetic(run: Run) -> bool:
    return run.has_summary and bool(run.summary.get("synthetic"))


def _settings(run: Run) -> list[str]:
    """Return the settings, in the order of `SETTINGS` without the first two."""
    job = run.job
    nodes = int(job["nodes"])
    workers = sum(workers_by_node(job["procs_per_node"], nodes))
    data = f"{job['data']} (synthetic)" if _synthetic(run) else str(job["data"])
    precision = (run.has_summary and run.summary.get("precision_used")) or job["precision"]
    servers = count_text(job["ps"]) if job["mode"] == "async" else UNKNOWN
    tokens = job.get("batch_tokens")
    batch = count_text(job.get("global_batch_size_resolved")) if tokens is None else f"{count_text(tokens)} tokens a worker"
    if job["mode"] == "async" and tokens is None and job.get("global_batch_size_resolved") is not None:
        batch += f" ({count_text(-(-job['global_batch_size_resolved'] // workers))} per update)"
    return [job["backend"], job["mode"], job["model"], data, precision, count_text(nodes), count_text(workers), servers, batch]


def _explained(run: Run) -> dict[str, Any]:
    """Return what `trainer explain` says of the run: the verdict, and the questions with their answers; nothing where it never trained."""
    if not run.has_summary and next(run.steps(), None) is None:
        return {"verdict": None, "questions": []}
    known = as_recorded(run)
    explanation = explain(known)
    verdict = {"text": headline(explanation), "notes": notes(explanation), "advice": [_advice(entry) for entry in advise(explanation)]}
    return {"verdict": verdict, "questions": [(answer.question, answer.text) for answer in answers(known, explanation)]}


def _advice(entry: Advice) -> str:
    effect = "" if entry.speedup is None else f" ({entry.bound} {entry.speedup:.2f} × as fast)"
    return f"{entry.change}: {entry.reason}{effect}{f'; {entry.caution}' if entry.caution else ''}"


def _node(number: int, node: Mapping[str, Any]) -> list[str]:
    limit = node.get("memory_limit_bytes")
    memory = bytes_text(node.get("memory_total_bytes")) + (f", limit {bytes_text(limit)}" if limit else "")
    packages = ", ".join(f"{name} {version}" for name, version in (node.get("packages") or {}).items() if version)
    return [
        str(number),
        str(node.get("hostname") or UNKNOWN),
        ", ".join(filter(None, [node.get("cpu_model"), instructions_text(node.get("cpu_flags"))])) or UNKNOWN,
        number_text(node.get("cores_available"), 2),
        memory,
        f"{node.get('operating_system') or ''} {node.get('kernel') or UNKNOWN}".strip(),
        str(node.get("python") or UNKNOWN),
        packages or UNKNOWN,
        _gpus(node.get("gpus")),
    ]


def _gpus(gpus: Sequence[Mapping[str, Any]] | None) -> str:
    return ", ".join(f"{gpu['name']} ({bytes_text(gpu['memory_total_bytes'])})" for gpu in gpus or ()) or "none"


def config_text(job: Mapping[str, Any]) -> str:
    """Return the job as a TOML file that `--config` takes: every setting that has a value, save where the run is written."""
    lines = [f"{field} = {_toml(job[field])}" for field in Job.model_fields if field not in _PLACE and job.get(field) is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Write a JSON value as TOML: strings, numbers, booleans and lists of them look the same in both, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
