"""Tasks that are started before anybody knows which task of the cluster they will be."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import wait_until

from crosstrain.core.job import Job
from crosstrain.engine.protocol.messages import Message
from crosstrain.launch.node.supervisor import Supervisor

TOY = Path(__file__).parent.parent / "toy"


class Node:
    """A supervisor whose reports are kept."""

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
        job = Job(backend=backend).model_dump(mode="json")
        self.supervisor.prestart(self.folder, self.environment, Message("prepare", {"job": job}))

    def children(self):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path)
    yield node
    node.supervisor.stop(0.0)


def test_a_spare_is_no_task_until_it_is_taken(node, tmp_path):
    node.prestart()
    assert node.supervisor.alive() == []
    early = node.supervisor.claim("worker-0", tmp_path / "logs/worker-0.log", node.environment)
    pid = node.supervisor.pid_of("worker-0")
    assert (node.supervisor.alive(), early.parent) == (["worker-0"], tmp_path)
    assert node.supervisor.claim("worker-1", tmp_path / "logs/worker-1.log", node.environment) is None
    assert node.supervisor.state_of("worker-0") in "RSD"
    assert os.getpgid(pid) == pid


def test_a_spare_is_taken_in_its_own_environment_alone(node, tmp_path):
    """What it has read of it cannot be changed any more, such as the GPU that it sees."""
    node.prestart()
    log = tmp_path / "logs/worker-0.log"
    assert node.supervisor.claim("worker-0", log, {**node.environment, "CUDA_VISIBLE_DEVICES": "1"}) is None
    assert node.supervisor.claim("worker-0", log, dict(node.environment)) is not None


@pytest.mark.parametrize("end", ["killed", "failed"])
def test_a_spare_that_dies_is_not_taken_and_nobody_hears_of_it(node, tmp_path, end):
    before = set(node.children())
    node.prestart("toy" if end == "killed" else "no-such-backend")
    (pid,) = set(node.children()) - before
    if end == "killed":
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in node.children(), 30, "the end of the spare")
    assert node.supervisor.claim("worker-0", tmp_path / "worker-0.log", node.environment) is None
    assert (node.deaths, node.messages) == ([], [])


def test_a_taken_spare_that_dies_before_it_has_moved_leaves_what_it_wrote_in_the_log(node, tmp_path):
    node.prestart()
    early = tmp_path / "spare-1.early"
    wait_until(lambda: "crosstrain.engine.protocol.codec" in early.read_text(), 30, "the start of the spare")
    log = tmp_path / "logs/worker-0.log"
    assert node.supervisor.claim("worker-0", log, node.environment)
    pid = node.supervisor.pid_of("worker-0")
    assert log.read_text() == ""
    os.kill(pid, signal.SIGKILL)
    assert node.reported.wait(10)
    assert [(death.task, death.pid, death.signal, death.order) for death in node.deaths] == [("worker-0", pid, "SIGKILL", 1)]
    assert "crosstrain.engine.protocol.codec" in log.read_text()
    assert not early.exists()


def test_spares_that_nobody_takes_are_dismissed(node):
    before = set(node.children())
    node.prestart()
    node.prestart()
    assert len(set(node.children()) - before) == 2
    node.supervisor.kill_unclaimed()
    wait_until(lambda: set(node.children()) <= before, 10, "the end of the spares")
    assert node.deaths == []


CHATTERBOX = """
import os, socket, sys
from crosstrain.engine.protocol.messages import Message, Stream
connection = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
if os.fork() == 0:  # a process that outlives the task, out of reach of whoever kills the task's group
    os.setsid()
    connection.recv(1)  # until the other end gives up
    os._exit(0)
stream = Stream(connection.makefile("rb"), connection.makefile("wb"))
for number in range({count}):
    stream.send(Message("phase", {{"name": str(number)}}))
os._exit(3)
"""


def test_a_death_is_the_last_that_is_heard_of_a_task(tmp_path, monkeypatch):
    """However slowly what it said is taken, and although a process of its own keeps its end of the channel open."""
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


def test_children_that_are_no_tasks_are_left_to_whoever_started_them(node, tmp_path):
    """Such as those that look where tasks stand; one of them is never awaited."""
    forgotten = subprocess.Popen(["true"])
    for number in range(3):
        name = f"worker-{number}"
        node.supervisor.start(name, tmp_path / f"{name}.log", node.environment)
        assert [subprocess.run(["false"]).returncode for _ in range(20)] == [1] * 20
        node.supervisor.end_task(name)
        assert [death.task for death in node.deaths] == [f"worker-{before}" for before in range(number + 1)]
        assert name not in node.supervisor.alive()
    assert forgotten.wait() == 0
