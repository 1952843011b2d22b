"""Processes that start before it is known which task of the cluster they will be."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from base64 import b64encode
from functools import partial
from pathlib import Path

import pytest
from processes import wait_until
from untyped import Message, fields_of

from crosstrain.core.job import Job
from crosstrain.engine.protocol.answer_checks import read_node_message
from crosstrain.engine.protocol.node_messages import Prepare
from crosstrain.engine.protocol.transport import start_over_stdio
from crosstrain.launch.driver.first_failure import Failures
from crosstrain.launch.launchers.base import agent_command
from crosstrain.launch.node.supervisor import Supervisor

TOY = Path(__file__).parent.parent / "toy"


class Node:
    """A supervisor that stores its reports."""

    def __init__(self, folder):
        self.folder = folder
        self.deaths, self.messages, self.reported = [], [], threading.Event()
        self.supervisor = Supervisor(lambda task, message: self.messages.append((task, message)), self.dead)
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])])}
        self.environment["PYTHONPROFILEIMPORTTIME"] = "1"

    def dead(self, death, usage):
        self.deaths.append(death)
        self.reported.set()

    def prestart(self, backend="toy"):
        self.supervisor.prestart(self.folder, self.environment, Prepare(Job(backend=backend).model_dump_json()))

    def children(self):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path)
    yield node
    node.supervisor.stop(0.0)


def test_spare_is_no_task_until_it_is_claimed(node, tmp_path):
    node.prestart()
    assert node.supervisor.alive() == []
    early = node.supervisor.claim("worker-0", tmp_path / "logs/worker-0.log", node.environment)
    pid = node.supervisor.pid_of("worker-0")
    assert (node.supervisor.alive(), early.parent) == (["worker-0"], tmp_path)
    assert node.supervisor.claim("worker-1", tmp_path / "logs/worker-1.log", node.environment) is None
    assert node.supervisor.state_of("worker-0") in "RSD"
    assert os.getpgid(pid) == pid


def test_spare_is_claimed_only_with_its_environment(node, tmp_path):
    """What it has read from it is fixed, such as its visible GPU."""
    node.prestart()
    log = tmp_path / "logs/worker-0.log"
    assert node.supervisor.claim("worker-0", log, {**node.environment, "CUDA_VISIBLE_DEVICES": "1"}) is None
    assert node.supervisor.claim("worker-0", log, dict(node.environment)) is not None


@pytest.mark.parametrize("end", ["killed", "failed"])
def test_dead_spare_is_not_claimed_and_not_reported(node, tmp_path, end):
    before = set(node.children())
    node.prestart("toy" if end == "killed" else "no-such-backend")
    (pid,) = set(node.children()) - before
    if end == "killed":
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in node.children(), 30, "the end of the spare")
    assert node.supervisor.claim("worker-0", tmp_path / "worker-0.log", node.environment) is None
    assert (node.deaths, node.messages) == ([], [])


def test_claimed_spare_that_dies_early_leaves_its_log(node, tmp_path):
    node.prestart()
    early = tmp_path / "spare-1.early"
    wait_until(lambda: "crosstrain.engine.protocol.task_messages" in early.read_text(), 30, "the start of the spare")
    log = tmp_path / "logs/worker-0.log"
    assert node.supervisor.claim("worker-0", log, node.environment)
    pid = node.supervisor.pid_of("worker-0")
    assert log.read_text() == ""
    os.kill(pid, signal.SIGKILL)
    assert node.reported.wait(10)
    assert [(death.task, death.pid, death.signal, death.order) for death in node.deaths] == [("worker-0", pid, "SIGKILL", 1)]
    assert "crosstrain.engine.protocol.task_messages" in log.read_text()
    assert not early.exists()


def test_unused_spares_are_dismissed(node):
    before = set(node.children())
    node.prestart()
    node.prestart()
    assert len(set(node.children()) - before) == 2
    node.supervisor.kill_unclaimed()
    wait_until(lambda: set(node.children()) <= before, 10, "the end of the spares")
    assert node.deaths == []


CHATTERBOX = """
import os, socket, sys
from crosstrain.engine.protocol.messages import Stream
from crosstrain.engine.protocol.node_messages import Phase
connection = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
if os.fork() == 0:  # a process that outlives the task, out of reach of whoever kills the task's group
    os.setsid()
    connection.recv(1)  # until the other end gives up
    os._exit(0)
stream = Stream(connection.makefile("rb"), connection.makefile("wb"))
for number in range({count}):
    stream.send(Phase(str(number)))
