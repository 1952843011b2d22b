"""Kills a task of a run that goes on, as soon as it has trained."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ..core.untrusted.bounded_json import parse_json

__all__ = ["kill_task_once"]

PATIENCE_SECONDS = 300.0
LOOK_SECONDS = 0.02


def kill_task_once(path: Path, task: str) -> None:
    """Kill the process of a task of the run at `path`, which may not have begun yet, once updates are recorded and it was sampled."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        pid = _pid_of(path, task)
        if pid is not None and (path / "steps.jsonl").exists() and (path / "steps.jsonl").stat().st_size:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(LOOK_SECONDS)
    raise AssertionError(f"{task} of {path} never trained")


def _pid_of(path: Path, task: str) -> int | None:
    samples = path / "system.jsonl"
    lines = samples.read_bytes().splitlines(keepends=True) if samples.exists() else []
    found = [parse_json(line) for line in lines if line.endswith(b"\n")]
    return next((entry["pid"] for record in found for entry in record["tasks"] if entry["task"] == task), None)
