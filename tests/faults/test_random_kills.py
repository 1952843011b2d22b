"""Random kills: any process, any signal; the run ends soon, names it, and leaves nothing.

The cases are drawn from the seed that each prints: `--seed` repeats them.
"""

import json
import os
import random
import secrets
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import MarkedRun, free_ports, living_in, wait_until
from strangers import listens

from crosstrain.launch.virtual.cpu_quota import Hierarchy
from crosstrain.launch.virtual.namespaces import MissingCapabilityError

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

SEED = int(os.environ["CROSSTRAIN_TEST_SEED"])
SIGNALS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT]
QUICK = [("toy", "sync", True), ("torch", "async", False)]
CLUSTERS = [
    *QUICK,
    ("toy", "sync", False),
    ("torch", "sync", False),
    ("tf", "sync", False),
    ("tf", "async", False),
    ("torch", "async", True),
    ("tf", "async", True),
]
"""Backend, mode, and whether its nodes find each other by rendezvous."""

FULL = 24
END_SECONDS = 12
"""A lost peer is noticed immediately; the ends of framework and driver take time."""


@dataclass
class Case:
    """The process to kill: `role` is its kind, `place` selects among them."""

    backend: str
    mode: str
    joined: bool
    nodes: int
    role: str
    place: int
    signal: signal.Signals
    delay_seconds: float


def drawn(number):
    """The case of a number: first the quick clusters, then all."""
    random_numbers = random.Random(f"{SEED} {number}")
    backend, mode, joined = QUICK[number] if number < len(QUICK) else CLUSTERS[number % len(CLUSTERS)]
    roles = ["task", "task", "agent", "driver", *([] if joined else ["holder"])]
    return Case(
        backend,
        mode,
        joined,
        nodes=3 if joined else random_numbers.choice([2, 3]),
        role=random_numbers.choice(roles),
        place=random_numbers.randrange(1000),
        signal=random_numbers.choice(SIGNALS),
        delay_seconds=random_numbers.uniform(0.0, 1.0),
    )


@dataclass
class Traces:
    """A live run's resources outside its processes and directory.

    Namespaces, groups of CPU, and shared memory.
    """

    namespaces: dict[str, set[int]]
    cpu_groups: set[Path]
    shared_memory: set[Path]

    @classmethod
    def from_runs(cls, runs):
        pids = {pid for run in runs for pid in run.alive()}
        groups = {group for group in cpu_groups() if int(group.name.split("-")[2]) in pids}
        return cls({run.mark: run.namespaces() for run in runs}, groups, {path for pid in pids for path in shared_memory_of(pid)})

    def left(self):
        """Return the remaining resources."""
        living = [pid for mark, ids in self.namespaces.items() for pid in living_in(ids, mark)]
        return [*living, *(path for path in self.cpu_groups | self.shared_memory if path.exists())]


def cpu_groups():
    try:
        base = Hierarchy.find().base
    except MissingCapabilityError:
        return set()
    return set(base.glob("crosstrain-*-node*"))


def shared_memory_of(pid):
    """The files in /dev/shm that a process has mapped."""
    try:
        mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path(line[line.index("/dev/shm/") :]) for line in mapped if "/dev/shm/" in line}


