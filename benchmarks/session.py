"""A session: scene by scene, repeat by repeat, everybody in turn and alone on the machine."""

from __future__ import annotations

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
from .kept import Kept
from .ours import run_ours, steps_of
from .parallel_text import TEXT, make_text
from .peer_runs import run_peer
from .processes import MeasurementError, environment
from .rows import CONTESTANTS, ROWS
from .workload import Work

__all__ = ["Session", "needed", "prepare", "work_of"]

FRAMEWORKS = {"tf": "tensorflow", "torch": "torch"}


def needed(rows: Sequence[str]) -> list[str]:
    """Return the contestants of some rows in the order of the table of contestants; a peer brings the run it is compared with."""
    names = {name for row in rows for name in ROWS[row].contestants}
    names |= {found.like for name in names if isinstance(found := CONTESTANTS[name], Peer)}
    return [name for name in CONTESTANTS if name in names]


def prepare(datasets: Iterable[str]) -> None:
    """Prepare what is missing, so that no run has to; in processes of their own, so that this one stays small.

    A process inherits its starter's peak memory until it runs its own program, and wait4(2) counts that in. Raises UsageError.
    """
    for name in sorted(datasets):
        if name == TEXT:
            make_text()
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
    """Runs contestants. `runs` has a list of repeats for each, None where a run failed; `problems` says what was wrong.

    Turns that are `kept` are not run again.
    """

    repeats: int
    shorter: int
    network: str
    threads: int | None
    timeout_seconds: float
    say: Callable[[str], None]
    kept: Kept | None = None
    runs: dict[str, list[Measured | None]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self, names: Sequence[str]) -> None:
        """Run all: within a scene A B C, A B C, …; what is compared is at most a scene's length apart."""
        for scene in dict.fromkeys(CONTESTANTS[name].scene for name in names):
            present = [name for name in names if CONTESTANTS[name].scene == scene]
            warm = False
            bounds = [most for name in present if (most := work_of(CONTESTANTS[name]).most_repeats) is not None]
            for repeat in range(min([self.repeats, *bounds])):
                if self._take_up(scene, repeat, present):
                    continue
                if not warm:
                    self._read_framework(next(found.backend for name in present if isinstance(found := CONTESTANTS[name], Ours)))
                    warm = True
                for name in present:
                    self._run(name, repeat)
                self._keep(scene, repeat, present)

    def _take_up(self, scene: str, repeat: int, present: Sequence[str]) -> bool:
        """Take a turn from those that are kept, if it is there."""
        found = None if self.kept is None else self.kept.read(scene, repeat, {name: CONTESTANTS[name] for name in present})
        if found is None:
            return False
        for name in present:
            self.runs.setdefault(name, []).append(found[name])
        self.say(f"{repeat + 1}/{self.repeats} {scene}: kept from before")
        return True

    def _keep(self, scene: str, repeat: int, present: Sequence[str]) -> None:
        """Keep the turn that has just been run, if nothing failed in it."""
        done = {name: run for name in present if (run := self.runs[name][repeat]) is not None}
        if self.kept is not None and len(done) == len(present):
            self.kept.write(scene, repeat, {name: CONTESTANTS[name] for name in present}, done)

    def _read_framework(self, backend: str) -> None:
        """Import the framework once, so that the first contestant is not the one that reads it from the disk."""
        subprocess.run([sys.executable, "-c", f"import {FRAMEWORKS[backend]}"], check=True, env=environment({}), stderr=subprocess.DEVNULL)

    def _run(self, name: str, repeat: int) -> None:
        began = time.monotonic()
        contestant = CONTESTANTS[name]
        try:
            measured = self._measure(contestant, repeat)
        except MeasurementError as error:
            self.problems.append(f"{name}, repeat {repeat + 1}: {error}")
            self.say(f"{name}: FAILED\n    {error}")
            measured = None
        self.runs.setdefault(name, []).append(measured)
        if measured is not None:
            first = "" if measured.first_step_seconds is None else f", first step after {measured.first_step_seconds:.1f} s"
            took = time.monotonic() - began
            rate = f"{measured.steps_per_second:,.{0 if measured.steps_per_second >= 100 else 2}f}"
            self.say(f"{repeat + 1}/{self.repeats} {name}: {rate} steps/s{first} (run of {took:.0f} s)")

    def _measure(self, contestant: Contestant, repeat: int) -> Measured:
        with tempfile.TemporaryDirectory(prefix="trainer-benchmark-") as name:
            folder = Path(name)
            if isinstance(contestant, Ours):
                return run_ours(contestant, self.shorter, self.network, self.threads, folder, self.timeout_seconds)
            ours = self.runs[contestant.like][repeat]
            if ours is None:
                raise MeasurementError(f"{contestant.like!r} gave no figures to compare with")
            work = work_of(contestant)
            steps = steps_of(contestant, work, self.shorter)
            found = run_peer(contestant, work, steps, ours.threads, self.network, folder, self.timeout_seconds)
        other_work = None if contestant.losses == "none" else differs(ours, found, contestant.losses, work.same_loss, work.same_mean)
        if other_work:
            raise MeasurementError(f"does other work than {contestant.like!r}: {other_work}")
        return found
