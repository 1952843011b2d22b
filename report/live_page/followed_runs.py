"""How the runs stand whose page is shown: which there are by now, what has changed, and what cannot be shown (yet), in words."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import TrainerError
from ...core.untrusted.console import one_line
from ...records.store.run_directory import RunReader
from ..catalog.locate import UnreadableFolderError, is_run, runs_at

__all__ = ["RECORDS", "FollowedRuns", "Standing"]

RECORDS = (
    "status.json",
    "job.json",
    "env.json",
    "summary.json",
    "calibration.json",
    "steps.jsonl",
    "evals.jsonl",
    "events.jsonl",
    "system.jsonl",
)
"""The files of a run directory that its page is made of."""

_AT_WORK = ("starting", "running")

FileStamp = tuple[int, int, int] | None
"""Inode, size and time of change (ns) of a file; None where it is not there, or may not be looked at."""

Stamp = tuple[str | FileStamp, ...]
"""What a run's page depends on: its state, and the stamp of each of `RECORDS`."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The runs at one look: those that can be shown with their stamps, how many of them are at work, and what is to be said besides."""

    runs: Mapping[Path, Stamp]
    at_work: int
    notes: tuple[str, ...]


class FollowedRuns:
    """Looks again and again at run directories and folders of runs, which may come and go; nothing that happens to them is an error.

    `places` are what `catalog.locate.find_places` returns. Only the status of runs at work is read, of all other files the stamps.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = tuple(places)
        self._states: dict[Path, tuple[FileStamp, str]] = {}
        self._seen: dict[Path, None] = {}

    def look(self) -> Standing:
        """Return how the runs stand now."""
        runs: dict[Path, Stamp] = {}
        at_work = 0
        paths, notes = self._paths()
        for path in paths:
            files = [_file_stamp(path / name) for name in RECORDS]
            state, problem = self._state(path, *files[:2])
            if state is None:
                notes.append(f"{one_line(path.name)}: {one_line(problem)}")
                continue
            runs[path] = (state, *files)
            at_work += state in _AT_WORK
        self._seen.update(dict.fromkeys(paths))
        gone = [one_line(path.name) for path in self._seen if not is_run(path)]
        if gone:
            notes.append(f"no longer there: {', '.join(gone)}")
        return Standing(runs, at_work, tuple(notes))

    def _paths(self) -> tuple[list[Path], list[str]]:
        """Return the run directories that there are, each once, and what is wrong with the places where there is none."""
        found: dict[str, Path] = {}
        notes = []
        for place in self._places:
            try:
                paths = runs_at(place)
            except (UnreadableFolderError, OSError) as error:
                notes.append(one_line(str(error)))
                continue
            if not paths and place not in self._seen:
                what = "there is no run in it yet" if os.path.isdir(place) else "the folder is no longer there"
                notes.append(f"{one_line(str(place))}: {what}")
            for path in paths:
                found.setdefault(os.path.realpath(path), path)
        return list(found.values()), notes

    def _state(self, path: Path, status: FileStamp, job: FileStamp) -> tuple[str | None, str]:
        """Return the state of a run that can be shown; else None, and why it cannot."""
        if status is None:
            return None, "it has only begun, and is shown as soon as it has a status"
        known = self._states.get(path)
        if known is None or known[0] != status or known[1] in _AT_WORK:  # a run at work may die without a word
            try:
                known = (status, RunReader(path).state())
            except (TrainerError, OSError) as error:
                return None, str(error)
            self._states[path] = known
        if job is None:
            begun = "it has only begun" if known[1] in _AT_WORK else f"it is {known[1]}"
            return None, f"{begun}, and nothing is known about it (there is no job.json)"
        return known[1], ""


def _file_stamp(path: Path) -> FileStamp:
    try:
        found = os.stat(path)
    except OSError:  # most often: it is not there; what else is wrong with a file is said by whoever reads it
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
