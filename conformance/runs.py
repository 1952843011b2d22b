"""Runs of the command ``trainer`` and of launchers, with their results."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import find_checkpoint, list_checkpoints
from ..core.console import note
from ..core.job import Job
from ..core.process import process_state, python
from ..engine.protocol.messages import MessageParser
from ..engine.protocol.node_messages import Hello
from ..launch.launchers.base import AGENT_MODULE, Launcher, NodeChannel
from ..launch.launchers.host_list import Host
from ..launch.launchers.registry import LaunchRequest, allocated, choose_launcher
from ..launch.node.fork_server_client import POOL_VARIABLE
from ..records.store.run_directory import RunReader
from ..records.store.schema import EvalRecord, StepRecord

TIMEOUT_SECONDS = 900.0
# Names a pool of fork servers (`fork_server_pool.py`) for these commands only.
LENT_SERVERS_VARIABLE = "CROSSTRAIN_TEST_FORK_SERVERS"


@dataclass(frozen=True)
class FinishedRun:
    """Content of a run directory: losses, weights by name, records, summary.

    Losses are float64 [updates] in step order.
    """

    path: Path
    summary: Mapping[str, Any]
    losses: NDArray[np.float64]
    weights: Mapping[str, NDArray[np.float32]]
    steps: tuple[StepRecord, ...]
    evals: tuple[EvalRecord, ...]


SET_BY_SCIKIT_LEARN = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")  # by its import; the pool's environment would differ


def trainer(
    *arguments: str, environment: Mapping[str, str] | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run ``trainer`` with this interpreter to its end."""
    command = python("crosstrain.cli.main", *arguments)
    run_environment = environment_of_runs(environment)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_seconds, env=run_environment, stdin=subprocess.DEVNULL, check=False
    )


def environment_of_runs(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment (default: this process's) with the pool of fork servers, if any."""
    variables = dict(os.environ if environment is None else environment)
    if LENT_SERVERS_VARIABLE in variables:
        variables.setdefault(POOL_VARIABLE, variables[LENT_SERVERS_VARIABLE])
        for name in SET_BY_SCIKIT_LEARN:
            variables.pop(name, None)
    return variables


def run_job(out: Path, environment: Mapping[str, str] | None = None, **options: object) -> FinishedRun:
    """Run a job with ``trainer run --json`` and read its directory.

    Raises AssertionError with the output.
    """
    arguments = ["run", "--json", "--quiet", "--out", str(out), *options_of(options)]
    done = trainer(*arguments, environment=environment)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return read_run(Path(json.loads(done.stdout)["path"]))


def options_of(fields: Mapping[str, object]) -> list[str]:
    """Return job fields as command-line options."""
    typed: list[str] = []
    for key, value in fields.items():
        flag = key.replace("_", "-")
        typed += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return typed


def read_run(path: Path) -> FinishedRun:
    """Read a finished run."""
    reader = RunReader(path)
    steps = tuple(reader.steps())
    ordered = sorted(steps, key=lambda record: record.step)
    losses = np.array([loss for record in ordered for loss in record.losses], dtype=np.float64)
    weights = find_checkpoint(path)[0].parameters if list_checkpoints(path) else {}
    return FinishedRun(path, reader.summary() or {}, losses, weights, steps, tuple(reader.evals()))


def relative_difference(ours: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Return max |a − b| / |b| over the steps."""
    return float(np.max(np.abs(ours - reference) / np.abs(reference)))


def norm_wise_difference(ours: Mapping[str, NDArray[Any]], reference: Mapping[str, NDArray[Any]]) -> float:
    """Return ‖a − b‖ / ‖b‖ over all parameters; names and shapes must be equal."""
    if {name: value.shape for name, value in ours.items()} != {name: value.shape for name, value in reference.items()}:
        raise AssertionError(f"different parameters: {sorted(ours)} and {sorted(reference)}")
    difference = sum(float(np.sum((ours[name].astype(np.float64) - reference[name]) ** 2)) for name in reference)
    norm = sum(float(np.sum(reference[name].astype(np.float64) ** 2)) for name in reference)
    return math.sqrt(difference / norm)


# ``python -m crosstrain.conformance.runs`` starts the nodes of a `Launched` (JSON), prints a line of agents, and waits to be killed.
LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Launched:
    """Launch request: launcher, hosts, further options, and job settings."""

    launcher: str
    hosts: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Launcher:
        """Return the launcher."""
        allocated_hosts = allocated(self.launcher, os.environ)[0]
        shape = {"nodes": len(self.hosts)} if self.hosts else {}
        job = Job.model_validate({**shape, **self.settings, "launcher": self.launcher})
        hosts = [Host(name) for name in self.hosts]
        return choose_launcher(
            LaunchRequest(job, note, hosts=hosts, allocated=allocated_hosts, options=self.options, environment=os.environ)
        )


def greetings(channels: Sequence[NodeChannel]) -> list[Hello]:
    """Return agents' greetings in node order.

    Raises AssertionError with an ended agent's status.
    """
    greeted = []
    parser = MessageParser(Hello)
    for channel in channels:
        while (message := channel.stream.receive()) is not None and message.kind != "hello":
            continue
        if message is None:
            code = None if channel.process is None else channel.process.wait(10)
            raise AssertionError(f"the agent of node {channel.node} has not greeted: {'' if code is None else channel.explain(code)}")
        greeted.append(parser.parse(message))
    return greeted


def visible_agents(greeted: Sequence[Hello]) -> list[int]:
    """Return the process ids of agents on this machine."""
    return [pid for pid in (message.pid for message in greeted) if AGENT_MODULE in _command(pid)]


def await_end(pids: Sequence[int], seconds: float) -> list[int]:
    """Wait for the end of processes; return those alive after so many seconds."""
    deadline = time.monotonic() + seconds
    while (living := [pid for pid in pids if process_state(pid) not in (None, "Z", "X")]) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return living


def stop(pids: Sequence[int]) -> None:
    """Suspend processes (SIGSTOP)."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def main(text: str, wait: Callable[[], None] = signal.pause) -> None:
    """Start the nodes of `text`, print their agents' ids, and wait."""
    launcher = Launched(**json.loads(text)).make()
    launcher.prestart()
    sys.stdout.write(json.dumps(visible_agents(greetings(launcher.start()))) + "\n")
    sys.stdout.flush()
    wait()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1])
