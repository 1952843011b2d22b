"""Standby processes of a node end with the run, and when cut off from its driver."""

import os
import secrets
import signal
from contextlib import ExitStack

import pytest
from processes import MarkedRun, free_ports, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.cluster]


@pytest.mark.thorough
def test_standby_ends_without_driver_except_on_its_node(tmp_path):
    """The driver is stopped, which standbys cannot distinguish from a cut link.

    Then it continues, and finds its other node lost.
    """
    job = ["run", "--backend", "toy", "--epochs", "1000000", "--eval-every", "end", "--node-timeout", "3"]
    shared = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(9))}
    shared["TRAINER_SECRET"] = secrets.token_hex(16)
    with ExitStack() as entered:
        runs = [
            entered.enter_context(
                MarkedRun(
                    [*job, "--out", str(tmp_path), "--name", "run"], tmp_path, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}
                )
            )
            for rank in range(4)
        ]
        driver, near, agent, far = runs
        steps = tmp_path / "run/steps.jsonl"
        wait_until(lambda: driver.process.poll() is not None or (steps.exists() and steps.stat().st_size), 90, "the first step")
        assert driver.process.poll() is None, driver.stderr()
        os.kill(driver.process.pid, signal.SIGSTOP)
        assert far.wait(30) == 1
        assert "the driver has not been heard of for 3 s (--node-timeout)" in far.stderr()
        assert agent.wait(30) == 1
        assert near.process.poll() is None
        os.kill(driver.process.pid, signal.SIGCONT)
        assert (driver.wait(60), near.wait(60)) == (1, 1), driver.stderr()
        assert "the agent of node 1" in driver.stderr()
