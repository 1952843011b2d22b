"""What each file of a run directory or a checkpoint is for, with its size; for ``trainer export --describe``."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileUse", "describe_folder"]

_CHECKPOINT_FILES = (
    ("parameters.safetensors", "weights and running statistics, by canonical name"),
    ("optimizer.safetensors", "what the optimiser remembers of each weight, by SLOT/NAME"),
    ("checkpoint.json", "where the run stood: updates, data cursor, clock, job, model, data"),
    ("manifest.json", "size and digest of each other file"),
)

_PURPOSES: tuple[tuple[str, str], ...] = (
    ("job.json", "what was asked, with every default resolved"),
    ("env.json", "what each node is"),
    ("vocabulary.model", "the pieces of text that the model was trained on, as sentencepiece's model"),
    ("status.json", "how the run stands or ended"),
    ("heartbeat", "the driver's sign of life; of a run that is at work, or whose driver was killed"),
    ("summary.json", "the figures that compare with other runs"),
    ("steps.jsonl", "the updates: losses, times, learning rates"),
    ("evals.jsonl", "the evaluations"),
    ("calibration.json", "the parts of a step, timed by themselves after the run"),
    ("events.jsonl", "starts, ends, checkpoints, deaths"),
    ("system.jsonl", "resource samples of each node"),
    ("mllog.txt", "MLPerf's event log"),
    ("tensorboard/*", "event files for TensorBoard; fewer points than the records"),
    ("logs/stacks.txt", "where each task stood when the run did not get on"),
    ("logs/*", "output of each task"),
    ("profile/*", "traces of a few steps: .json for Chrome's trace viewer, .xplane.pb for TensorBoard's profile plugin"),
    *((f"checkpoints/step-*/{name}", purpose) for name, purpose in _CHECKPOINT_FILES),
    ("checkpoints/.*", "left by a writer that was killed; the next one removes it"),
    ("exports/*/README.md", "how to load this export without trainer"),
    ("exports/*/model.json", "this export's input, normalisation, classes and weights, for programs"),
    ("exports/*", "an exported model"),
    *_CHECKPOINT_FILES,
)
"""Patterns, the first that fits counts, and what they are for. A star matches slashes too."""

UNKNOWN = "not written by trainer"


@dataclass(frozen=True, slots=True)
class FileUse:
    """A file: its path below the folder that was asked about, size, purpose."""

    path: str
    bytes: int
    purpose: str


def describe_folder(folder: Path) -> list[FileUse]:
    """Return a row for each file below a run directory or a checkpoint, by name. Files that vanish meanwhile are left out."""
    return sorted(_rows(folder), key=lambda row: row.path)


def _rows(folder: Path) -> Iterator[FileUse]:
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                yield FileUse(name, path.stat().st_size, _purpose(name))
        except FileNotFoundError:
            continue


def _purpose(name: str) -> str:
    return next((purpose for pattern, purpose in _PURPOSES if fnmatch.fnmatchcase(name, pattern)), UNKNOWN)
