"""Writes to the kernel's CPU controller, on folders as cgroups(7) describes them.

Real groups: tests/cluster.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crosstrain.launch.virtual.cpu_quota import CpuGroups, Hierarchy, delegates_cpu_controller


@pytest.mark.parametrize(("cores", "limit"), [(0.5, "10000 20000"), (2.0, "40000 20000"), (0.01, "10000 1000000")])
def test_version_2_takes_quota_and_period_in_one_file(tmp_path: Path, cores: float, limit: str) -> None:
    group = CpuGroups(Hierarchy(2, tmp_path), os.getpid()).make(0, cores)
    assert (group.folder / "cpu.max").read_text() == limit
    assert group.processes_file.read_text() == "0"  # written by the attempt to enter


@pytest.mark.parametrize(("cores", "quota", "period"), [(0.5, "10000", "20000"), (0.001, "1000", "1000000")])
def test_version_1_takes_quota_and_period_in_two_files(tmp_path: Path, cores: float, quota: str, period: str) -> None:
    group = CpuGroups(Hierarchy(1, tmp_path), os.getpid()).make(3, cores)
    assert group.folder.name.endswith("-node3")
    assert (group.folder / "cpu.cfs_quota_us").read_text() == quota
    assert (group.folder / "cpu.cfs_period_us").read_text() == period


@pytest.mark.parametrize(
    ("controllers", "handed_down", "possible", "afterwards"),
    [("cpu memory", "cpu", True, "cpu"), ("cpu memory", "memory", True, "+cpu"), ("memory pids", "memory", False, "memory")],
    ids=["handed down already", "asked for", "not available here"],
)
def test_version_2_group_delegates_controller(tmp_path: Path, controllers: str, handed_down: str, possible: bool, afterwards: str) -> None:
    (tmp_path / "cgroup.controllers").write_text(controllers)
    (tmp_path / "cgroup.subtree_control").write_text(handed_down)
    (tmp_path / "cgroup.procs").write_text("")
    assert delegates_cpu_controller(tmp_path) is possible
    assert (tmp_path / "cgroup.subtree_control").read_text() == afterwards
