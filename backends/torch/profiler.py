"""The trace of ``--profile``: a few updates of the first worker, as a file that Chrome's and TensorBoard's trace viewers open."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from ...core.cluster import Task
from ...core.job import Job

__all__ = ["StepProfiler", "make_tracer"]

FOLDER_VARIABLE = "TRAINER_PROFILE_DIR"


def make_tracer(task: Task, job: Job, device: torch.device) -> StepProfiler | None:
    """Return what traces this task's first updates after warm-up, None where nothing is to be traced here."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return StepProfiler(task.name, job.profile, Path(folder), device) if job.profile and folder and task.rank == 0 else None


class StepProfiler:
    """Traces from the first `begin` on, until as many updates are done."""

    def __init__(self, task: str, updates: int, folder: Path, device: torch.device) -> None:
        self._path = folder / f"{task}.{time.time_ns() // 10**6}.pt.trace.json"
        self._left = updates
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._running = False

    def begin(self) -> None:
        """An update is about to begin; does nothing while the trace runs or when it is done."""
        if self._left > 0 and not self._running:
            self._profiler.start()
            self._running = True

    def done(self, updates: int = 1) -> None:
        """So many more updates are done; with the last of them the trace is written."""
        self._left -= updates
        if self._running and self._left <= 0:
            self._profiler.stop()
            self._running = False
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._path))
