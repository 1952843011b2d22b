"""The launcher on Slurm's allocation: srun starts the agents, in ``salloc`` or ``sbatch``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.errors import UsageError
from ..node.scratch import ADDRESS_TOWARDS_VARIABLE, ADDRESS_VARIABLE
from .base import Launcher, StartedAgent
from .host_list import Host, parse_hosts
from .registry import Allocation, LauncherPlugin, LaunchRequest
from .ssh import RemoteLauncher, end_elsewhere, refuse_virtual_nodes, start_elsewhere

OPTIONS = ("--quiet", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none", "--unbuffered", "--export=ALL")
"""Each step shares its node's cores and memory with the other steps."""
WITH_ADDRESS = f'export {ADDRESS_VARIABLE}= {ADDRESS_TOWARDS_VARIABLE}="$SLURM_LAUNCH_NODE_IPADDR"; exec "$@"'
"""A node's shell script: its address is the one towards srun's host."""
NODES_VARIABLE = "SLURM_JOB_NODELIST"


def allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Return the nodes of this Slurm job (not step), in Slurm's order. Raises UsageError."""
    listed = environment.get(NODES_VARIABLE, "").strip()
    if not listed or not environment.get("SLURM_JOB_ID", "").strip():
        return None
    return Allocation(parse_hosts(listed, NODES_VARIABLE), NODES_VARIABLE)


def make(run: LaunchRequest) -> Launcher:
    """Return the launcher on the allocation's first nodes. Raises UsageError if too few."""
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
    """Starts each agent in its own job step. `spares` are unused hosts, then lost ones."""

    hosts: list[Host]
    program: str
    spares: list[Host]
    name = "srun"

    def relocate(self, node: int) -> None:
        """Move a node with a lost host to a spare one, if any; the lost host becomes the last spare."""
        if self.spares:
            self.spares.append(self.hosts[node])
            self.hosts[node] = self.spares.pop(0)

    def start(self, node: int, command: Sequence[str]) -> StartedAgent:
        """Start an agent; see `AgentStarter`. Its step ends with srun, and srun with this process."""
        host = self.hosts[node].name
        words = [self.program, *OPTIONS, f"--nodelist={host}", "sh", "-c", WITH_ADDRESS, "sh", *command]
        process, stream, errors = start_elsewhere(host, words)

        def explain(code: int) -> str:
            return end_elsewhere(command, code, errors.last(), " of srun")

        return StartedAgent(process, stream, "", isolated=None, host=host, explain=explain)
