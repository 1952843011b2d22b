"""Recovery time after a killed worker: ``--max-restarts``, torchrun and Ray Train.

``python -m benchmarks.recovery``: three virtual nodes, the small CNN on torch, a checkpoint every 200 updates; worker 1 is killed
(SIGKILL), and the seconds until the next update are counted. Interleaved repeats; medians. Memory is that of all processes before
the kill; Ray's includes the processes of its nodes. Ray Train is skipped without Ray (the extra ``ray``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import psutil

from crosstrain.launch.virtual.network import VirtualNetwork

from ..processes import Group, MeasurementError, environment

NODES = 3
CHECKPOINT_EVERY = 200
KILL_AFTER_STEPS = 500
PATIENCE_SECONDS = 120.0
START_SECONDS = 300.0
LOOK_SECONDS = 0.005

RAY_PORT = 6379
RAY_STORE_BYTES = 80_000_000
"""The least that Ray takes is a little less."""


@dataclass(frozen=True)
class Recovery:
    """Seconds from the kill to the next update; resident bytes of all processes before it."""

    seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Trained:
    """An active training: updates of its newest record, number of records, process of worker 1."""

    step: Callable[[], int]
    records: Callable[[], int]
    victim: Callable[[], int]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _last_line(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, _size(path) - 100_000))
        lines = file.read().decode().split("\n")
    return lines[-2] if len(lines) > 1 else ""


@contextmanager
def _ours(folder: Path, *options: str) -> Iterator[Trained]:
    run = folder / "run"
    job = [
        "run",
        "--backend",
        "torch",
        "--nodes",
        str(NODES),
        "--model",
        "cnn",
        "--data",
        "glyphs28",
        "--batch-size",
        "32",
        "--threads",
        "1",
    ]
    job += ["--epochs", "1000", "--eval-every", "end", "--checkpoint-every", f"{CHECKPOINT_EVERY}steps", "--max-restarts", "5", *options]
    job += ["--out", str(folder), "--name", "run", "--no-tensorboard", "--quiet"]

    def step() -> int:
        last = _last_line(run / "steps.jsonl")
        return 0 if not last else int(json.loads(last)["step"]) + int(json.loads(last)["count"])

    def victim() -> int:
        for line in reversed((run / "system.jsonl").read_text().split("\n")[:-1]):
            for task in json.loads(line)["tasks"]:
                if task["task"] == "worker-1":
                    return int(task["pid"])
        raise MeasurementError("worker 1 was never sampled")

    with Group(folder) as group:
        group.start("trainer", [sys.executable, "-m", "crosstrain.cli.main", *job], environment({}))
        yield Trained(step, lambda: _restarts(run), victim)


def _restarts(run: Path) -> int:
    """Grows with the first record after a restart: the file of records is cut at each."""
    events = (run / "events.jsonl").read_text() if (run / "events.jsonl").exists() else ""
    return events.count('"run_restarted"')


@contextmanager
def _torchrun(folder: Path) -> Iterator[Trained]:
    script = Path(__file__).parent / "elastic_script.py"
    with VirtualNetwork(NODES, None, lambda node: None) as network, Group(folder) as group:
        for node in range(NODES):
            options = ["--nnodes", str(NODES), "--nproc-per-node", "1", "--max-restarts", "5", "--monitor-interval", "0.1"]
            options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{network.addresses[0]}:29500", "--rdzv-id", "recovery"]
            options += ["--local-addr", network.addresses[node], "--rdzv-conf", f"is_host={str(node == 0).lower()}"]
            command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), "--folder", str(folder)]
            command += ["--checkpoint-every", str(CHECKPOINT_EVERY)]
            variables = environment({"GLOO_SOCKET_IFNAME": network.interface, "OMP_NUM_THREADS": "1"})
            group.start(f"node-{node}", command, variables, lambda argv, node=node, **more: network.popen(node, argv, **more))
        yield _by_files(folder)


def _by_files(folder: Path) -> Trained:
    """Return what is known of a training whose workers write files."""
    return Trained(
        lambda: int(_last_line(folder / "progress-0") or 0),
        lambda: _size(folder / "progress-0"),
        lambda: int((folder / "pid-1").read_text()),
    )


@contextmanager
def _ray_train(folder: Path) -> Iterator[Trained]:
    """A Ray cluster of three virtual nodes, and a `TorchTrainer` on it.

    It checks for failures as often as torchrun's agents here.
    """
    variables = environment({"OMP_NUM_THREADS": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1", "RAY_USAGE_STATS_ENABLED": "0"})
    variables["RAY_raylet_start_wait_time_s"] = "90"  # of a busy machine
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), variables.get("PYTHONPATH"))))
    with VirtualNetwork(NODES, None, lambda node: None) as network, Group(folder) as group, _descendants_killed():
        variables["GLOO_SOCKET_IFNAME"] = network.interface
        head = f"{network.addresses[0]}:{RAY_PORT}"

        def start(name: str, node: int, *argv: str) -> None:
            command = [sys.executable, "-m", *argv]
            group.start(name, command, variables, lambda argv, node=node, **more: network.popen(node, argv, **more))

        for node in range(NODES):
            route = ["ip", "route", "replace", "default", "dev", network.interface]  # Ray looks how packets leave for the world
            if network.popen(node, route).wait() != 0:
                raise MeasurementError("a virtual node takes no default route, without which Ray waits for a long time")
            place = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
            if node > 0:
                place = [f"--address={head}"]
            place += [f"--node-ip-address={network.addresses[node]}", "--num-cpus=2", f"--object-store-memory={RAY_STORE_BYTES}"]
            place += [f"--temp-dir={folder}/{node}", "--disable-usage-stats"]
            start(f"ray-{node}", node, "ray.scripts.scripts", "start", "--block", *place)
            output = folder / f"ray-{node}.out"  # sequential: each fails if its processes take 15 s to start
            _wait(lambda output=output: "Ray runtime started" in output.read_text(), f"node {node} of the Ray cluster")
        options = ["--folder", str(folder), "--address", head, "--nodes", str(NODES), "--checkpoint-every", str(CHECKPOINT_EVERY)]
        start("driver", 0, "benchmarks.recovery.ray_train_script", *options)
        yield _by_files(folder)


@contextmanager
def _descendants_killed() -> Iterator[None]:
    """Kill what Ray's commands have started, at the end of the block: it would outlive them."""
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        for process in set(psutil.Process().children(recursive=True)) - before:
            with suppress(psutil.NoSuchProcess):
                process.kill()


