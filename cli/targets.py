"""What RUN or CHECKPOINT means to the commands that take either."""

from __future__ import annotations

import os
from pathlib import Path

from ..checkpoint.folder import is_checkpoint, list_checkpoints
from ..report.locate import find_run

__all__ = ["find_target"]


def find_target(path: Path) -> Path:
    """Return a run directory or a checkpoint: a path, or the same below the folder of runs (TRAINER_OUT, by default ``runs``).

    Raises UsageError where there is none, naming runs that are called alike.
    """
    out = Path(os.environ.get("TRAINER_OUT") or "runs")
    for folder in (path, out / path):
        if is_checkpoint(folder) or list_checkpoints(folder):
            return folder
    return find_run(str(path), out)
