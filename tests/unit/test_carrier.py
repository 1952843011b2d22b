"""Carriers that become the agent, such as `env` and `ip netns exec`, end in any case."""

import os
import signal
import subprocess
import sys

import pytest
from processes import wait_until

from crosstrain.core.process import ignores_signal, process_state, python
from crosstrain.launch.launchers.base import AGENT_MODULE
from crosstrain.launch.launchers.ssh import start_elsewhere

AGENT = ["env", *python(AGENT_MODULE, "--node", "0", "--remote")]
PROBE = ["env", *python("crosstrain.launch.preflight.probe")]

DRIVER = """
import sys, time
from crosstrain.launch.launchers.ssh import start_elsewhere

process, stream, messages = start_elsewhere("here", sys.argv[1:])
assert stream._skip_preface()
print(process.pid, flush=True)
time.sleep(600)
"""


def start_carrier(command):
    """Start a carrier and wait for its agent or probe."""
    process, stream, _ = start_elsewhere("here", command)
    assert stream._skip_preface()
    return process, stream


@pytest.mark.parametrize("command", [AGENT, PROBE], ids=["agent", "probe"])
def test_carrier_that_became_agent_is_killed(command):
    process, stream = start_carrier(command)
    assert ignores_signal(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(process.pid) == "T", 5, "the stop")
    process.terminate()
    assert process.wait(5) == -signal.SIGKILL
    stream.close()


def test_remaining_carrier_gets_sigterm(tmp_path):
    """The carrier can then notify the processes that it started."""
    marker = tmp_path / "notified"
    process, stream = start_elsewhere("here", ["sh", "-c", f"trap 'touch {marker}; exit 3' TERM; echo crosstrain-agent-begins; cat"])[:2]
    assert stream._skip_preface()
    assert not ignores_signal(process.pid, signal.SIGTERM)
    process.terminate()
    process.stdin.close()  # a shell answers a signal when its command has ended
    assert process.wait(5) == 3
    assert marker.exists()
    stream.close()


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("command", [AGENT, PROBE], ids=["agent", "probe"])
def test_nothing_outlives_killed_driver(command, stopped, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", DRIVER, *command], stdout=subprocess.PIPE, text=True, env=environment) as driver:
        try:
            agent = int(driver.stdout.readline())
            if stopped:
                os.kill(agent, signal.SIGSTOP)
                wait_until(lambda: process_state(agent) == "T", 5, "the stop")
        finally:
            driver.kill()
    wait_until(lambda: process_state(agent) in (None, "Z"), 8, "the end of what the driver had started")
    assert [*tmp_path.iterdir()] == []  # an agent that ends by itself removes its folder