CONTESTANTS = {
    "trainer": lambda folder: _ours(folder),
    "trainer --spare-processes": lambda folder: _ours(folder, "--spare-processes"),
    "torchrun (elastic)": _torchrun,
    **({"Ray Train (max_failures=5)": _ray_train} if find_spec("ray") is not None else {}),
}


def _memory() -> int:
    """Return the resident bytes of this process's live descendants."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _wait(holds: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> float:
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > seconds:
            raise MeasurementError(f"waited {seconds:g} s for {what}")
        time.sleep(LOOK_SECONDS)
    return time.monotonic() - began


def measured(name: str) -> Recovery:
    """Return one repeat of a contestant."""
    with tempfile.TemporaryDirectory() as place, CONTESTANTS[name](Path(place)) as trained:
        _wait(lambda: trained.step() >= KILL_AFTER_STEPS, f"{KILL_AFTER_STEPS} updates of {name}", START_SECONDS)
        time.sleep(3.0)  # the start is complete: spare processes have loaded
        memory, victim = _memory(), trained.victim()
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        # What had been on its way at the kill is no new update: the others stop within less than this.
        if name.startswith("trainer"):
            before = trained.records()
            _wait(lambda: trained.records() > before, "the restart")
            steps = trained.step()
            _wait(lambda: trained.step() > steps, "the next update")
        else:
            _wait(lambda: int((Path(place) / "pid-1").read_text()) != victim, "another worker 1")
            size = trained.records()
            try:
                _wait(lambda: trained.records() > size, "the next update")
            except MeasurementError:
                return Recovery(math.inf, memory)  # it has not gone on; that is a result, too
        return Recovery(time.monotonic() - began, memory)


def main() -> None:
    """Print the table, and the figures as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.recovery", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=[*CONTESTANTS], action="append", help="these alone; may be repeated")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that started processes are ended
    recoveries: dict[str, list[Recovery]] = {name: [] for name in options.only or CONTESTANTS}
    for repeat in range(options.repeats):
        for name, results in recoveries.items():
            results.append(measured(name))
            print(
                f"{repeat + 1}/{options.repeats} {name}: {results[-1].seconds:.2f} s, {results[-1].memory_bytes / 2**20:,.0f} MiB",
                file=sys.stderr,
            )
    print("| what resumes | seconds to the next update, median (each) | memory before, MiB |\n|---|---|---|")
    for name, results in recoveries.items():
        seconds = ", ".join(f"{recovery.seconds:.2f}" for recovery in results)
        typical = median(recovery.seconds for recovery in results)
        memory = median(recovery.memory_bytes for recovery in results) / 2**20
        print(f"| {name} | {typical:.2f} ({seconds}) | {memory:,.0f} |")
    if options.json is not None:
        options.json.write_text(json.dumps({name: [vars(recovery) for recovery in results] for name, results in recoveries.items()}))


if __name__ == "__main__":
    main()
