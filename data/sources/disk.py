"""Space for prepared data."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...core.errors import TrainerError


def require_disk(path: Path, folder: Path, needed_bytes: int) -> None:
    """Raise TrainerError unless a file's prepared form fits on the disk of a folder."""
    if (free := shutil.disk_usage(folder).free) < needed_bytes:
        raise TrainerError(
            f"data: {path.name!r} needs about {needed_bytes >> 20:,} MiB of disk to be prepared, and {str(folder)!r} has"
            f" {free >> 20:,} MiB. Free some, or set TRAINER_DATA_CACHE to a folder on another disk."
        )
