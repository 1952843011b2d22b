"""An authenticated node attacks its driver: the run fails and names it, memory is bounded."""

import json
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import hostile_node
import pytest
from processes import MarkedRun, free_ports, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

MAX_MORE_BYTES = 300 * 2**20
NODE = r"node 1 \(host .*, 127\.0\.0\.1\)"
LIKE_ANOTHER = ["a claim of 1 GiB", "a flood of errors", "a flood of phases", "a sample with a wrong field", "a log with a path"]
"""Attacks that the driver meets with the same check as another one here, or that test_started_elsewhere makes in its own way."""
MESSAGES = {
    **dict.fromkeys(hostile_node.ATTACKS, rf"{NODE} sent .*: it is broken, or hostile, and has been cut off"),
    hostile_node.SILENT: rf"stalled.*the agent of {NODE} does not answer",
}


def peak_bytes(pid):
    """The most memory that a process has had, None where it has ended."""
    try:
        match = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


@pytest.mark.quick_cases("garbage")
@pytest.mark.parametrize(
    "attack", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_ANOTHER else ()) for name in hostile_node.ATTACKS]
)
def test_attacking_node_is_disconnected_and_named(tmp_path, attack):
    job = ["run", "--backend", "toy", "--nodes", "2", "--epochs", "1000000", "--eval-every", "end", "--stall-timeout", "3"]
    job += ["--sample-interval", "0.2", "--rendezvous", f"127.0.0.1:{free_ports(1)}", "--out", str(tmp_path), "--name", "run"]
    secret = {"TRAINER_SECRET": secrets.token_hex(16)}
    with MarkedRun([*job, "--node-rank", "0"], tmp_path, secret) as driver:
        command = [sys.executable, hostile_node.__file__, attack, *job, "--node-rank", "1"]
        environment = {**os.environ, **secret}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as attacker:
            try:
                assert attacker.stdout.readline() == "attacks\n", driver.stderr()
                before, peaks = peak_bytes(driver.process.pid), []
                wait_until(
                    lambda: driver.process.poll() is not None or peaks.append(peak_bytes(driver.process.pid)), 30, "the end of the run"
                )
            finally:
                attacker.kill()
        messages = driver.stderr()
        print(messages, f"{(max(filter(None, peaks), default=before) - before) / 2**20:.0f} MiB more", sep="\n")
        assert driver.wait(10) == 1
        assert "Traceback" not in messages
        assert re.search(MESSAGES[attack], messages)
        assert max(filter(None, peaks), default=before) - before < MAX_MORE_BYTES
        status = json.loads((tmp_path / "run/status.json").read_text())
        assert (status["state"], status["task"], status["exit_code"]) == ("failed", "agent-1", 1)
        assert driver.alive() == []