os._exit(3)
"""


def test_death_is_the_last_message_of_a_task(tmp_path, monkeypatch):
    """However slowly messages are read, and although a child keeps the channel open."""
    count, heard = 40, []
    script = tmp_path / "chatterbox.py"
    script.write_text(CHATTERBOX.format(count=count))
    monkeypatch.setattr("crosstrain.launch.node.supervisor.python", lambda module, *arguments: [sys.executable, str(script), *arguments])

    def slowly(task, message):
        time.sleep(0.01)
        heard.append(message.kind)

    supervisor = Supervisor(slowly, lambda death, usage: heard.append(("death", death.code)))
    supervisor.start("worker-0", tmp_path / "worker-0.log", os.environ)
    supervisor.stop(10.0)
    assert heard == [*["phase"] * count, ("death", 3)]
    assert supervisor.alive() == []


def test_other_children_are_left_to_their_parent(node, tmp_path):
    """Such as processes that collect stacks; one of them is never waited for."""
    forgotten = subprocess.Popen(["true"])
    for number in range(3):
        name = f"worker-{number}"
        node.supervisor.start(name, tmp_path / f"{name}.log", node.environment)
        assert [subprocess.run(["false"]).returncode for _ in range(20)] == [1] * 20
        node.supervisor.end_task(name)
        assert [death.task for death in node.deaths] == [f"worker-{before}" for before in range(number + 1)]
        assert name not in node.supervisor.alive()
    assert forgotten.wait() == 0


def test_task_that_cannot_start_is_reported_and_removed(node, tmp_path):
    """Its log is a folder and cannot be opened; another task is started after it."""
    (tmp_path / "worker-0.log").mkdir()
    node.supervisor.start("worker-0", tmp_path / "worker-0.log", node.environment)
    assert node.reported.wait(10)
    wait_until(lambda: node.supervisor.alive() == [], 10, "the end of what was to be a task")
    ((task, message),) = node.messages
    error = fields_of(message)
    assert (task, message.kind, error["type"], error["errno"]) == ("worker-0", "error", "IsADirectoryError", errno.EISDIR)
    assert [(death.task, death.pid, death.code, death.signal, death.order) for death in node.deaths] == [("worker-0", None, None, None, 1)]
    node.supervisor.kill()
    node.reported.clear()
    node.supervisor.start("worker-1", tmp_path / "worker-1.log", node.environment)
    node.supervisor.kill_task("worker-1")
    assert node.reported.wait(10)
    assert [(death.task, death.order) for death in node.deaths[1:]] == [("worker-1", 2)]


AT_THE_LIMIT = """
import json, os, resource, sys, tempfile
from pathlib import Path
from crosstrain.core.liveness import kernel_oom_kills
from crosstrain.engine.protocol.node_messages import Prepare
from crosstrain.launch.node.supervisor import Supervisor

def told(task, message):
    fields = json.loads(message.line)
    print("error", task, fields["type"], fields["errno"], flush=True)

def died(death, usage):
    print("death", death.task, death.pid, death.order, flush=True)

supervisor = Supervisor(told, died)
kernel_oom_kills()  # which loads what another user may not be able to read
if os.getuid() == 0:
    os.setuid(65534)  # the superuser has no limit
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
folder = Path(tempfile.mkdtemp(dir="/tmp"))
before = len(os.listdir("/proc/self/fd"))
supervisor.prestart(folder, os.environ, Prepare("{}"))
supervisor.start("worker-0", folder / "worker-0.log", os.environ)
supervisor.kill()
supervisor.stop(0.0)
print(supervisor.alive(), len(os.listdir("/proc/self/fd")) - before, flush=True)
for path in folder.iterdir():
    path.unlink()
folder.rmdir()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of processes is Linux's")
def test_process_limit_is_reported_for_each_task():
    """Neither a process nor a thread can be started there."""
    done = subprocess.run([sys.executable, "-c", AT_THE_LIMIT], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"error worker-0 BlockingIOError {errno.EAGAIN}", "death worker-0 None 1", "[] 0"], done.stderr
    assert done.returncode == 0


@pytest.fixture
def agent(tmp_path):
    """Start an agent as a local run does; yield it, its channel and its temporary folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    popen = partial(subprocess.Popen, env={**os.environ, "TMPDIR": str(folder)}, stderr=subprocess.PIPE)
    process, stream = start_over_stdio(popen, agent_command(0, "--parent", str(os.getpid())))
    stream.send(Message("prepare", {"job": JOB, "backend": "toy", "device": "auto", "node_timeout_seconds": 10.0}))
    assert stream.receive().kind == "hello"
    yield process, stream, folder
    process.kill()
    process.wait()
    process.stderr.close()
    stream.close()


JOB = Job(backend="toy").model_dump_json()


def heard(stream, *kinds):
    """Return the next messages of these kinds."""
    while (message := stream.receive()).kind not in kinds:
        pass
    return message


def test_agent_reports_unstartable_task_and_continues(agent, tmp_path):
    process, stream, folder = agent
    (tmp_path / "logs/worker-0.log").mkdir(parents=True)
    task = {"task": "worker-0", "cluster": '{"addresses": ["127.0.0.1"]}', "threads": 1, "local_index": 0}
    request = {
        "job": JOB, "log_folder": b64encode(bytes(tmp_path / "logs")).decode(),
        "sample_interval_seconds": None, "isolated": False, "cores_available": None,
        "gpu_of_task": {}, "start_seconds": 10.0, "tasks": [task],
    }  # fmt: skip
    stream.send(Message("start", request))
    error, death = heard(stream, "error", "death"), heard(stream, "error", "death")
    failures = Failures([])
    error, death = (read_node_message(0, message, {"worker-0": 0}) for message in (error, death))
    assert (error.task, error.type) == ("worker-0", "IsADirectoryError")
    assert (death.kind, death.task, death.pid) == ("death", "worker-0", None)
    for message in (error, death):
        failures.record(0, message)
    assert str(failures.death_of(0, "node 0", death)).startswith(
        "task worker-0 on node 0 could not be started (IsADirectoryError: [Errno 21]"
    )
    stream.send(Message("stop", {"grace_seconds": 0.0}))
    heard(stream, "stopped")
    stream.send(Message("finish", {"exit_code": 0}))
    assert process.wait(10) == 0
    assert list(folder.iterdir()) == []


def test_failure_of_an_agent_is_reported_as_its_own(agent):
    process, stream, folder = agent
    stream.send(Message("fly", {}))
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 1
    assert b"agent of node 0: it cannot do what the driver asks: unknown request 'fly'" in errors
    assert b"the driver is gone" not in errors
    assert list(folder.iterdir()) == []
