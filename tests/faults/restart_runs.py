"""Runs under a restart policy whose tasks and nodes tests kill on a condition."""

import json
import os
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import psutil

from crosstrain.core.errors import UsageError
from crosstrain.core.settings.sources import resolve
from crosstrain.engine.progress import QuietProgress
from crosstrain.launch.driver import driver
from crosstrain.launch.launchers.local import LocalLauncher
from crosstrain.records.store.run_directory import RunReader

JOB = {"backend": "toy", "nodes": 2, "network": "host", "steps": 3000, "eval_every": "1000steps", "tensorboard": False}


def train(out, name, policy=None, notifier=None, **more):
    job = resolve({**JOB, "out": out, "name": name, **more}, {}).job
    launcher = LocalLauncher(job, lambda text: None)
    options = {} if policy is None else {"policy": policy}
    invocation = driver.Invocation(["test"], {})
    return driver.run(job, invocation, progress=QuietProgress(), launcher=launcher, notifier=notifier, **options)


def when(path, ready, act):
    """Act in a thread once `ready(path)` of the run at `path`; return the thread.

    The run may have no files yet. After 200 s, which is less than a test's limit, it does nothing: the target could be another test's run.
    """

    def is_ready():
        try:
            return path.exists() and ready(path)
        except (FileNotFoundError, UsageError):  # the second: it has no documents yet
            return False

    def work():
        deadline = time.monotonic() + 200
        while not is_ready():
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def kill_when(path, ready, victim="worker-1"):
    """Kill a task's newest process in a thread once `ready(path)` and it lives.

    Return the thread.
    """
    return when(path, lambda path: ready(path) and lives(path, victim), lambda: os.kill(pids(path, victim)[-1], signal.SIGKILL))


def lives(path, task):
    """Whether the newest sampled process of a task in the run at `path` is alive."""
    sampled = pids(path, task)
    return bool(sampled) and psutil.pid_exists(sampled[-1])


def pids(path, task):
    """The processes of a task that were sampled in the run at `path`, in their order."""
    lines = (path / "system.jsonl").read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return list(dict.fromkeys(entry["pid"] for record in records for entry in record["tasks"] if entry["task"] == task))


def agent(node):
    """The process of a node's agent, of the run that this process drives."""
    commands = {child: command for child, command in commands_of_children() if "crosstrain.launch.node.agent" in command}
    return next(agent for agent, command in commands.items() if command[command.index("--node") + 1] == str(node))


def commands_of_children():
    """The live children of this process, each with its command line."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            yield child, child.cmdline()


def trains(path):
    """Whether updates of the run have been recorded."""
    return (path / "steps.jsonl").exists() and (path / "steps.jsonl").stat().st_size > 0


def losses(path):
    """The loss of each step, by its number: each is there once, in order."""
    steps = [(record.step + number, loss) for record in RunReader(path).steps() for number, loss in enumerate(record.losses)]
    assert [step for step, _ in steps] == list(range(len(steps)))
    return np.array([loss for _, loss in steps])


def names(path):
    return [event.event for event in RunReader(path).events()]
