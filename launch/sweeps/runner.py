"""Runs the points of a sweep one after another, each as a ``trainer run`` of its own; points that are done are not run again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...checkpoint import list_checkpoints
from ...core.errors import UsageError
from ...core.job import Job
from ...core.settings.ineffective import idle_settings
from ...core.settings.job_fields import environment_name
from ...core.settings.sweeps import EARLIER, as_arguments
from ...models.build import written_out
from ...records.store.jsonl import DamagedRunError
from ...records.store.run_directory import RunReader
from ...records.text.numbers import duration_text, figure_text, rate_text
from ..resume.trust import foreign_settings
from .child_run import SignalsToChild, run_child
from .folder import Entry, Request, SweepFolder
from .remaining_time import Finished, finished, seconds_left

__all__ = ["point_arguments", "run_points"]

USAGE = UsageError.exit_code

Say = Callable[[str], None]


def point_arguments(entry: Entry, request: Request, folder: Path) -> list[str]:
    """Return the command line of a point's run, as a person would type it after ``trainer``."""
    config = ["--config", request.config] if request.config is not None else []
    idle = idle_settings(entry.point.job.model_dump())  # they change no point, and `trainer run` refuses them where they are typed
    given = {**request.flags, **entry.point.settings}
    settings = as_arguments({name: value for name, value in given.items() if name not in idle})
    return ["run", *config, *settings, "--out", str(folder), "--name", entry.point.name]


def run_points(sweep: SweepFolder, say: Say, *, quiet: bool) -> bool:
    """Run what is missing; return False where the user interrupted it.

    `say` gets the progress, a line at a time, and what the runs write to standard error; `quiet` runs write no progress. A point that
    fails is recorded, and the next one runs. Raises UsageError where a run of the sweep is still at work.
    """
    for entry in sweep.entries:
        _refresh_state(sweep, entry)
    sweep.write("running")
    began, total = time.monotonic(), len(sweep.entries)
    if not quiet:
        say(f"{total} points, {sum(entry.state != 'succeeded' for entry in sweep.entries)} to run, in {sweep.path}")
    with SignalsToChild() as signals:
        for number, entry in enumerate(sweep.entries, start=1):
            if entry.state == "succeeded":
                continue
            if signals.received:
                break
            if not quiet:
                say(f"point {number} of {total}: {entry.point.text}{_progress_text(sweep, time.monotonic() - began)}")
            _run_point(sweep, entry, signals, say, quiet=quiet)
            if not quiet:
                say(f"point {number} of {total} {_outcome(sweep, entry)}")
        interrupted = signals.received and any(entry.state != "succeeded" for entry in sweep.entries)
        done = all(entry.state == "succeeded" for entry in sweep.entries)
        sweep.write("interrupted" if interrupted else "succeeded" if done else "failed")
    return not interrupted


def _refresh_state(sweep: SweepFolder, entry: Entry) -> None:
    """Take a point's state from its run directory: the sweep may have been killed, and the run ended without it."""
    path = sweep.run_path(entry)
    if not path.exists():
        entry.state, entry.cause = "waiting", None
        return
    state = _state(path)
    if state in ("starting", "running"):
        raise UsageError(f"sweep: the run of the point {entry.point.name} is still at work; wait until it has ended")
    entry.state = "succeeded" if state == "succeeded" else "interrupted" if state == "interrupted" else "failed"


def _state(path: Path) -> str:
    """Return the state of a run directory; ``damaged`` for one that does not even tell that."""
    try:
        return RunReader(path).state()
    except (UsageError, DamagedRunError):
        return "damaged"


