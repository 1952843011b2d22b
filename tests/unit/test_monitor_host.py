"""The host's description against other programs and the control groups."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from monitor_tools import program

from crosstrain.backends.loading import recorded_packages
from crosstrain.monitor.gpu import GpuProbe
from crosstrain.monitor.host import cores_available, describe_host

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups and /proc are Linux's")


def test_host_description_matches_other_programs():
    described = json.loads(json.dumps(describe_host(recorded_packages("tf"))))
    nproc = subprocess.run(["nproc"], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}).stdout
    kernel = subprocess.run(["uname", "-r"], capture_output=True, text=True, check=True).stdout
    total = next(int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert described["cores_affinity"] == int(nproc)
    assert 0 < described["cores_available"] <= described["cores_affinity"] <= described["cores_logical"]
    assert described["memory_total_bytes"] == total
    assert described["kernel"] == kernel.strip()
    assert described["python"] == sys.version.split()[0]
    assert set(described["packages"]) == {"crosstrain", "numpy", "tensorflow", "torch"}
    assert described["packages"]["numpy"] == np.__version__
    assert "127.0.0.1" in described["interfaces"]["lo"]["addresses"]
    assert described["interfaces"]["lo"]["speed_bits_per_second"] is None


def test_cores_follow_the_affinity():
    with program("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nsay()") as task:
        task.line()
        assert cores_available(task.pid) == 1.0


@contextlib.contextmanager
def control_group(controller: str) -> Iterator[Path]:
    """Yield a control group with one inside it, in the hierarchy that has the controller."""
    for top, control in ((Path("/sys/fs/cgroup") / controller, "tasks"), (Path("/sys/fs/cgroup"), "cgroup.controllers")):
        subtree = top / "cgroup.subtree_control"
        if not (top / control).exists() or (subtree.exists() and controller not in subtree.read_text().split()):
            continue
        outer = top / f"monitor-test-{os.getpid()}"
        try:
            outer.mkdir()
        except OSError:
            continue
        try:
            if (outer / "cgroup.subtree_control").exists():
                (outer / "cgroup.subtree_control").write_text(f"+{controller}")
            (outer / "inner").mkdir()
            yield outer
        finally:
            (outer / "inner").rmdir()
            outer.rmdir()
        return
    pytest.skip(f"no control group with {controller} can be made here")


def test_cores_follow_a_parent_group_s_cpu_quota():
    with control_group("cpu") as group, program("say()") as task:
        task.line()
        free = cores_available(task.pid)
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("50000 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text("50000")
        (group / "inner" / "cgroup.procs").write_text(str(task.pid))
        limited = cores_available(task.pid)
        task.go()
        task.reap()
    assert limited == 0.5 < free


def test_parent_group_s_memory_limit_is_found():
    code = "say()\nfrom crosstrain.monitor.host import describe_host\nprint(describe_host({})['memory_limit_bytes'])"
    with control_group("memory") as group, program(f"import site\nsite.main()\n{code}") as task:
        task.line()
        limit = group / ("memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes")
        limit.write_text(str(1 << 30))
        (group / "inner" / "cgroup.procs").write_text(str(task.pid))
        task.go()
        assert task.line() == str(1 << 30)
        task.reap()


def test_missing_gpu_is_no_problem_and_no_zero():
    if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg"):
        pytest.skip("this machine has a GPU")
    probe = GpuProbe()
    assert probe.read() is None
    assert probe.problem is None
    probe.close()


def test_gpus_are_named_as_by_nvidia_smi():
    if not os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has no NVIDIA driver")
    pytest.importorskip("pynvml")
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    rows = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    probe = GpuProbe()
    devices = probe.read()
    probe.close()
    assert [device["name"] for device in devices] == [row.split(", ")[0] for row in rows]
    for device, row in zip(devices, rows, strict=True):
        assert device["memory_total_bytes"] == pytest.approx(int(row.split(", ")[1]) << 20, rel=0.01)
        assert 0 <= device["utilization"] <= 1
        assert 0 <= device["memory_bytes"] <= device["memory_total_bytes"]