class Cluster:
    """A case's run, under way: one command, or one for each of its nodes."""

    def __init__(self, case, folder, stack):
        self.case, self.directory, self.port = case, folder / "runs/run", free_ports(1)
        job = ["run", "--backend", case.backend, "--mode", case.mode, "--nodes", str(case.nodes), "--epochs", "1000000"]
        job += ["--eval-every", "end", "--sample-interval", "0.5", "--out", str(folder / "runs"), "--name", "run"]
        ranks = [["--rendezvous", f"127.0.0.1:{self.port}", "--node-rank", str(node)] for node in range(case.nodes)]
        environment = {"TMPDIR": str(folder / "tmp"), "TRAINER_SECRET": secrets.token_hex(16)}
        self.runs = [stack.enter_context(MarkedRun([*job, *more], folder, environment)) for more in (ranks if case.joined else [[]])]

    @property
    def driver(self):
        return self.runs[0]

    def alive(self):
        return [pid for run in self.runs for pid in run.alive()]

    def await_training(self):
        """Wait until steps and every task are recorded."""
        steps, system = self.directory / "steps.jsonl", self.directory / "system.jsonl"
        wait_until(
            lambda: self.driver.process.poll() is not None or (steps.exists() and steps.stat().st_size and len(self.tasks(system)) > 1),
            90,
            "the first step",
        )
        assert self.driver.process.poll() is None, self.driver.stderr()

    def tasks(self, system=None):
        """Name, process and node of each task."""
        system = system or self.directory / "system.jsonl"
        if not system.exists():
            return []
        records = [json.loads(line) for line in system.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return sorted({(entry["task"], entry["pid"], record["node"]) for record in records for entry in record["tasks"]})

    def victim(self):
        """The process to kill, the task to blame and the expected message.

        None if nobody remains to report it.
        """
        case = self.case
        if case.role == "driver":
            return self.driver.process.pid, None, None
        if case.role == "holder":
            (pid,) = self.driver.alive("crosstrain.launch.virtual.namespace_holder")
            return pid, None, f"the holder of the virtual network (process {pid}) was killed by signal {case.signal.value}"
        if case.role == "agent":
            node = case.place % case.nodes
            if case.joined and node:
                return self.runs[node].process.pid, f"agent-{node}", f"the agent of node {node} (host "
            (pid,) = self.driver.alive(f"crosstrain.launch.node.agent --node {node}")
            return pid, f"agent-{node}", f"the agent of node {node} "
        tasks = self.tasks()
        name, pid, node = tasks[case.place % len(tasks)]
        return pid, name, f"task {name} on node {node} "


@pytest.mark.parametrize("number", [pytest.param(number, marks=[] if number < len(QUICK) else pytest.mark.slow) for number in range(FULL)])
def test_killed_process_ends_run_is_named_and_cleaned_up(tmp_path, number):
    case = drawn(number)
    print(f"--seed {SEED} {case}")
    (tmp_path / "tmp").mkdir()
    with ExitStack() as stack:
        cluster = Cluster(case, tmp_path, stack)
        cluster.await_training()
        time.sleep(case.delay_seconds)
        pid, blamed, message = cluster.victim()
        traces = Traces.from_runs(cluster.runs)
        assert case.joined or any(traces.namespaces.values())
        own_temporary_files = temporary_files_of(pid, case, tmp_path / "tmp")
        os.kill(pid, case.signal)
        killed = time.monotonic()
        for run in cluster.runs:
            run.wait(40)
        took = time.monotonic() - killed
        wait_until(lambda: not cluster.alive(), 10, f"the end of {commands_of(cluster.alive())}")
        print(f"ended after {took:.1f} s", cluster.driver.stderr(), sep="\n")
        assert took < END_SECONDS
        assert_reported(cluster, pid, blamed, message)
        assert not listens(cluster.port)
        wait_until(lambda: not traces.left(), 5, f"the end of {traces.left()}")
        assert set(os.listdir(tmp_path / "tmp")) <= own_temporary_files


def commands_of(pids):
    """The command lines of those processes that are there yet."""
    commands = {}
    for pid in pids:
        with suppress(OSError):  # it has ended by now
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return commands


def temporary_files_of(pid, case, folder):
    """The temporary folder of a process that somebody else has started.

    The next agent on its machine removes it.
    """
    return {name for name in os.listdir(folder) if case.role == "agent" and case.joined and f"-{pid}-" in name}


def assert_reported(cluster, pid, blamed, message):
    case, codes = cluster.case, [run.process.returncode for run in cluster.runs]
    dead = next((place for place, run in enumerate(cluster.runs) if run.process.pid == pid), None)
    assert codes == [-case.signal if place == dead else 1 for place in range(len(codes))]
    assert all("Traceback" not in run.stderr() for run in cluster.runs)
    status = json.loads((cluster.directory / "status.json").read_text())
    if message is None:
        return
    assert (status["state"], status["task"], status["exit_code"]) == ("failed", blamed, 1)
    assert message in cluster.driver.stderr()
    assert message in status["cause"]
    if case.role == "task":
        assert f"was killed by {case.signal.name}" in status["cause"]
    summary = json.loads((cluster.directory / "summary.json").read_text())
    assert summary["state"] == "failed"
