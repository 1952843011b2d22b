"""The launcher of nodes that Slurm has allocated: srun starts the agents, inside of ``salloc`` or ``sbatch``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ...core.errors import UsageError
from ..node.identity import ADDRESS_TOWARDS_VARIABLE, ADDRESS_VARIABLE
from .base import Launcher, StartedAgent
from .carrier import ErrorLines, end_elsewhere, start_elsewhere
from .host_list import Host, parse_hosts
from .remote import RemoteLauncher, refuse_virtual_nodes
from .request import Allocation, LauncherPlugin, LaunchRequest

__all__ = ["LAUNCHER", "SrunStarter", "allocation", "make"]

OPTIONS = ("--quiet", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none", "--unbuffered", "--export=ALL")
"""Of each step: beside the others of its node, with all cores and memory that the job has there."""

WITH_ADDRESS = f'export {ADDRESS_VARIABLE}= {ADDRESS_TOWARDS_VARIABLE}="$SLURM_LAUNCH_NODE_IPADDR"; exec "$@"'
"""What a shell does on the node: its address is that towards the host where srun runs."""


NODES_VARIABLE = "SLURM_JOB_NODELIST"


def allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Return the nodes that Slurm has allocated to the job in which this process runs, in Slurm's order; None outside of a job.

    The job's own list counts, not a step's: in a step of one node that would be itself alone. Raises UsageError for what is no list.
    """
    listed = environment.get(NODES_VARIABLE, "").strip()
    if not listed or not environment.get("SLURM_JOB_ID", "").strip():
        return None
    return Allocation(parse_hosts(listed, NODES_VARIABLE), NODES_VARIABLE)


def make(run: LaunchRequest) -> Launcher:
    """Return the launcher of a run on the first nodes of Slurm's allocation. Raises UsageError outside of one, or where it is too small."""
    if run.hosts:
        raise UsageError("launcher: 'slurm' starts the nodes where Slurm has allocated them; leave --hosts and --hostfile out")
    if not run.allocated:
        raise UsageError(
            "launcher: 'slurm' starts the nodes of a Slurm job; type it inside of one (salloc --nodes 3, or a script for sbatch)"
        )
    if run.job.nodes > len(run.allocated):
        raise UsageError(f"nodes: got {run.job.nodes}, but Slurm has allocated {len(run.allocated)} to this job ({NODES_VARIABLE})")
    refuse_virtual_nodes(run.job, "Slurm")
    program = shutil.which("srun")
    if program is None:
        raise UsageError(
            "launcher: 'slurm' needs the program srun, which is not on PATH here; a container has to have it, and Slurm's files"
        )
    starter = SrunStarter([*run.allocated[: run.job.nodes]], program, [*run.allocated[run.job.nodes :]])
    return RemoteLauncher(run.job, starter, run.python, run.warn, starter.relocate)


LAUNCHER = LauncherPlugin(make, takes=frozenset({"python"}), allocation=allocation, nodes_in_words="the nodes that Slurm has allocated")


@dataclass(frozen=True)
class SrunStarter:
    """Starts agents on allocated hosts, each in a step of its own of the job. `spares` have no node: unused ones, then lost ones."""

    hosts: list[Host]
    program: str
    spares: list[Host]
    name = "srun"

    def relocate(self, node: int) -> None:
        """Give a node whose host is lost a spare one, and keep the lost one for when there is no other; without spares it stays there."""
        if self.spares:
            self.spares.append(self.hosts[node])
            self.hosts[node] = self.spares.pop(0)

    def start(self, node: int, command: Sequence[str]) -> StartedAgent:
        """Start an agent; see `AgentStarter`. Its step ends with srun, and that with this process."""
        host = self.hosts[node].name
        words = [self.program, *OPTIONS, f"--nodelist={host}", "sh", "-c", WITH_ADDRESS, "sh", *command]
        process, stream, said = start_elsewhere(host, words)
        return StartedAgent(process, stream, "", isolated=None, host=host, explain=partial(_explain, said, command))


def _explain(said: ErrorLines, command: Sequence[str], code: int) -> str:
    """Say how srun ended, with what it and the node have said last."""
    return end_elsewhere(command, code, said.last(), " of srun")
