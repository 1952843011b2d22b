"""Tasks that are forked from a process which has imported the framework."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import wait_until

from crosstrain.core.job import Job
from crosstrain.launch.node.fork_server_client import ForkServerConnection, ForkServerProcess, pays_to_fork
from crosstrain.launch.node.scratch import task_environment
from crosstrain.launch.node.supervisor import Supervisor

TOY = Path(__file__).parent.parent / "toy"


def field(pid, name):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1]
    raise KeyError(name)


class Machine:
    """A fork server, and supervisors that start tasks with it."""

    def __init__(self, folder):
        self.folder = folder
        self.server = ForkServerProcess(Job(backend="toy"))
        self.pid = self.server._process.pid

    def node(self):
        return Node(self.folder, self.server.connect({}, "-"))


class Node:
    """A supervisor that records its reports."""

    def __init__(self, folder, connection):
        self.folder, self.connection = folder, connection
        self.deaths, self.pids = [], {}
        self.supervisor = Supervisor(lambda *_: None, self.record_death, self.pids.__setitem__, ForkServerConnection(connection))

    def record_death(self, death, usage):
        self.deaths.append((death, usage))

    def start(self, name, **variables):
        environment = task_environment({**os.environ, **variables}, self.folder, None)
        self.supervisor.start(name, self.folder / f"{name}.log", environment)

    def pid(self, name):
        return wait_until(lambda: self.pids.get(name), 30, f"the start of {name}")

    def await_deaths(self, seconds, count=1):
        return wait_until(lambda: len(self.deaths) >= count and [death for death, _ in self.deaths], seconds, f"{count} deaths")


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])]))
    machine = Machine(tmp_path)
    yield machine
    if is_alive(machine.pid):
        os.kill(machine.pid, signal.SIGCONT)
    machine.server.close()


def test_forked_task_is_child_of_server(machine, tmp_path):
    node = machine.node()
    node.start("worker-0")
    pid = node.pid("worker-0")
    assert int(field(pid, "PPid")) == machine.pid
    wait_until(lambda: b"crosstrain.engine.task" in Path(f"/proc/{pid}/cmdline").read_bytes(), 10, "the task's command line")
    assert b"fork_server" in Path(f"/proc/{machine.pid}/cmdline").read_bytes()
    assert os.getpgid(pid) == os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/fd/1") == str(tmp_path / "worker-0.log")
    assert node.supervisor.state_of("worker-0") in "RSD"
    node.supervisor.stop(0.0)
    (death,) = node.await_deaths(5)
    assert (death.task, death.pid, death.signal, death.code, death.order) == ("worker-0", pid, "SIGKILL", None, 1)
    assert death.cpu_seconds is not None
    assert death.max_rss_bytes > 2**20
    assert node.supervisor.alive() == []


def test_task_with_other_environment_is_not_forked(machine):
    node = machine.node()
    node.start("worker-0", CUDA_VISIBLE_DEVICES="1")
    assert int(field(node.pid("worker-0"), "PPid")) == os.getpid()
    node.supervisor.stop(0.0)


def test_server_death_before_fork_falls_back_to_process(machine):
    node = machine.node()
    os.kill(machine.pid, signal.SIGSTOP)
    node.start("worker-0")
    time.sleep(0.2)
    assert (node.pids, node.supervisor.state_of("worker-0")) == ({}, "D")
    os.kill(machine.pid, signal.SIGKILL)
    assert int(field(node.pid("worker-0"), "PPid")) == os.getpid()
    node.start("worker-1")
    assert int(field(node.pid("worker-1"), "PPid")) == os.getpid()
    node.supervisor.stop(0.0)
    assert node.supervisor.alive() == []


def test_forked_tasks_end_with_server_and_are_reported(machine):
    node = machine.node()
    for name in ("worker-0", "worker-1"):
        node.start(name)
    pids = {node.pid(name) for name in ("worker-0", "worker-1")}
    os.kill(machine.pid, signal.SIGKILL)
    deaths = sorted(node.await_deaths(5, 2), key=lambda death: death.order)
    assert {death.pid for death in deaths} == pids
    assert [(death.signal, death.cpu_seconds, death.order) for death in deaths] == [("SIGKILL", None, 1), ("SIGKILL", None, 2)]
    assert not any(map(is_alive, pids))


def test_tasks_end_with_connection_of_their_agent(machine):
    ended_node, remaining_node = machine.node(), machine.node()
    ended_node.start("worker-0")
    remaining_node.start("worker-1")
    pid, remaining = ended_node.pid("worker-0"), remaining_node.pid("worker-1")
    ended_node.connection.shutdown(2)
    wait_until(lambda: not is_alive(pid), 5, "the end of the task")
    assert is_alive(remaining)
    remaining_node.supervisor.stop(0.0)


def test_wait_for_stopped_server_can_be_ended(machine):
    node = machine.node()
    os.kill(machine.pid, signal.SIGSTOP)
    node.start("worker-0")
    began = time.monotonic()
    node.supervisor.stop(0.0)
    assert time.monotonic() - began < 5
    assert (node.supervisor.alive(), node.deaths) == ([], [])
    second = machine.node()
    second.start("worker-1")
    os.kill(machine.pid, signal.SIGCONT)  # it now forks, and kills as requested
    pid = second.pid("worker-1")
    assert int(field(pid, "PPid")) == machine.pid  # so it has served earlier requests

    def children_alive():
        children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()
        return {int(child) for child in children if is_alive(child)}

    wait_until(lambda: children_alive() == {pid}, 10, "the end of the abandoned task")
    second.supervisor.stop(0.0)


def test_refused_fork_falls_back_to_process(tmp_path, monkeypatch):
    """The kernel refuses forks of too many processes; here the test answers for the server."""
    monkeypatch.setenv("PYTHONPATH", str(TOY))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    node = Node(tmp_path, theirs)
    node.start("worker-0")
    request, descriptors, _, _ = socket.recv_fds(ours, 2**16, 3)
    for descriptor in descriptors:
        os.close(descriptor)
    ours.send(json.dumps({"refused": json.loads(request)["fork"]}).encode())
    assert int(field(node.pid("worker-0"), "PPid")) == os.getpid()
    ours.close()
    node.supervisor.stop(0.0)


def test_random_deaths_are_reported_once_in_order(machine, seed):
    before = threading.active_count()  # other tests of this process may have left some
    chance, node = random.Random(seed), machine.node()
    names = [f"worker-{index}" for index in range(8)]
    for name in names:
        node.start(name)
    order = chance.sample(names, len(names))
    pids = {name: node.pid(name) for name in names}
    for name in order:
        os.kill(pids[name], chance.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS]))
        # Reaped, not only ended: of several ended tasks the kernel returns the first forked.
        wait_until(lambda: not Path(f"/proc/{pids[name]}").exists(), 5, "the reaping of a task")  # noqa: B023
    deaths = sorted(node.await_deaths(10, len(names)), key=lambda death: death.order)
    assert [(death.task, death.pid, death.order) for death in deaths] == [(name, pids[name], at + 1) for at, name in enumerate(order)]
    assert threading.active_count() < before + 50


@pytest.mark.parametrize(
    ("settings", "pays"),
    [({"nodes": 3}, True), ({"nodes": 1}, False), ({"nodes": 1, "max_restarts": 1}, True), ({"nodes": 2, "mode": "async"}, True)],
)
@pytest.mark.parametrize("backend", ["tf", "torch"])
def test_forking_is_chosen_if_tasks_share_imports(backend, settings, pays, monkeypatch):
    monkeypatch.setattr("crosstrain.launch.node.fork_server_client.GPU_DEVICES", ())
    assert pays_to_fork(Job(backend=backend, **settings)) is pays


def test_tasks_with_gpus_are_not_forked(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("crosstrain.launch.node.fork_server_client.GPU_DEVICES", (f"{tmp_path}/nvidia[0-9]*",))
    assert not pays_to_fork(Job(backend="torch", nodes=3))


AGENT = """import sys, crosstrain.launch.node.agent, crosstrain.monitor.collector
from crosstrain.backends.loading import recorded_packages
from crosstrain.monitor.host import describe_host
describe_host(recorded_packages('torch'))"""
DRIVER_ONLY = {"crosstrain.records.store.document_schemas", "crosstrain.records.store.summary_schema", "crosstrain.records.summary"}


@pytest.mark.parametrize(
    ("script", "unneeded"),
    [
        (AGENT, {"numpy", "pydantic", "crosstrain.core.job", "crosstrain.core.schedules"}),
        ("import sys, crosstrain.launch.node.fork_server", DRIVER_ONLY),
        ("import sys, crosstrain.engine.task", DRIVER_ONLY),
    ],
    ids=["agent", "fork server", "task"],
)
def test_agents_and_tasks_import_no_driver_modules(script, unneeded):
    """Each node starts an agent; on one machine all their imports take the same cores."""
    done = subprocess.run([sys.executable, "-P", "-c", f"{script}\nprint({unneeded} & set(sys.modules))"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")
