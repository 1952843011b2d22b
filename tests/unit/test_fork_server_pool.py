"""Fork servers shared by many runs, sequentially or concurrently."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import script_process, wait_until
from test_fork_server import Node, field, is_alive

from crosstrain.conformance.fork_server_pool import ForkServerPool
from crosstrain.core.job import Job
from crosstrain.launch.node.fork_server_client import (
    POOL_VARIABLE,
    ForkServerProcess,
    inherited_state,
    is_transferred,
    open_fork_server,
    pays_to_fork,
)
from crosstrain.launch.node.scratch import task_environment

JOB = Job(backend="torch")


@pytest.fixture(scope="module")
def module_pool():
    with ForkServerPool() as pool:
        yield pool


@pytest.fixture
def pool(module_pool, monkeypatch):
    monkeypatch.setattr("crosstrain.launch.node.fork_server_client.GPU_DEVICES", ())
    monkeypatch.setenv(POOL_VARIABLE, module_pool.name)
    return module_pool


def start_task(folder):
    """Return a borrowed server, the pid of a task that it forked, and the requesting supervisor."""
    server = open_fork_server(JOB)
    node = Node(folder, server.connect({}, "-"))
    node.start("worker-0")
    return server, node.pid("worker-0"), node


def test_consecutive_runs_share_a_server(pool, tmp_path):
    parents = set()
    for _ in range(3):
        server, pid, node = start_task(tmp_path)
        parents.add(int(field(pid, "PPid")))
        server.close()
        wait_until(lambda: not is_alive(pid), 5, "the end of the task")  # noqa: B023
        assert node.await_deaths(5)
    (parent,) = parents
    assert parent != os.getpid()
    assert int(field(parent, "PPid")) == pool._process.pid


def test_pooled_task_has_directory_and_limits_of_launcher(pool, tmp_path, monkeypatch):
    Path(tmp_path, "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    monkeypatch.setenv("TRAINER_SEED", "7")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed - 10, most))
    try:
        server, pid, node = start_task(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    wait_until(lambda: b"engine.task" in Path(f"/proc/{pid}/cmdline").read_bytes(), 10, "the task")
    wait_until(lambda: os.readlink(f"/proc/{pid}/cwd") == str(tmp_path / "own"), 5, "its directory")
    wait_until(lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE) == (most, most), 5, "as many files as the system allows")
    node.supervisor.stop(0.0)
    server.close()


@pytest.mark.parametrize("difference", ["a variable", "the niceness", "a limit", "no pool"])
def test_different_process_state_gets_no_pooled_server(pool, difference, monkeypatch):
    if difference == "a variable":
        monkeypatch.setenv("OMP_NUM_THREADS", "17")
    elif difference == "no pool":
        monkeypatch.setenv(POOL_VARIABLE, f"{pool.name}x")
    before = resource.getrlimit(resource.RLIMIT_CORE)
    if difference == "a limit":
        resource.setrlimit(resource.RLIMIT_CORE, (0 if before[0] else 1024, before[1]))
    try:
        if difference == "the niceness":
            script = (
                "import os; os.nice(1)\n"
                "from crosstrain.core.job import Job\n"
                "from crosstrain.launch.node.fork_server_client import open_fork_server\n"
                "assert open_fork_server(Job(backend='torch')) is None"
            )
            subprocess.run([sys.executable, "-P", "-c", script], check=True)
        else:
            assert open_fork_server(JOB) is None
            server = open_fork_server(JOB.model_copy(update={"max_restarts": 1}))
            assert isinstance(server, ForkServerProcess)
            server.close()
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    assert not pays_to_fork(JOB)


@settings(max_examples=50)
@example("MASTER_ADDR", "a")  # which no task gets
@given(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789", min_size=1, max_size=20), st.text("abc", min_size=1))
def test_each_variable_is_compared_or_transferred(name, value):
    before, state = os.environ.pop(name, None), inherited_state()
    os.environ[name] = value
    try:
        reaches_tasks = task_environment(os.environ, None, None).get(name) == value
        assert (inherited_state() == state) is (is_transferred(name) or not reaches_tasks or before == value)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def test_ended_server_is_replaced(pool, tmp_path):
    first, pid, _ = start_task(tmp_path)
    parent = int(field(pid, "PPid"))
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), 5, "the end of the task")
    first.close()
    second, pid, node = start_task(tmp_path)
    assert int(field(pid, "PPid")) not in (parent, os.getpid())
    node.supervisor.stop(0.0)
    second.close()


@pytest.mark.thorough
def test_silent_client_does_not_block_others(pool, tmp_path):
    first, _, node = start_task(tmp_path)  # imports the framework, which may take longer than the timed part
    node.supervisor.stop(0.0)
    first.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(f"\0{pool.name}")
        began = time.monotonic()
        server, _, node = start_task(tmp_path)
        assert time.monotonic() - began < 20
    node.supervisor.stop(0.0)
    server.close()


def test_nothing_outlives_the_starting_process(tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(
        "import os, sys, time\n"
        "from crosstrain.conformance.fork_server_pool import ForkServerPool\n"
        "from crosstrain.core.job import Job\n"
        "from crosstrain.launch.node import fork_server_client\n"
        "fork_server_client.GPU_DEVICES = ()\n"
        "pool = ForkServerPool()\n"
        "os.environ[fork_server_client.POOL_VARIABLE] = pool.name\n"
        "server = fork_server_client.open_fork_server(Job(backend='torch'))\n"
        "print(pool._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with script_process(script, stdout=subprocess.PIPE) as owner:
        pool_pid = int(owner.stdout.readline())
        (server,) = map(int, Path(f"/proc/{pool_pid}/task/{pool_pid}/children").read_text().split())
        assert is_alive(server)
        owner.kill()
        wait_until(lambda: not is_alive(pool_pid) and not is_alive(server), 10, "the end of the pool")
