"""A session: scene by scene, repeat by repeat, everybody in turn and alone on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crosstrain.core.errors import UsageError

from .contestants import Contestant, Ours, Peer
from .figures import Measured, differs
from .generated_text import DATA, write_text
from .kept_results import KeptResults
from .ours import run_ours, steps_of
from .peer_runs import run_peer
from .processes import MeasurementError, environment
from .rows import CONTESTANTS, ROWS
from .workload import Work

FRAMEWORKS = {"tf": "tensorflow", "torch": "torch"}


def needed(rows: Sequence[str]) -> list[str]:
    """Return the contestants of some rows in the order of the table of contestants.

    A peer brings the run it is compared with.
    """
    names = {name for row in rows for name in ROWS[row].contestants}
    names |= {contestant.like for name in names if isinstance(contestant := CONTESTANTS[name], Peer)}
    return [name for name in CONTESTANTS if name in names]


def prepare(datasets: Iterable[str]) -> None:
    """Prepare what the runs need, in separate processes, so this one stays small.

    A process inherits its starter's peak memory until it executes its program, and wait4(2) includes that. Raises UsageError.
    """
    names = sorted(datasets)
    if DATA in names:
        write_text()
    for name in names:
        trainer = str(Path(sys.executable).with_name("trainer"))
        done = subprocess.run([trainer, "data", "prepare", name], capture_output=True, text=True, check=False, env=environment({}))
        if done.returncode:
            raise UsageError(f"data: {name!r} cannot be prepared: {done.stderr.strip()}")


def work_of(contestant: Contestant) -> Work:
    """Return what a contestant trains; a peer does the work of the run that it is compared with."""
    ours = CONTESTANTS[contestant.like] if isinstance(contestant, Peer) else contestant
    assert isinstance(ours, Ours)
    return ours.work


@dataclass
class Session:
    """Runs contestants. `runs` has a list of repeats for each, None for a failed run.

    `problems` has the reasons.
    """

    repeats: int
    shorter: int
    network: str
    threads: int | None
    timeout_seconds: float
    log: Callable[[str], None]
    kept: KeptResults
    runs: dict[str, list[Measured | None]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self, names: Sequence[str]) -> None:
        """Run all: within a scene A B C, A B C, …; compared runs are at most a scene apart."""
        for scene in dict.fromkeys(CONTESTANTS[name].scene for name in names):
            everybody = {name: CONTESTANTS[name] for name in names if CONTESTANTS[name].scene == scene}
            read = False
            for repeat in range(
                min(self.repeats, *(work_of(contestant).most_repeats or self.repeats for contestant in everybody.values()))
            ):
                present = {name: contestant for name, contestant in everybody.items() if not _has_done_enough(contestant, repeat)}
                for name in everybody.keys() - present.keys():
                    self.runs[name].append(None)
                if result := self.kept.find(present, repeat):
                    for name, run in result.items():
                        self.runs.setdefault(name, []).append(run)
                    self.log(f"{repeat + 1}/{self.repeats} {scene}: kept from an earlier call")
                    continue
                if not read:
                    self._read_framework(next(contestant.backend for contestant in present.values() if isinstance(contestant, Ours)))
                    read = True
                for name in present:
                    self._run(name, repeat)
                self.kept.keep(present, repeat, {name: self.runs[name][repeat] for name in present})

    def _read_framework(self, backend: str) -> None:
        """Import the framework once, so the first contestant does not read it from the disk."""
        subprocess.run([sys.executable, "-c", f"import {FRAMEWORKS[backend]}"], check=True, env=environment({}), stderr=subprocess.DEVNULL)

    def _run(self, name: str, repeat: int) -> None:
        began = time.monotonic()
        contestant = CONTESTANTS[name]
        try:
            measured = self._measure(contestant, repeat)
        except MeasurementError as error:
            self.problems.append(f"{name}, repeat {repeat + 1}: {error}")
            self.log(f"{name}: FAILED\n    {error}")
            measured = None
        self.runs.setdefault(name, []).append(measured)
        if measured is not None:
            first = "" if measured.first_step_seconds is None else f", first step after {measured.first_step_seconds:.1f} s"
            took = time.monotonic() - began
            rate = f"{measured.steps_per_second:,.{0 if measured.steps_per_second >= 100 else 2}f}"
            self.log(f"{repeat + 1}/{self.repeats} {name}: {rate} steps/s{first} (run of {took:.0f} s)")

    def _measure(self, contestant: Contestant, repeat: int) -> Measured:
        with tempfile.TemporaryDirectory(prefix="trainer-benchmark-") as name:
            folder = Path(name)
            if isinstance(contestant, Ours) and contestant.script:
                steps, threads = steps_of(contestant, contestant.work, self.shorter), self.threads or len(os.sched_getaffinity(0))
                return run_peer(contestant.scripted, contestant.work, steps, threads, self.network, folder, self.timeout_seconds)
            if isinstance(contestant, Ours):
                return run_ours(contestant, self.shorter, self.network, self.threads, folder, self.timeout_seconds)
            ours = self.runs[contestant.like][repeat]
            if ours is None:
                raise MeasurementError(f"{contestant.like!r} gave no figures to compare with")
            work = work_of(contestant)
            steps = steps_of(contestant, work, self.shorter)
            peer_figures = run_peer(contestant, work, steps, ours.threads, self.network, folder, self.timeout_seconds)
        other_work = None if contestant.losses == "none" else differs(ours, peer_figures, contestant.losses, work.same_loss, work.same_mean)
        if other_work:
            raise MeasurementError(f"does other work than {contestant.like!r}: {other_work}")
        return peer_figures


def _has_done_enough(contestant: Contestant, repeat: int) -> bool:
    """Whether a contestant has had all of its turns before this one."""
    return isinstance(contestant, Peer) and contestant.most_repeats is not None and repeat >= contestant.most_repeats
