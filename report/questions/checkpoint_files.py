"""Which files does a checkpoint consist of, and how large are they?"""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path
from typing import Any

from ...core.untrusted.console import one_line
from ...records.text.numbers import bytes_text, saving_text
from ..catalog.run import Run
from .answer import Answer

__all__ = ["checkpoint_files"]

MOST_FILES = 1000
"""Of a checkpoint, and checkpoints of a run, that are looked at: ours have a few, and a folder from elsewhere may have any number."""

_NAME = re.compile(r"step-(\d{9,30})")
"""As checkpoints are called in a run directory; the number is that of their updates."""

MOST_NAMED = 4


def checkpoint_files(run: Run) -> Answer | None:
    """Return the newest checkpoint's files with their bytes, how many checkpoints there are, and their bytes in all; None without any."""
    sizes = [(path, found) for path in _newest_first(run.path / "checkpoints") if (found := _files(path))]
    if not sizes:
        return None
    newest, files = sizes[0]
    saving = (run.summary.get("checkpoints") if run.has_summary else None) or {}
    whole, every = sum(files.values()), sum(sum(found.values()) for _, found in sizes)
    figures: dict[str, Any] = {
        "newest": newest.name,
        "files": [{"name": name, "bytes": size} for name, size in files.items()],
        "bytes": whole,
        "kept": len(sizes),
        "kept_bytes": every,
        **{name: saving.get(name) for name in ("stall_seconds", "write_seconds")},
    }
    largest = sorted(files.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{name} {bytes_text(size)}" for name, size in largest[:MOST_NAMED])
    more = f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else ""
    cost = f"; {saving_text(saving)}" if saving.get("saved") else ""
    text = f"{newest.name} has {bytes_text(whole)}: {named}{more}; {len(sizes)} kept, {bytes_text(every)} in total{cost}"
    return Answer("checkpoint_files", "checkpoint files", one_line(text), figures)


def _newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, that of most updates first; none where there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MOST_FILES) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbered = [(int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))]
    return [folder / name for _, name in sorted(numbered, reverse=True)]


def _files(folder: Path) -> dict[str, int]:
    """Return the sizes of a folder's files by name, links not followed; none where it is gone, as a run at work removes old ones."""
    try:
        with os.scandir(folder) as entries:
            kept = [entry for entry in islice(entries, MOST_FILES) if entry.is_file(follow_symlinks=False)]
            return dict(sorted((entry.name, entry.stat(follow_symlinks=False).st_size) for entry in kept))
    except FileNotFoundError:
        return {}
