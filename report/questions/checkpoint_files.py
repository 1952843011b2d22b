"""Which files does a checkpoint consist of, and how large are they?"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

from ...checkpoint import list_checkpoints
from ...core.untrusted.console import one_line
from ...records.text.numbers import bytes_text
from ..catalog.run import Run
from .answer import Answer

__all__ = ["checkpoint_files"]

MOST_FILES = 1000
"""Of a checkpoint that are looked at: ours have a few, and a folder from elsewhere may have any number."""

MOST_NAMED = 4


def checkpoint_files(run: Run) -> Answer | None:
    """Return the newest checkpoint's files with their bytes, how many checkpoints there are, and their bytes in all; None without any."""
    paths = list_checkpoints(run.path)
    sizes = [(path, found) for path in paths if (found := _files(path)) is not None]
    if not sizes:
        return None
    newest, files = sizes[0]
    whole, every = sum(files.values()), sum(sum(found.values()) for _, found in sizes)
    figures: dict[str, Any] = {
        "newest": newest.name,
        "files": [{"name": name, "bytes": size} for name, size in files.items()],
        "bytes": whole,
        "kept": len(sizes),
        "kept_bytes": every,
    }
    largest = sorted(files.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{name} {bytes_text(size)}" for name, size in largest[:MOST_NAMED])
    more = f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else ""
    text = f"{newest.name} has {bytes_text(whole)}: {named}{more}; {len(sizes)} kept, {bytes_text(every)} in all"
    return Answer("checkpoint_files", "checkpoint files", one_line(text), figures)


def _files(folder: Path) -> dict[str, int] | None:
    """Return the sizes of a folder's files, links not followed; None where it is gone, as a run at work removes old ones."""
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.stat(follow_symlinks=False).st_size) for entry in islice(entries, MOST_FILES) if _is_file(entry)]
    except FileNotFoundError:
        return None
    return dict(sorted(found))


def _is_file(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False)
