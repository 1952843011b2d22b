"""Errors while a run ends: its end is recorded and all other parts are ended."""

import json

import pytest
from processes import script_process

from crosstrain.launch.driver.outcome import Shutdown

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

SCRIPT = """
import sys
from crosstrain.core.errors import RunFailedError
from crosstrain.launch.driver.task_group import TaskGroup
from crosstrain.launch.{module} import {kind}

before = {kind}.{method}

def fail_at_start(self, timeout_seconds):
    raise RunFailedError("of the start")

def then_fail(self, *arguments, **more):
    before(self, *arguments, **more)
    raise KeyError("of the end")

TaskGroup.await_ready = fail_at_start
{kind}.{method} = then_fail
from crosstrain.cli.main import main
sys.argv = ["trainer", *sys.argv[1:]]
sys.exit(main())
"""


def test_end_runs_every_part_and_keeps_first_cause(capsys):
    done = []
    shutdown = Shutdown()
    shutdown.run(lambda: done.append(1))
    shutdown.run(lambda: {}["first"])
    shutdown.run(lambda: {}["second"])
    shutdown.run(lambda: done.append(2))
    assert done == [1, 2]
    assert repr(shutdown.failure) == "KeyError('first')"
    assert "while the run was being ended" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("module", "kind", "method"),
    [
        ("driver.task_group", "TaskGroup", "end_tasks"),
        ("driver.nodes", "Nodes", "finish"),
        ("launchers.local", "LocalLauncher", "ended"),
    ],
)
def test_error_during_end_is_logged_and_end_is_recorded(tmp_path, module, kind, method):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(module=module, kind=kind, method=method))
    arguments = ["run", "--backend", "toy", "--nodes", "1", "--steps", "5", "--out", str(tmp_path), "--name", "run"]
    with (tmp_path / "errors.txt").open("w") as errors, script_process(script, *arguments, stderr=errors) as run:
        assert run.wait(60) == 1
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["exit_code"], status["cause"]) == ("failed", 1, "of the start")
    messages = (tmp_path / "errors.txt").read_text()
    assert "KeyError: 'of the end'" in messages
    assert "error: of the start" in messages
