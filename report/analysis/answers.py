"""All answers about a run, in the usual order."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ...core.console import one_line
from ...records.text import bytes_text, saving_text
from ..runs.run import Run
from .duration import AS_PLANNED, Wanted, duration
from .evidence import Answer
from .learning import learning, learning_rate, training_set
from .utilisation import hardware_use, network_use, step_time_and_network
from .verdict import Explanation

MOST_FILES = 1000  # checked of a checkpoint, and of its folder: external folders may have any number
_NAME = re.compile(r"step-(\d{9,30})")  # a checkpoint's folder, by its updates
MOST_NAMED = 4


def checkpoint_files(run: Run) -> Answer | None:
    """Return the newest checkpoint's files, and the number and bytes of all; None without."""
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
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MOST_FILES) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbered = [(int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))]
    return [folder / name for _, name in sorted(numbered, reverse=True)]


def _files(folder: Path) -> dict[str, int]:
    try:
        with os.scandir(folder) as entries:
            kept = [entry for entry in islice(entries, MOST_FILES) if entry.is_file(follow_symlinks=False)]
            return dict(sorted((entry.name, entry.stat(follow_symlinks=False).st_size) for entry in kept))
    except FileNotFoundError:
        return {}


def answers(run: Run, explanation: Explanation, wanted: Wanted = AS_PLANNED) -> list[Answer]:
    """Return the answers about a run with a summary. Raises UsageError, DamagedRunError."""
    series, nodes = run.step_series(learning_rates=True), run.node_series()
    found = [
        duration(run, series, wanted),
        learning(run, series),
        hardware_use(explanation),
        network_use(run, explanation, nodes),
        step_time_and_network(run, explanation, series, nodes),
        learning_rate(run, series),
        training_set(run),
        checkpoint_files(run),
    ]
    return [answer for answer in found if answer is not None]


def answers_page(found: Sequence[Answer]) -> RenderableType:
    """Return the answers as lines, each after its question."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for answer in found:
        table.add_row(f"  {answer.question}", answer.text)
    return Group("", "Questions that people ask of a run (docs/explain.md):", table)


def answers_json(found: Sequence[Answer]) -> dict[str, Any]:
    """Return the answers as JSON by their keys."""
    return {answer.key: {"text": answer.text, **answer.figures} for answer in found}
