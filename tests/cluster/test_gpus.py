"""Runs on machines with simulated GPUs, up to the start of the tasks.

The driver's library is a stand-in that answers from a file; the backend reports which GPUs it sees, and computes on the CPU.
"""

import json
import os
import re
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpus import FakeGpu, build_library, environment
from processes import MarkedRun
from ssh_hosts import ssh_hosts

pytestmark = pytest.mark.cluster

TESTS = Path(__file__).parent.parent
BRIEF = ["run", "--backend", "gpu-toy", "--steps", "20", "--batch-size", "30", "--eval-every", "end", "--name", "run"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build_library(tmp_path_factory.mktemp("nvidia"))


@pytest.fixture
def with_gpus(library, tmp_path):
    """Make the environment of a process with some GPUs and the toy backend.

    `name` distinguishes machines.
    """

    def make(name, *gpus, **more):
        path = os.pathsep.join([str(TESTS / "toy"), str(TESTS / "gpu_toy"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return environment(library, tmp_path / f"{name}.gpus", list(gpus), PYTHONPATH=path, **more)

    return make


def lines(folder, file):
    return [json.loads(line) for line in (folder / "run" / file).read_text().splitlines()]


def seen(folder):
    """The GPUs that each task logs."""
    logs = "".join(path.read_text() for path in (folder / "run/logs").rglob("*.log"))
    return dict(re.findall(r"(\S+) sees (.*)", logs))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.thorough
def test_virtual_nodes_divide_gpus_of_machine(with_gpus, tmp_path):
    three = [FakeGpu(f"GPU-{number}", utilization_percent=10 * number) for number in range(3)]
    environment = with_gpus("here", *three, CUDA_VISIBLE_DEVICES="2,GPU-ignored,0", GPU_TOY_SEES="")
    job = [*BRIEF, "--nodes", "2", "--procs-per-node", "1,2", "--out", str(tmp_path)]
    with MarkedRun(job, tmp_path, environment) as few:
        assert few.wait(60) == 0, few.stderr()
    assert "computing on CPUs, as there is no GPU for each worker" in few.stderr()
    assert set(seen(tmp_path).values()) == {"-1 in order PCI_BUS_ID"}
    (tmp_path / "run").rename(tmp_path / "before")
    with MarkedRun(job, tmp_path, {**environment, "CUDA_VISIBLE_DEVICES": "2,0,1"}) as run:
        assert run.wait(60) == 0, run.stderr()
    assert seen(tmp_path) == {f"worker-{rank}": f"{gpu} in order PCI_BUS_ID" for rank, gpu in enumerate((2, 0, 1))}
    cluster = json.loads((tmp_path / "run/job.json").read_text())["gpu_of_task"]
    assert cluster["worker-0"] == {"visible_as": "2", "uuid": "GPU-2", "gpu": 2}
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["device_used"] == "gpu"
    assert [gpu["tasks"] for gpu in summary["per_node"][1]["gpus"]] == [["worker-1"], ["worker-2"], []]
    assert [gpu["utilization"]["mean"] for gpu in summary["per_node"][1]["gpus"]] == pytest.approx([0, 0.1, 0.2])
    assert [gpu["tasks"] for gpu in lines(tmp_path, "system.jsonl")[0]["gpus"]] in (
        [["worker-1"], ["worker-2"], []],
        [[], [], ["worker-0"]],
    )
    started = json.loads((tmp_path / "run/env.json").read_text())["nodes"][0]
    assert started["gpu_driver"] == "580.65.06"
    assert [gpu["visible_as"] for gpu in started["visible_gpus"]] == ["2", "0", "1"]


def test_recorded_precision_is_that_of_workers(with_gpus, tmp_path):
    """Parameter servers are on CPUs, and compute nothing of the model."""
    environment = with_gpus("here", FakeGpu("GPU-a"), GPU_TOY_SEES="")
    with MarkedRun([*BRIEF, "--mode", "async", "--out", str(tmp_path)], tmp_path, environment) as run:
        assert run.wait(60) == 0, run.stderr()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["device_used"], summary["precision_used"]) == ("gpu", "fp32 (TF32)")


@pytest.mark.thorough
def test_node_with_too_few_gpus_is_named_before_start(with_gpus, tmp_path):
    """Two nodes started by a person: two workers on one GPU, and GPUs on one node only."""

    def run_both(device, *gpus_of_second):
        port, secret = free_port(), secrets.token_hex(16)
        job = [*BRIEF, "--nodes", "2", "--procs-per-node", "1,2", "--device", device, "--rendezvous", f"127.0.0.1:{port}"]
        first = with_gpus("first", FakeGpu("GPU-a"), TRAINER_SECRET=secret)
        second = with_gpus("second", *gpus_of_second, TRAINER_SECRET=secret)
        with (
            MarkedRun([*job, "--node-rank", "0", "--out", str(tmp_path)], tmp_path, first) as driver,
            MarkedRun([*job, "--node-rank", "1", "--out", str(tmp_path)], tmp_path, second) as joined,
        ):
            codes = driver.wait(60), joined.wait(60)
        assert not (tmp_path / "run").exists()
        return codes, driver.stderr()

    codes, message = run_both("gpu", FakeGpu("GPU-b"))
    assert codes == (2, 2)
    assert re.search(r"--device: got 'gpu', .*\n  node 1 \(.*\): 2 workers, 1 GPU\n  → --device cpu", message), message
    codes, message = run_both("auto")
    assert codes == (2, 2)
    assert re.search(r"--device: got 'auto', .* not comparable:\n  node 1 \(.*\): 2 workers, no GPU\n", message), message


def test_framework_without_gpu_is_reported(with_gpus, tmp_path):
    job = [*BRIEF, "--out", str(tmp_path)]
    with MarkedRun(job, tmp_path, with_gpus("here", FakeGpu("GPU-0"), GPU_TOY_SEES="cpu")) as run:
        assert run.wait(60) == 0, run.stderr()
    assert "computing on CPUs although each worker has a GPU (1 GPU): the framework finds none: build it for GPUs" in run.stderr()
    assert json.loads((tmp_path / "run/summary.json").read_text())["device_used"] == "cpu"


@pytest.mark.clusters
def test_hosts_report_their_gpus(library, with_gpus, tmp_path):
    """By ssh, with one GPU on the first host and two on the second: doctor, refusals, a run."""
    with ssh_hosts(2, tmp_path) as hosts:
        first, second = hosts.hosts.addresses
        here = with_gpus("first", FakeGpu("GPU-a"))
        with_gpus("second", FakeGpu("GPU-b"), FakeGpu("GPU-c"))
        interpreter = tmp_path / "python"
        interpreter.write_text(
            f'#!/bin/sh\ncase "$SSH_CONNECTION" in *" {first} "*) name=first ;; *" {second} "*) name=second ;; esac\n'
            f'FAKE_NVIDIA_ML={tmp_path}/$name.gpus LD_LIBRARY_PATH={library} exec {sys.executable} "$@"\n'
        )
        interpreter.chmod(0o755)
        variables = {**hosts.environment, "PYTHONPATH": here["PYTHONPATH"]}
        python = ["--python", str(interpreter)]
        command = [*hosts.command_prefix, sys.executable, "-m", "crosstrain.cli.main", "doctor", "--hosts", "node0,node1", *python]
        looked = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=True)
        assert re.search(r"ok    node0  GPUs +1 × NVIDIA H100 80GB HBM3 \(79\.6 GiB\), driver 580\.65\.06\n", looked.stdout), looked.stdout
        assert re.search(r"ok    node1  GPUs +2 × NVIDIA H100 80GB HBM3", looked.stdout), looked.stdout
        job = [*BRIEF, "--device", "gpu", "--out", str(tmp_path), *python, "--hosts"]
        with MarkedRun([*job, "node0:2,node1:1"], tmp_path, variables, before=hosts.command_prefix) as refused:
            assert refused.wait(60) == 2, refused.stderr()
        assert re.search(r"1 of 2 hosts .*\nFAIL  node0  GPUs  2 workers, 1 GPU \(1 × NVIDIA H100", refused.stderr()), refused.stderr()
        with MarkedRun([*job, "node0:1,node1:2"], tmp_path, variables, before=hosts.command_prefix) as run:
            assert run.wait(60) == 0, run.stderr()
        gpu_of_task = json.loads((tmp_path / "run/job.json").read_text())["gpu_of_task"]
        assert {task: gpu["uuid"] for task, gpu in gpu_of_task.items()} == {"worker-0": "GPU-a", "worker-1": "GPU-b", "worker-2": "GPU-c"}
        assert seen(tmp_path) == {f"worker-{rank}": f"{gpu} in order PCI_BUS_ID" for rank, gpu in enumerate((0, 0, 1))}
