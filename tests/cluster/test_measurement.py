"""Reported figures compared with independent ones: the link's other end, wait4, arithmetic."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bridge_counters import bridge_counters

from crosstrain.conformance.runs import run_job
from crosstrain.core.settings.sources import resolve
from crosstrain.engine.progress import make_progress
from crosstrain.launch.driver.driver import Driver, Invocation
from crosstrain.launch.launchers.local import LocalLauncher
from crosstrain.launch.virtual.network import VirtualNetwork
from crosstrain.records.store.run_directory import RunReader

pytestmark = pytest.mark.cluster

ASYNC_JOB = {"mode": "async", "nodes": 3, "batch_size": 10, "data": "glyphs28", "eval_every": "end", "tensorboard": False}


def last_samples(path):
    return {record.node: record for record in RunReader(path).system()}


class CountingLauncher(LocalLauncher):
    """The product's launcher, which reads the bridge's counters of every link before it ends."""

    def close(self):
        if self.network is not None:
            self.peers = bridge_counters(self.network)
        super().close()


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", pytest.param("tf", marks=pytest.mark.slow)])
def test_network_bytes_equal_those_at_other_end_of_link(tmp_path, backend):
    job = resolve({**ASYNC_JOB, "backend": backend, "steps": 800, "out": tmp_path}, {}).job
    driver = Driver(job, Invocation(["test"], {}), make_progress(sys.stderr, True))
    launcher = CountingLauncher(job, lambda text: None)
    driver.execute(launcher)
    for node, record in last_samples(driver.path).items():
        from_node, to_node = launcher.peers[node]
        assert record.network_sent_bytes == pytest.approx(from_node, rel=1e-4)
        assert record.network_received_bytes == pytest.approx(to_node, rel=1e-4)
        assert record.network_sent_bytes > 1e6
    first, *other_nodes = driver_nodes(driver.path)
    assert first["network_sent_bytes"] == pytest.approx(sum(node["network_received_bytes"] for node in other_nodes), rel=0.02)
    assert first["network_received_bytes"] == pytest.approx(sum(node["network_sent_bytes"] for node in other_nodes), rel=0.02)


def driver_nodes(path):
    return RunReader(path).summary()["per_node"]


@pytest.mark.thorough
def test_a_ring_all_reduce_makes_the_traffic_of_the_formula(tmp_path):
    """Each of n nodes sends and receives 2 (n − 1) / n times the size of the vector."""
    world, megabytes = 3, 48
    script = str(Path(__file__).parent / "all_reduce.py")
    with VirtualNetwork(world, None, lambda node: None) as network:
        ranks = [
            network.popen(
                rank,
                [sys.executable, script, str(rank), str(world), network.addresses[0], "21777", network.interface, str(megabytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * world
            before = bridge_counters(network)
            for rank in ranks:
                rank.stdin.write("go\n")
                rank.stdin.flush()
            assert [rank.stdout.readline() for rank in ranks] == ["done\n"] * world
            after = bridge_counters(network)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
                rank.stdin.close()
                rank.stdout.close()
    expected = 2 * (world - 1) / world * megabytes * 2**20
    for (sent_before, received_before), (sent, received) in zip(before, after, strict=True):
        assert sent - sent_before == pytest.approx(expected, rel=0.05)
        assert received - received_before == pytest.approx(expected, rel=0.05)


@pytest.mark.alone  # what is sampled is compared with what the kernel counted a moment later, and with the speed of a link
class TestAlone:
    """Tests that need the machine alone: a separate class, so that others need not wait."""

    @pytest.mark.thorough
    def test_cpu_seconds_equal_what_wait4_returns(self, tmp_path):
        """The last sample before the tasks ended, compared with the kernel's account of each task."""
        run = run_job(tmp_path, backend="torch", nodes=2, batch_size=64, data="glyphs28", epochs=6, tensorboard=False, sample_interval=0.2)
        ended = [event for event in RunReader(run.path).events() if event.event == "task_ended"]
        kernel = {event.detail["task"]: event.detail["cpu_seconds"] for event in ended}
        job = json.loads((run.path / "job.json").read_text())
        node_of = {f"{task['role']}-{task['index']}": task["node"] for task in job["cluster"]["tasks"]}
        finish = min(event.time_seconds for event in ended)
        for node in (0, 1):
            sampled = [
                record.cpu_seconds for record in RunReader(run.path).system() if record.node == node and record.time_seconds < finish
            ]
            truth = sum(seconds for task, seconds in kernel.items() if node_of[task] == node)
            assert truth > 2.0
            assert sampled[-1] == pytest.approx(truth, rel=0.02)

    @pytest.mark.thorough
    def test_network_bytes_per_direction_stay_below_bandwidth(self, tmp_path):
        """A parameter server at its maximum: close to the limit, and at most 5 % above it.

        The link is slow enough to be the limit on a machine that has little time for the tasks, too.
        """
        run = run_job(tmp_path, backend="torch", bandwidth="20mbit", steps=12_000, **ASYNC_JOB)
        limit = 20e6 / 8
        for node in run.summary["per_node"]:
            assert node["network_sent_bytes_per_second"] <= 1.05 * limit
            assert node["network_received_bytes_per_second"] <= 1.05 * limit
        busiest = max(node["network_sent_bytes_per_second"] for node in run.summary["per_node"])
        assert busiest >= 0.8 * limit
