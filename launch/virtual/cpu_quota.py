"""CPU limits of virtual nodes: one group per node in the CPU controller, version 1 or 2.

Groups are named ``crosstrain-<pid namespace>-<owner>-<owner's start>-<holder>-node<n>``, to find those of killed runs.
"""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Literal

from ...core.process import pid_namespace, start_of
from ...monitor.cpu_limits import control_groups
from .namespaces import MissingCapabilityError

_REMEDY = (
    "Leave --cores-per-node out, run as root, or get a delegated group: systemd-run --user --scope -p Delegate=yes trainer …; "
    "in a container mount /sys/fs/cgroup writable."
)
# The default of 100 ms would stop a node for longer than a step; the kernel's minimum quota is 1 ms.
_PERIOD_MICROSECONDS = 20_000
_LONG_PERIOD_MICROSECONDS = 1_000_000
_MIN_QUOTA_MICROSECONDS = 1_000
_NAME = re.compile(r"crosstrain-(\d+)-(\d+)-(\d+)-\d+-node\d+")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The CPU controller's version, and the folder in which groups can be made."""

    version: Literal[1, 2]
    base: Path

    @classmethod
    def find(cls) -> Hierarchy:
        """Return the nearest folder for this process's groups. Raises MissingCapabilityError."""
        for version, groups in sorted(control_groups("cpu"), key=itemgetter(0)):
            if version == 1 and _takes_quotas(groups[0]):
                return cls(version, groups[0])
            if version == 2 and (base := next(filter(delegates_cpu_controller, groups), None)):  # usually an ancestor
                return cls(version, base)
        raise MissingCapabilityError("cpu_quota", "Limiting a node's cores needs a writable CPU cgroup, and this user has none", _REMEDY)


@dataclass(frozen=True, slots=True)
class CpuGroup:
    """The group of one node."""

    folder: Path

    @property
    def processes_file(self) -> Path:
        """The file to which a process writes 0 to enter."""
        return self.folder / "cgroup.procs"

    def processes(self) -> list[int]:
        """Return the pids in the group."""
        try:
            return [int(line) for line in self.processes_file.read_text().split()]
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV):
                return []
            raise

    def remove(self, patience_seconds: float) -> bool:
        """Remove the empty group, retrying for this long; return whether it is gone."""
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                self.folder.rmdir()
                return True
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.02)


class CpuGroups:
    """Makes a run's groups, held by this process; `owner` is the one whose death ends the run."""

    def __init__(self, hierarchy: Hierarchy, owner: int) -> None:
        self._hierarchy = hierarchy
        self._prefix = f"crosstrain-{pid_namespace()}-{owner}-{start_of(owner)}-{os.getpid()}"

    def make(self, node: int, cores: float) -> CpuGroup:
        """Make a node's group with a limit of `cores` (such as 0.5). Raises MissingCapabilityError."""
        group = CpuGroup(self._hierarchy.base / f"{self._prefix}-node{node}")
        try:
            group.folder.mkdir()
            _limit(self._hierarchy.version, group.folder, cores)
            _try_to_enter(group)
        except OSError as error:
            if group.folder.exists():
                group.remove(1.0)
            reason = f"cores_per_node: got {cores:g} for node {node}, and the kernel refuses it in {group.folder.parent} ({error.strerror})"
            smaller = "Ask for fewer cores: the group of this session has a lower limit." if error.errno == errno.EINVAL else _REMEDY
            raise MissingCapabilityError("cpu_quota", reason, smaller) from error
        return group


def sweep(hierarchy: Hierarchy) -> list[Path]:
    """Remove the empty groups of runs whose owner is dead; return them."""
    removed = []
    for folder in hierarchy.base.glob("crosstrain-*-node*"):
        name = _NAME.fullmatch(folder.name)
        if name is None or int(name[1]) != pid_namespace() or start_of(int(name[2])) == int(name[3]):
            continue
        group = CpuGroup(folder)
        if not group.processes() and group.remove(0.0):
            removed.append(folder)
    return removed


def _limit(version: Literal[1, 2], folder: Path, cores: float) -> None:
    period = _PERIOD_MICROSECONDS
    if cores * period < _MIN_QUOTA_MICROSECONDS:
        period = _LONG_PERIOD_MICROSECONDS
    quota = max(_MIN_QUOTA_MICROSECONDS, round(cores * period))
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota} {period}")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(period))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))


def _try_to_enter(group: CpuGroup) -> None:
    """Let a child enter the group, as only that shows whether it is allowed. Raises OSError."""
    child = os.fork()
    if child == 0:
        try:
            group.processes_file.write_text("0")
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0:
        raise OSError(code, os.strerror(code))


def _takes_quotas(base: Path) -> bool:
    return (base / "cpu.cfs_quota_us").exists() and os.access(base, os.W_OK | os.X_OK)


def delegates_cpu_controller(base: Path) -> bool:
    """Enable the CPU controller in a version 2 folder; return whether that works."""
    controllers, delegated = base / "cgroup.controllers", base / "cgroup.subtree_control"
    if not controllers.exists() or "cpu" not in controllers.read_text().split():
        return False
    if not (os.access(base, os.W_OK | os.X_OK) and os.access(base / "cgroup.procs", os.W_OK)):
        return False
    if "cpu" in delegated.read_text().split():
        return True
    try:
        delegated.write_text("+cpu")
    except OSError:  # it has processes, or another owner
        return False
    return True