def _run_point(sweep: SweepFolder, entry: Entry, signals: SignalsToChild, say: Say, *, quiet: bool) -> None:
    """Run a point, or go on with it where it has a checkpoint; record the outcome."""
    path = sweep.run_path(entry)
    own = ["--quiet"] if quiet else []
    code, error = USAGE, None
    entry.state, entry.cause, entry.exit_code = "running", None, None
    began = time.monotonic()
    if path.exists() and _state(path) != "damaged" and list_checkpoints(path):
        code, error = _start(sweep, entry, ["run", "--resume", str(path), *_typed(entry.point.job), *own], signals, say)
        if code == USAGE and not signals.received:
            say(f"{entry.point.name} cannot resume from its checkpoint; it restarts")
    if code == USAGE and not signals.received:
        if path.exists():
            say(f"the earlier attempt is kept in {_archive(path)}")
        code, error = _start(sweep, entry, [*point_arguments(entry, sweep.request, sweep.path), *own], signals, say)
    entry.seconds = time.monotonic() - began
    entry.exit_code = code
    entry.state = "succeeded" if code == 0 else "interrupted" if signals.received else "failed"
    entry.cause = None if code == 0 else _cause(path, code, error)
    sweep.write("running")


def _typed(job: Job) -> list[str]:
    """Return what a point's run does not take from its own files when it goes on, as those have it, a vocabulary within the data's name.

    What a variable says the command reads there: it may hold a password.
    """
    settings = foreign_settings(written_out(job).model_dump(mode="json"))
    return as_arguments({name: value for name, value in settings.items() if os.environ.get(environment_name(name)) != value})


def _archive(path: Path) -> Path:
    """Move a run directory out of the way; return where it is now."""
    folder = path.parent / EARLIER
    folder.mkdir(mode=0o700, exist_ok=True)
    number = 1
    while (target := folder / f"{path.name}-{number}").exists():
        number += 1
    return path.rename(target)


def _start(sweep: SweepFolder, entry: Entry, arguments: Sequence[str], signals: SignalsToChild, say: Say) -> tuple[int, str | None]:
    """Run one ``trainer`` to its end; return its exit code and the last error that it wrote."""
    entry.attempts += 1
    sweep.write("running")
    errors: list[str] = []

    def hear(line: str) -> None:
        say(line)
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: ").strip())

    outcome = run_child(arguments, signals, hear)
    return outcome.exit_code, errors[-1] if errors else None


def _cause(path: Path, code: int, error: str | None) -> str:
    """Say why a run did not succeed: in the words of its status, else the last error that it wrote."""
    try:
        reader = RunReader(path)
        cause = reader.status()["cause"] if reader.state() != "died" else None
    except (UsageError, DamagedRunError):
        cause = None
    if cause or error:
        return str(cause or error)
    return f"it was killed by {signal.Signals(code - 128).name}" if code > 128 else f"it ended with exit code {code}"


def _done(sweep: SweepFolder) -> list[Finished]:
    found = []
    for entry in sweep.entries:
        if entry.state == "succeeded":
            summary = RunReader(sweep.run_path(entry)).summary()
            if summary is not None:
                found.append(finished(entry.point.job, summary))
    return found


def _progress_text(sweep: SweepFolder, spent_seconds: float) -> str:
    """Say how the whole stands: what is done, since when, and how long the rest takes if it goes on like that."""
    done = _done(sweep)
    if not done:
        return ""
    left = seconds_left(done, [entry.point.job for entry in sweep.entries if entry.state != "succeeded"])
    return f"  ({len(done)} of {len(sweep.entries)} done, {duration_text(spent_seconds)} so far, about {duration_text(left)} left)"


def _outcome(sweep: SweepFolder, entry: Entry) -> str:
    took = duration_text(entry.seconds)
    if entry.state != "succeeded":
        return f"{entry.state} after {took}: {entry.cause}"
    reader = RunReader(sweep.run_path(entry))
    summary = reader.summary() or {}
    headline = reader.metrics()[0]
    figure = (summary.get("eval") or {}).get(headline.name)
    learned = "" if figure is None else f", {headline.label} {figure_text(headline.name, figure)}"
    return f"succeeded in {took}: {rate_text(summary.get('examples_per_second')).removesuffix('/s')} examples/s{learned}"
