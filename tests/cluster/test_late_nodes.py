"""Nodes that join late: their start timeout is separate from that of their tasks."""

import os
import time
from pathlib import Path

import pytest

from crosstrain.core.settings.sources import resolve
from crosstrain.engine.progress import QuietProgress
from crosstrain.launch.driver import driver
from crosstrain.launch.launchers.local import LocalLauncher

pytestmark = pytest.mark.cluster

JOB = {"backend": "toy", "nodes": 2, "network": "host", "steps": 4, "eval_every": "end", "tensorboard": False, "start_timeout": 6.0}


class Late(LocalLauncher):
    """Takes all of the time that a start may take."""

    def start(self):
        channels = super().start()
        time.sleep(self.job.start_timeout)
        return channels


@pytest.mark.thorough
def test_late_nodes_do_not_shorten_start_timeout_of_tasks(tmp_path, monkeypatch):
    toy = str(Path(__file__).parent.parent / "toy")
    monkeypatch.syspath_prepend(toy)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([toy, *filter(None, [os.environ.get("PYTHONPATH")])]))
    job = resolve({**JOB, "out": tmp_path, "name": "run"}, {}).job
    launcher = Late(job, lambda text: None)
    _, summary = driver.run(job, driver.Invocation(["test"], {}), progress=QuietProgress(), launcher=launcher)
    assert summary["steps"] == 4
