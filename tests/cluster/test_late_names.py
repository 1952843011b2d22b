"""A name service that knows a pod late, or its former address: names are looked up again."""

import os
import secrets
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import MarkedRun, free_ports, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a process names of its own")]

TOY = Path(__file__).parent.parent / "toy"
WITH_NAMES = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"']
HOST = "mine-master-0"


def test_pytorch_job_pods_wait_for_name_of_first_pod(tmp_path):
    """The variables are the operator's; the driver first gets a former address, the other none."""
    names = {rank: tmp_path / f"hosts-{rank}" for rank in range(2)}
    names[0].write_text(f"192.0.2.7 {HOST}\n")
    names[1].write_text("127.0.0.1 localhost\n")
    port = str(free_ports(1))
    shared = {
        "PYTHONPATH": str(TOY),
        "TRAINER_SECRET": secrets.token_hex(16),
        "WORLD_SIZE": "2",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "auto",
    }
    shared |= {"MASTER_ADDR": HOST, "MASTER_PORT": port, "PET_MASTER_ADDR": HOST, "PET_MASTER_PORT": port}
    job = ["run", "--backend", "toy", "--steps", "4", "--out", str(tmp_path), "--name", "run", "--no-calibrate"]
    with ExitStack() as stack:
        pods = [
            stack.enter_context(
                MarkedRun(job, tmp_path, {**shared, "RANK": str(rank), "PET_NODE_RANK": str(rank)}, before=[*WITH_NAMES, str(file)])
            )
            for rank, file in names.items()
        ]
        message = f"the host '{HOST}' is not an address of this machine, and node 0 has to have it; it is looked up again"
        wait_until(lambda: message in pods[0].stderr(), 40, "the driver's look at its name")
        time.sleep(1)
        for file in names.values():
            file.write_text(f"127.0.0.1 localhost\n127.0.0.1 {HOST}\n")
        assert [pod.wait(60) for pod in pods] == [0, 0], pods[0].stderr()


def test_unresolved_host_name_fails_run_and_is_named(tmp_path):
    """A moment later the other pods would do so, which is not what has gone wrong."""
    shared = {"PYTHONPATH": str(TOY), "TRAINER_SECRET": secrets.token_hex(16), "JOB_COMPLETION_INDEX": "0"}
    job = ["run", "--backend", "toy", "--nodes", "2", "--steps", "4", "--out", str(tmp_path), "--name", "run", "--start-timeout", "2"]
    with MarkedRun([*job, "--rendezvous", "nowhere.invalid:29400"], tmp_path, shared) as pod:
        assert pod.wait(40) == 1
    assert "error: the host 'nowhere.invalid' has no address: " in pod.stderr()
    assert "it was looked up for 2 s (--start-timeout)" in pod.stderr()
