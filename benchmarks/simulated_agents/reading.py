"""Benchmark of commands that read the records of a large run after an hour."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstrain.core.process import python

HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Megabytes of records, and the seconds that each command took, from its start to its end."""

    records_megabytes: float
    watch_seconds: float
    explain_seconds: float
    report_seconds: float
    report_megabytes: float


def read_an_hour(run: Path) -> Reading:
    """Extend a copy of a finished run to the records of an hour, and time the commands on it."""
    copy = run.with_name(f"{run.name}-hour")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("logs"))
    extend(copy, HOUR_SECONDS)
    size = sum(path.stat().st_size for path in copy.iterdir() if path.is_file())
    page = copy.with_suffix(".html")
    seconds = [_timed(command, str(copy), *options) for command, *options in (("watch",), ("explain",), ("report", "-o", str(page)))]
    return Reading(size / 1e6, *seconds, page.stat().st_size / 1e6)


def extend(run: Path, seconds: float) -> None:
    """Repeat the second half of a run's updates and samples up to this many seconds."""
    job = json.loads((run / "job.json").read_text())
    steps = _lines(run / "steps.jsonl")
    end = steps[-1]["time_seconds"]
    done = steps[-1]["step"] + steps[-1]["count"]
    first_repeated = next(line["step"] for line in steps if line["time_seconds"] > end / 2)

    def later_step(line: dict[str, Any], turn: int) -> None:
        line["step"] += turn * (done - first_repeated)

    _repeat(run / "steps.jsonl", steps, end, seconds, later_step)
    _repeat(run / "system.jsonl", _lines(run / "system.jsonl"), end, seconds, lambda line, turn: None)
    last = _lines(run / "steps.jsonl")[-1]
    (run / "job.json").write_text(json.dumps({**job, "total_steps": last["step"] + last["count"]}))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _repeat(path: Path, lines: list[dict[str, Any]], end: float, seconds: float, change: Callable[[dict[str, Any], int], None]) -> None:
    repeated = [line for line in lines if end / 2 < line["time_seconds"] <= end]
    with path.open("a") as file:
        turn = 1
        while repeated and end + (turn - 1) * end / 2 < seconds:
            for line in repeated:
                later = {**line, "time_seconds": line["time_seconds"] + turn * end / 2}
                change(later, turn)
                file.write(json.dumps(later, separators=(",", ":")) + "\n")
            turn += 1


def _timed(command: str, *arguments: str) -> float:
    began = time.monotonic()
    subprocess.run(python("crosstrain.cli.main", command, *arguments), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.monotonic() - began
