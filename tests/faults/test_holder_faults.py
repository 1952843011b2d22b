"""The process that holds the virtual network may be killed: whoever waits for the nodes hears of it, and nothing is left of them."""

import os
import signal
import uuid
from pathlib import Path

import pytest
from processes import MARK, living_in, wait_until

from crosstrain.core.errors import RunFailedError
from crosstrain.core.job import Job
from crosstrain.launch.driver.nodes import Nodes
from crosstrain.launch.driver.task_group import TaskGroup
from crosstrain.launch.launchers.local import LocalLauncher

TOY = Path(__file__).parent.parent / "toy"

pytestmark = [pytest.mark.faults, pytest.mark.cluster]


def listen(control):
    for _ in range(10):
        control.receive(1.0)


def test_a_killed_holder_of_the_virtual_network_is_noticed_and_nothing_is_left(monkeypatch):
    monkeypatch.syspath_prepend(str(TOY))
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    launcher = LocalLauncher(Job(backend="toy", nodes=2, epochs=1), print)
    control = TaskGroup(Nodes(launcher.start(), lambda record: None, lambda *log: None, check=launcher.check), [])
    try:
        control.nodes.greet(60)
        if launcher.network is None:
            pytest.skip("no virtual network can be made here")
        holder = launcher.network.holder_pid
        namespaces = {os.stat(f"/proc/{channel.process.pid}/ns/net").st_ino for channel in control.nodes.channels}
        assert living_in(namespaces, mark)
        os.kill(holder, signal.SIGKILL)
        with pytest.raises(RunFailedError, match=rf"the holder of the virtual network \(process {holder}\) was killed by signal 9"):
            listen(control)
        control.end_tasks(0.0, politely=False)
        control.nodes.finish(1)
    finally:
        launcher.close()
    wait_until(lambda: not living_in(namespaces, mark), 5, "the end of whatever lives in the namespaces")
