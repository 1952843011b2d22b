"""Runs of a sweep's points, each as a child process that ends with this process."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import list_checkpoints
from ..core.errors import UsageError
from ..core.job import DEFAULT_EPOCHS, Job
from ..core.process import command_ending_with_parent, python
from ..core.settings.job_fields import environment_name, idle_settings
from ..core.settings.sweeps import EARLIER, as_arguments
from ..models.build import written_out
from ..records.store.jsonl import DamagedRunError
from ..records.store.run_directory import RunReader
from ..records.text import duration_text, figure_text, rate_text
from .driver.resumption import foreign_settings
from .launchers.machine_checks import CaughtSignals
from .sweep_folder import Entry, Request, SweepFolder


class SignalsToChild(CaughtSignals):
    """Passes each signal to the child once. Main thread only."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def watch(self, child: subprocess.Popen[str] | None) -> None:
        """Pass signals to this child, including those that arrived while it was starting."""
        self._child = child
        if child is not None and self.interrupted:
            child.send_signal(signal.SIGINT)

    def handle(self, number: int) -> None:
        """Take a signal."""
        self.interrupted = True
        if self._child is not None:
            self._child.send_signal(number)


def run_child(arguments: Sequence[str], signals: SignalsToChild, on_error_line: Callable[[str], None] | None = None) -> tuple[int, str]:
    """Run ``trainer`` with these arguments to its end; return exit code and standard output.

    The exit code of a killed one is 128 + its signal's number. `on_error_line` gets each line of standard error; without it, this process's
    is used. The child leads a process group, so that Ctrl-C reaches it only through this process, and ends with this process, even if that
    is killed.
    """
    with subprocess.Popen(
        command_ending_with_parent(python("crosstrain.cli.main", *arguments)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if on_error_line is None else subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    ) as child:
        signals.watch(child)
        written: list[str] = []
        reader = threading.Thread(target=lambda: written.append(child.stdout.read() if child.stdout else ""), name="output")
        reader.start()
        if on_error_line is not None and child.stderr is not None:
            for line in child.stderr:
                on_error_line(line.rstrip("\n"))
        child.wait()
        signals.watch(None)
        reader.join()
    code = child.returncode
    return code if code >= 0 else 128 - code, written[0]


@dataclass(frozen=True, slots=True)
class Finished:
    """A completed point; `around_seconds` are those before and after the run clock."""

    job: Job
    around_seconds: float
    run_seconds: float
    steps: int
    examples_per_epoch: float | None


def finished(job: Job, summary: Mapping[str, Any]) -> Finished:
    """Return a completed point from its run's summary."""
    epoch = summary["examples"] / summary["epochs"] if summary["epochs"] else None
    return Finished(job, summary["total_seconds"] - summary["run_seconds"], summary["run_seconds"], summary["steps"], epoch)


def updates(job: Job, examples_per_epoch: float | None) -> int | None:
    """Return a job's maximum number of updates, if epochs and batches have a known size."""
    if job.steps is not None:
        return job.steps
    if examples_per_epoch is None or job.batch_tokens is not None:
        return None
    batch, size = job.update_batch, max(1, round(examples_per_epoch))
    epochs, rest = (job.epochs or DEFAULT_EPOCHS, 0) if job.examples is None else divmod(job.examples, size)
    return epochs * math.ceil(size / batch) + math.ceil(rest / batch)  # the last batch of an epoch may be smaller


def seconds_left(done: Sequence[Finished], missing: Sequence[Job]) -> float:
    """Return an estimate for the missing points, from at least one completed point.

    Each takes as long as the latest of the most similar points, with the run clock scaled by the maximum number of updates, relative to the
    updates done, or to their maximum if both end at the same target.
    """
    return math.fsum(_seconds(done, job) for job in missing)


def _seconds(done: Sequence[Finished], job: Job) -> float:
    like = max(reversed(done), key=lambda point: sum(getattr(point.job, name) == getattr(job, name) for name in Job.model_fields))
    planned = updates(job, like.examples_per_epoch)
    same_target = job.until is not None and job.until == like.job.until
    did = updates(like.job, like.examples_per_epoch) if same_target else like.steps
    scale = planned / did if planned is not None and did else 1.0
    return like.around_seconds + like.run_seconds * scale


USAGE = UsageError.exit_code
Reporter = Callable[[str], None]


def point_arguments(entry: Entry, request: Request, folder: Path) -> list[str]:
    """Return the arguments of ``trainer`` for a point's run."""
    config = ["--config", request.config] if request.config is not None else []
    idle = idle_settings(entry.point.job.model_dump())  # they have no effect, and `trainer run` refuses them as options
    values = {**request.flags, **entry.point.settings}
    settings = as_arguments({name: value for name, value in values.items() if name not in idle})
    return ["run", *config, *settings, "--out", str(folder), "--name", entry.point.name]


def run_points(sweep: SweepFolder, report: Reporter, *, quiet: bool) -> bool:
    """Run the missing points; return False if the user interrupted.

    `report` gets lines of progress and of the runs' standard error; `quiet` runs write no progress. Failed points are recorded, and the
    next one runs. Raises UsageError if a run of the sweep is still active.
    """
    for entry in sweep.entries:
        _refresh_state(sweep, entry)
    sweep.write("running")
    began, total = time.monotonic(), len(sweep.entries)
    if not quiet:
        report(f"{total} points, {sum(entry.state != 'succeeded' for entry in sweep.entries)} to run, in {sweep.path}")
    with SignalsToChild() as signals:
        for number, entry in enumerate(sweep.entries, start=1):
            if entry.state == "succeeded":
                continue
            if signals.interrupted:
                break
            if not quiet:
                report(f"point {number} of {total}: {entry.point.text}{_progress_text(sweep, time.monotonic() - began)}")
            _run_point(sweep, entry, signals, report, quiet=quiet)
            if not quiet:
                report(f"point {number} of {total} {_outcome(sweep, entry)}")
        interrupted = signals.interrupted and any(entry.state != "succeeded" for entry in sweep.entries)
        done = all(entry.state == "succeeded" for entry in sweep.entries)
        sweep.write("interrupted" if interrupted else "succeeded" if done else "failed")
    return not interrupted


def _refresh_state(sweep: SweepFolder, entry: Entry) -> None:
    path = sweep.run_path(entry)
    if not path.exists():
        entry.state, entry.cause = "waiting", None
        return
    state = _state(path)
    if state in ("starting", "running"):
        raise UsageError(f"sweep: the run of the point {entry.point.name} is still at work; wait until it has ended")
    entry.state = "succeeded" if state == "succeeded" else "interrupted" if state == "interrupted" else "failed"


def _state(path: Path) -> str:
    try:
        return RunReader(path).state()
    except (UsageError, DamagedRunError):
        return "damaged"


def _run_point(sweep: SweepFolder, entry: Entry, signals: SignalsToChild, report: Reporter, *, quiet: bool) -> None:
    path = sweep.run_path(entry)
    verbosity = ["--quiet"] if quiet else []
    code, error = USAGE, None
    entry.state, entry.cause, entry.exit_code = "running", None, None
    began = time.monotonic()
    if path.exists() and _state(path) != "damaged" and list_checkpoints(path):
        code, error = _start(sweep, entry, ["run", "--resume", str(path), *_typed(entry.point.job), *verbosity], signals, report)
        if code == USAGE and not signals.interrupted:
            report(f"{entry.point.name} cannot resume from its checkpoint; it restarts")
    if code == USAGE and not signals.interrupted:
        if path.exists():
            report(f"the earlier attempt is kept in {_archive(path)}")
        code, error = _start(sweep, entry, [*point_arguments(entry, sweep.request, sweep.path), *verbosity], signals, report)
    entry.seconds = time.monotonic() - began
    entry.exit_code = code
    entry.state = "succeeded" if code == 0 else "interrupted" if signals.interrupted else "failed"
    entry.cause = None if code == 0 else _cause(path, code, error)
    sweep.write("running")


def _typed(job: Job) -> list[str]:
    """Return settings that a resumed run's files omit, without variables (passwords)."""
    settings = foreign_settings(written_out(job).model_dump(mode="json"))
    return as_arguments({name: value for name, value in settings.items() if os.environ.get(environment_name(name)) != value})


def _archive(path: Path) -> Path:
    folder = path.parent / EARLIER
    folder.mkdir(mode=0o700, exist_ok=True)
    number = 1
    while (target := folder / f"{path.name}-{number}").exists():
        number += 1
    return path.rename(target)


def _start(sweep: SweepFolder, entry: Entry, arguments: Sequence[str], signals: SignalsToChild, report: Reporter) -> tuple[int, str | None]:
    entry.attempts += 1
    sweep.write("running")
    errors: list[str] = []

    def take_line(line: str) -> None:
        report(line)
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: ").strip())

    exit_code, _ = run_child(arguments, signals, take_line)
    return exit_code, errors[-1] if errors else None


def _cause(path: Path, code: int, error: str | None) -> str:
    try:
        reader = RunReader(path)
        cause = reader.status()["cause"] if reader.state() != "died" else None
    except (UsageError, DamagedRunError):
        cause = None
    if cause or error:
        return str(cause or error)
    return f"it was killed by {signal.Signals(code - 128).name}" if code > 128 else f"it ended with exit code {code}"


def _progress_text(sweep: SweepFolder, spent_seconds: float) -> str:
    succeeded = [entry for entry in sweep.entries if entry.state == "succeeded"]
    summaries = [(entry.point.job, RunReader(sweep.run_path(entry)).summary()) for entry in succeeded]
    done = [finished(job, summary) for job, summary in summaries if summary is not None]
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
