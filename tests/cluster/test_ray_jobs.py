"""A run in a job of a Ray cluster, and one for which the cluster grows."""

import json
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
from bridged_hosts import bridged_hosts
from processes import MarkedRun, wait_until
from ray_cluster import RAY, ray_cluster, ray_node, require_ray

pytestmark = [pytest.mark.cluster, pytest.mark.clusters]

DASHBOARD = "http://127.0.0.1:8265"
TRAINER = (sys.executable, "-m", "crosstrain.cli.main")

GROWS = """
import signal
from ray.cluster_utils import AutoscalingCluster

MAX_SIZE = 80_000_000


class Growing(AutoscalingCluster):
    def _generate_config(self, head_resources, worker_node_types, **_):  # Ray's own begins with a file that is not part of the package
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        stages = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
        return {
            "cluster_name": "growing",
            "max_workers": 3,
            "idle_timeout_minutes": 1,
            "provider": {
                "type": "fake_multinode",
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            **{f"{stage}_commands": [] for stage in stages},
            **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            "file_mounts_sync_continuously": False,
            "upscaling_speed": 1.0,
            "head_node_type": "ray.head.default",
            "available_node_types": {**worker_node_types, "ray.head.default": head},
        }


worker = {"resources": {"CPU": 1, "object_store_memory": MAX_SIZE}, "node_config": {}, "min_workers": 0, "max_workers": 3}
Growing({"CPU": 0, "object_store_memory": MAX_SIZE}, {"small": worker}).start()
print("the head is there", flush=True)
while True:
    signal.pause()
"""


def test_a_run_is_a_job_of_the_cluster(tmp_path):
    """Without Ray options: the nodes are the cluster's, and the output is only the run's."""
    with ray_cluster(2, tmp_path, dashboard=True) as cluster:
        job = ["run", "--backend", "torch", "--steps", "10", "--nodes", "2", "--out", str(tmp_path), "--name", "run"]
        ask = [*cluster.nodes[0].command_prefix, *RAY, "job"]
        listed = [*ask, "list", "--address", DASHBOARD]
        wait_until(lambda: subprocess.run(listed, capture_output=True).returncode == 0, 60, "the dashboard")
        submit = [*ask, "submit", "--address", DASHBOARD, "--", *TRAINER, *job]
        done = subprocess.run(submit, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step 10/10" in done.stdout
        described = json.loads((tmp_path / "run/job.json").read_text())
        assert sorted(described["cluster"]["addresses"]) == sorted(cluster.hosts.addresses)
        wait_until(lambda: not cluster.of_run(), 20, "the end of every agent, task and actor")


@contextmanager
def growing_cluster(folder):
    require_ray()
    (folder / "bin").mkdir()
    script = folder / "bin/ray"
    script.write_text(f'#!/bin/sh\nexec {" ".join(RAY)} "$@"\n')
    script.chmod(0o755)
    with bridged_hosts(1, "grow") as hosts:
        path = {"PATH": f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        with ray_node([sys.executable, "-c", GROWS], hosts.in_network(0), folder / "head.log", path) as head:
            wait_until(lambda: "the head is there" in head.log.read_text() or head.process.poll() is not None, 60, "the head")
            assert head.process.poll() is None, head.log.read_text()
            yield head


def test_ray_cluster_grows_for_run(tmp_path):
    """Initially it has no node; the run reports the wait, and the nodes are free at the end."""
    with growing_cluster(tmp_path) as head:
        job = [
            "run",
            "--backend",
            "torch",
            "--steps",
            "10",
            "--nodes",
            "2",
            "--out",
            str(tmp_path),
            "--name",
            "run",
            "--ray-address",
            "auto",
        ]
        with MarkedRun(job, tmp_path, before=head.command_prefix) as remote:
            assert remote.wait(150) == 0, remote.stderr() + head.log.read_text()
            assert re.search(r"Ray: the run waits for 2 nodes with 1 CPU each; the cluster has 1 node, 0 of them large", remote.stderr())
        assert json.loads((tmp_path / "run/summary.json").read_text())["state"] == "succeeded"
        wait_until(lambda: not head.processes("crosstrain.", "NodeHolder"), 20, "the end of every agent, task and actor")
