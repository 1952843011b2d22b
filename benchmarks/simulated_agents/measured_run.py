"""One run with simulated nodes: time of its start, and the driver's usage while it trains."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from crosstrain.core.process import python
from crosstrain.records.store.run_directory import RunReader
from crosstrain.records.store.sample_thinning import BURST_BYTES, BYTES_PER_SECOND

from ..processes import environment
from .backend import STEP_VARIABLE
from .process import LOADED

STEP_SECONDS = 0.025
"""Forty updates a second: twenty in each of the two plans that the driver sends in a second."""

SAMPLE_SECONDS = 2.0
POLL_SECONDS = 0.2

MAX_START_SECONDS = 300.0
MAX_END_SECONDS = 120.0

SETTLED_FRACTION = 0.1
"""Fraction of the training at each end in which the driver is not measured."""

_ENTRY_POINTS = """[crosstrain.backends]
simulated = benchmarks.simulated_agents.backend:BACKEND

[crosstrain.forwards]
logreg/simulated = benchmarks.simulated_agents.forward
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a run.

    `start_seconds`: from the command to the run clock, of which the driver's process worked `start_cpu_seconds`. `driver_cores` is what it
    used of a core while all trained, by the system's account of its own process (getrusage), without the agent of node 0, and
    `driver_peak_bytes` the most memory that was resident in it. `bytes_in_an_hour`: what the first hour's records would come to, by what
    was written and how fast it grew in the end; of samples no more than their budget. `end_seconds`: from the last update to the end of the
    command.
    """

    nodes: int
    run: str
    exit_code: int
    start_seconds: float
    start_cpu_seconds: float
    train_seconds: float
    plans_per_second: float
    samples_per_second: float
    driver_cores: float
    driver_peak_bytes: int
    bytes_in_an_hour: float
    end_seconds: float


@contextmanager
def plugin_folder() -> Iterator[Path]:
    """Make a folder for PYTHONPATH that registers the backend of simulated nodes."""
    with tempfile.TemporaryDirectory(prefix="simulated-backend-") as name:
        folder = Path(name)
        (folder / "benchmarks").symlink_to(Path(__file__).resolve().parents[1], target_is_directory=True)
        package = folder / "crosstrain_simulated-1.0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: crosstrain-simulated\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text(_ENTRY_POINTS)
        yield folder


def measure(nodes: int, seconds: float, processes: int, out: Path) -> Measured:
    """Train on `nodes` nodes for about this many seconds, all but the first simulated.

    They are distributed over processes. Raises RuntimeError.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
    name = f"simulated-{nodes}-{secrets.token_hex(2)}"
    settings = {
        "backend": "simulated",
        "nodes": str(nodes),
        "data": "synthetic-images:size=8,classes=10,train=200000,test=100",
        "batch_size": "4",
        "steps": str(max(1, round(seconds / STEP_SECONDS))),
        "eval_every": "end",
        "sample_interval": str(SAMPLE_SECONDS),
        "save_final": "false",
        "start_timeout": str(MAX_START_SECONDS),
    }
    with ExitStack() as ending:
        folder = ending.enter_context(plugin_folder())
        secret = {"TRAINER_SECRET": secrets.token_hex(16), STEP_VARIABLE: str(STEP_SECONDS)}
        surroundings = environment({**secret, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])})
        options = [
            f"--no-{key.replace('_', '-')}" if value == "false" else f"--{key.replace('_', '-')}={value}" for key, value in settings.items()
        ]
        command = [*python("crosstrain.cli.main", "run"), *options, f"--out={out}", f"--name={name}", f"--rendezvous={rendezvous}"]
        simulators, first = [], 1
        for share in (len(range(1 + number, nodes, processes)) for number in range(min(processes, nodes - 1))):
            arguments = ["--first", str(first), "--count", str(share), "--rendezvous", rendezvous]
            started = python("benchmarks.simulated_agents.process", *arguments, *(f"{key}={value}" for key, value in settings.items()))
            simulators.append(ending.enter_context(_started(started, surroundings, output=subprocess.PIPE)))
            first += share
        for simulator in simulators:
            if simulator.stdout is None or simulator.stdout.readline().strip() != LOADED.encode():
                raise RuntimeError("a process of simulated agents has not come so far as to join")
        errors = ending.enter_context(tempfile.TemporaryFile("w+"))
        if nodes == 1:
            command[-1] = "--network=host"
        else:
            command.append("--node-rank=0")
        began = time.monotonic()
        driver = ending.enter_context(_started(command, surroundings, errors))
        try:
            return _watched(driver, out / name, nodes, began)
        except RuntimeError as error:
            errors.seek(0)
            raise RuntimeError(f"{error}; its last words:\n{errors.read()[-2000:]}") from error


