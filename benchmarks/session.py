"""A session: scene by scene, repeat by repeat, everybody in turn and alone on the machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .figures import Measured, differs
from .ours import run_ours
from .peer_runs import run_peer
from .processes import MeasurementError, environment
from .rows import CONTESTANTS, ROWS, Contestant, Ours, Peer
from .workload import WARMUP

__all__ = ["Session", "needed"]

FRAMEWORKS = {"tf": "tensorflow", "torch": "torch"}


def needed(rows: Sequence[str]) -> list[str]:
    """Return the contestants of some rows in the order of the table of contestants; a peer brings the run it is compared with."""
    names = {name for row in rows for name in (ROWS[row].ours, ROWS[row].peer) if name is not None}
    names |= {found.like for name in names if isinstance(found := CONTESTANTS[name], Peer)}
    return [name for name in CONTESTANTS if name in names]


@dataclass
class Session:
    """Runs contestants. `runs` has a list of repeats for each, None where a run failed; `problems` says what was wrong."""

    repeats: int
    shorter: int
    network: str
    threads: int | None
    timeout_seconds: float
    say: Callable[[str], None]
    runs: dict[str, list[Measured | None]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self, names: Sequence[str]) -> None:
        """Run all: within a scene A B C, A B C, …; what is compared is at most a scene's length apart."""
        for scene in dict.fromkeys(CONTESTANTS[name].scene for name in names):
            present = [name for name in names if CONTESTANTS[name].scene == scene]
            self._read_framework(next(found.backend for name in present if isinstance(found := CONTESTANTS[name], Ours)))
            for repeat in range(self.repeats):
                for name in present:
                    self._run(name, repeat)

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
            self.say(f"{repeat + 1}/{self.repeats} {name}: {measured.steps_per_second:,.0f} steps/s{first} (run of {took:.0f} s)")

    def _measure(self, contestant: Contestant, repeat: int) -> Measured:
        steps = contestant.steps // self.shorter
        with tempfile.TemporaryDirectory(prefix="trainer-benchmark-") as name:
            folder = Path(name)
            if isinstance(contestant, Ours):
                return run_ours(contestant, steps, WARMUP, self.network, self.threads, folder, self.timeout_seconds)
            ours = self.runs[contestant.like][repeat]
            if ours is None:
                raise MeasurementError(f"{contestant.like!r} gave no figures to compare with")
            found = run_peer(contestant, steps, WARMUP, ours.threads, self.network, folder, self.timeout_seconds)
        other_work = differs(ours, found, same_order=contestant.same_order)
        if other_work:
            raise MeasurementError(f"does other work than {contestant.like!r}: {other_work}")
        return found
