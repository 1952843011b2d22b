"""Many run directories with documents written directly, for commands about many runs."""

from __future__ import annotations

import json
import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from run_samples import async_run, sync_run

STARTED = datetime(2026, 3, 1, 12, 0).astimezone()


def documents(path: Path) -> dict[str, Any]:
    """The documents of a run by name."""
    return {name: json.loads((path / name).read_text()) for name in ("job.json", "status.json", "summary.json")}


def write_run(path: Path, run_documents: dict[str, Any]) -> Path:
    """Write a run directory with the given documents; None omits one, text is written as it is."""
    path.mkdir(parents=True)
    for name, value in run_documents.items():
        if value is not None:
            (path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def variant(template: dict[str, Any], number: int, *, name: str, **figures: Any) -> dict[str, Any]:
    """Return documents like another run's, made `number` hours after `STARTED`.

    `figures` replace those of the summary.
    """
    summary = {**template["summary.json"], "run": name, **figures}
    status = {**template["status.json"], "created_at": (STARTED + timedelta(hours=number)).isoformat(timespec="milliseconds")}
    return {"job.json": {**template["job.json"], "name": name}, "status.json": status, "summary.json": summary}


def many_runs(out: Path, count: int, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Make `count` runs below `out`, one in ten of them in a folder; return documents by name."""
    chance = random.Random(seed)
    templates = [documents(sync_run(out.parent / "templates")), documents(async_run(out.parent / "templates"))]
    made = {}
    for number in range(count):
        name = f"run-{number:05}"
        accuracy = None if number % 7 == 0 else round(chance.random(), 6)
        run_documents = variant(
            templates[number % 2],
            number,
            name=name,
            eval=None if accuracy is None else {**templates[0]["summary.json"]["eval"], "accuracy": accuracy},
            examples_per_second=round(chance.uniform(1, 1e5), 3),
            seed=number,
        )
        place = f"sweep-{number // 100}/{name}" if number % 10 == 0 else name
        write_run(out / place, run_documents)
        made[place] = run_documents
    return made
