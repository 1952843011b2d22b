"""Accuracy of `trainer predict`: some runs of virtual nodes to fit, others to test.

``python -m benchmarks.prediction measure --out FOLDER`` makes the runs missing in FOLDER; ``… write --out FOLDER`` evaluates and
writes the table that the package ships and that docs/scaling.md shows. Nothing else may run on the machine while it measures.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from crosstrain.core.units import parse_bandwidth

from ..processes import Group, MeasurementError, environment
from .table import write_documents

WORKLOAD = ("--model", "cnn", "--data", "synthetic-images:size=96,classes=10")
"""With a batch of 48 it computes for as long as its 2.2 MB take on a link of some 150 Mbit/s, so that either can hold it back.

The kernel holds a limited node back every 20 ms, so steps have to be much longer than that.
"""

BATCH_SIZE = 48
CORES_PER_NODE = 0.3
"""Four nodes of it leave two fifths of two cores to the kernel, which carries their packets, and to the driver."""

STEPS_OF_A_WORKER = 25
BANDWIDTHS = ("100mbit", "300mbit", "1gbit")
TIMEOUT_SECONDS = 300.0

MAX_FOREIGN_CORES = 0.15
"""Maximum usage by other programs during a run, including the system's own work."""

TRIES = 4


@dataclass(frozen=True, slots=True)
class Scene:
    """A backend in a mode; each is fitted and judged by itself."""

    backend: str
    mode: str

    @property
    def name(self) -> str:
        """The scene's name on the command line."""
        return f"{self.backend}-{self.mode}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run to make."""

    scene: Scene
    nodes: int
    bandwidth: str
    batch_size: int = BATCH_SIZE

    @property
    def name(self) -> str:
        """The name of its run directory."""
        return f"{self.scene.name}-{self.nodes}n-{self.bandwidth}-b{self.batch_size}"

    @property
    def bits_per_second(self) -> float:
        """The speed of each node's link."""
        return parse_bandwidth(self.bandwidth)

    def command(self, out: Path) -> list[str]:
        """Return the command that makes it."""
        steps = STEPS_OF_A_WORKER * (self.nodes if self.scene.mode == "async" else 1)
        options = {
            "--backend": self.scene.backend,
            "--mode": self.scene.mode,
            "--nodes": self.nodes,
            "--bandwidth": self.bandwidth,
            "--batch-size": self.batch_size,
            "--cores-per-node": CORES_PER_NODE,
            "--threads": 1,
            "--steps": steps,
            "--eval-every": "end",
            "--out": out,
            "--name": self.name,
        }
        trainer = str(Path(sys.executable).with_name("trainer"))
        return [trainer, "run", *WORKLOAD, "--no-save-final", *(str(word) for pair in options.items() for word in pair)]


SCENES = tuple(Scene(backend, mode) for backend in ("torch", "tf") for mode in ("sync", "async"))

FITTED = {1: ((2, "300mbit"),), 2: ((2, "100mbit"), (2, "1gbit"))}
"""The runs (nodes, bandwidth) that the model is fitted to: one, or two of different bandwidths. It is judged on all others."""


def wanted_runs(scene: Scene) -> Iterator[Wanted]:
    """Yield a scene's runs: two, three and four nodes at each bandwidth.

    Also four with half the batch each, which is the batch of two.
    """
    for nodes in (2, 3, 4):
        for bandwidth in BANDWIDTHS:
            yield Wanted(scene, nodes, bandwidth)
    yield Wanted(scene, 4, BANDWIDTHS[1], BATCH_SIZE // 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or write; return the exit code: 1 where a run failed."""
    options = _parse(arguments)
    scenes = [scene for scene in SCENES if options.only is None or scene.name in options.only]
    if options.action == "write":
        write_documents(options.out, scenes, wanted_runs, FITTED, " ".join(WORKLOAD))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    began, left = time.monotonic(), [run for scene in scenes for run in wanted_runs(scene) if not (options.out / run.name).exists()]
    while left and (options.seconds is None or time.monotonic() - began < options.seconds):
        run = left.pop(0)
        try:
            _make(run, options.out)
        except MeasurementError as error:
            print(f"benchmarks.prediction: {error}", file=sys.stderr)
            return 1
        print(f"{run.name}: made; {len(left)} left", flush=True)
    return 0


def _make(run: Wanted, out: Path) -> None:
    """Make a run; its directory exists afterwards only if it succeeded.

    A run during which other processes used the machine is deleted and repeated, whatever its result. Raises MeasurementError.
    """
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(dir=out, prefix=".making-") as folder, Group(Path(folder)) as group:
            before, began = _processor_seconds(), time.monotonic()
            group.start("trainer", run.command(Path(folder)), environment({}))
            group.wait_for("trainer", TIMEOUT_SECONDS)
            foreign = _used_between(before, _processor_seconds()) / (time.monotonic() - began)
            print(f"{run.name}: others used {foreign:.2f} cores", file=sys.stderr, flush=True)
            if foreign <= MAX_FOREIGN_CORES:
                (Path(folder) / run.name).rename(out / run.name)
                return
    raise MeasurementError(f"{run.name}: others used the machine in each of {TRIES} tries; no figure would be worth anything")


def _processor_seconds() -> dict[tuple[int, float], float]:
    """Return the CPU seconds of each live process, by process id and start time.

    Kernel threads are included, with nanosecond precision. The machine's total is only sampled, a hundred times a second, in step
    with the kernel's throttling of the nodes, so equal runs seemed to differ by 0.2 cores.
    """
    seconds = {}
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                times = process.cpu_times()
                seconds[process.pid, process.create_time()] = float(times.user + times.system)
        except psutil.NoSuchProcess:
            continue
    return seconds


def _used_between(before: Mapping[tuple[int, float], float], after: Mapping[tuple[int, float], float]) -> float:
    """Return what all processes but this one have used; those that came and went are missing."""
    return sum(seconds - before.get(key, 0.0) for key, seconds in after.items() if key[0] != os.getpid())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description="Judge trainer predict; see docs/scaling.md.")
    parser.add_argument("action", choices=("measure", "write"))
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the runs are")
    parser.add_argument("--only", nargs="+", choices=[scene.name for scene in SCENES], help="these scenes (default: all)")
    parser.add_argument("--seconds", type=float, help="measure: start no further run after this long; call again for the rest")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