@contextmanager
def _started(
    command: list[str], surroundings: dict[str, str], errors: IO[str] | None = None, output: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, which does not outlive the block."""
    process = subprocess.Popen(command, env=surroundings, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
    try:
        yield process
        process.wait(10.0)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _watched(driver: subprocess.Popen[bytes], run: Path, nodes: int, began: float) -> Measured:
    process = psutil.Process(driver.pid)
    _await(driver, lambda: _event(run, "run_started") is not None, MAX_START_SECONDS, "to begin")
    start_seconds, start_cpu_seconds = time.monotonic() - began, _cpu_seconds(process)
    looks: list[tuple[float, float, int, int]] = []
    peak = 0

    def look() -> bool:
        nonlocal peak
        looks.append((time.monotonic(), _cpu_seconds(process), *_sizes(run)))
        peak = max(peak, _peak_bytes(driver.pid))
        return _event(run, "run_ended") is not None

    _await(driver, look, 24 * 3600.0, "to train")
    trained = time.monotonic()
    _await(driver, lambda: driver.poll() is not None, MAX_END_SECONDS, "to end")
    end_seconds = time.monotonic() - trained
    spare = int(len(looks) * SETTLED_FRACTION)
    first, last = looks[spare], looks[-1 - spare]
    middle = looks[len(looks) // 2]
    train_seconds = trained - began - start_seconds
    rest = 3600.0 - train_seconds
    without_samples, of_samples = (last[index] + (last[index] - middle[index]) / max(1e-9, last[0] - middle[0]) * rest for index in (2, 3))
    reader = RunReader(run)
    summary = reader.summary() or {}
    samples = sum(node["samples"] for node in summary.get("per_node", ()))
    return Measured(
        nodes=nodes,
        run=str(run),
        exit_code=driver.wait(),
        start_seconds=start_seconds,
        start_cpu_seconds=start_cpu_seconds,
        train_seconds=train_seconds,
        plans_per_second=sum(1 for _ in reader.steps()) / train_seconds,
        samples_per_second=samples / train_seconds,
        driver_cores=(last[1] - first[1]) / (last[0] - first[0]),
        driver_peak_bytes=peak,
        bytes_in_an_hour=without_samples + min(of_samples, _most_of_samples(run)),
        end_seconds=end_seconds,
    )


def _await(driver: subprocess.Popen[bytes], condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if driver.poll() not in (None, 0):
            raise RuntimeError(f"the driver ended with code {driver.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {seconds:.0f} s for the run {what}")
        time.sleep(POLL_SECONDS)


def _event(run: Path, name: str) -> dict[str, object] | None:
    path = run / "events.jsonl"
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if f'"event":"{name}"' in line:
            event: dict[str, object] = json.loads(line)
            return event
    return None


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _peak_bytes(pid: int) -> int:
    try:
        match = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def _sizes(run: Path) -> tuple[int, int]:
    """Return the bytes of a run's files without its samples, and of the samples.

    TensorBoard's files are mostly samples and count as such.
    """
    sizes = {path: path.stat().st_size for path in run.rglob("*") if path.is_file()}
    allow_samples = sum(size for path, size in sizes.items() if path.name == "system.jsonl" or path.parent.name == "tensorboard")
    return sum(sizes.values()) - allow_samples, allow_samples


def _most_of_samples(run: Path) -> float:
    """Return what samples come to in an hour at most, with TensorBoard's share."""
    return (BURST_BYTES + 3600.0 * BYTES_PER_SECOND) * _sizes(run)[1] / max(1, (run / "system.jsonl").stat().st_size)
