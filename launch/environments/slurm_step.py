"""Is this one of several processes of a Slurm step that know nothing of each other? Each of them would train the whole job alone."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from ...core.errors import UsageError

__all__ = ["refuse_step", "step_tasks"]

PORT = 29400
"""The rendezvous in the command that is suggested: the port that README.md has."""


class NamedHost(Protocol):
    """A host of a list."""

    @property
    def name(self) -> str:
        """Its name."""
        ...


HostList = Callable[[str, str], Sequence[NamedHost]]
"""Reads a list of hosts as Slurm writes it; its second argument says where it stands. That is `launchers.host_list.parse_hosts`."""


def step_tasks(environment: Mapping[str, str]) -> int:
    """Return how many processes the Slurm step has that this one belongs to; 1 outside of any."""
    text = environment.get("SLURM_STEP_NUM_TASKS", "").strip() or "1"
    if not text.isdecimal():
        raise UsageError.of("SLURM_STEP_NUM_TASKS", text, "a whole number, as Slurm sets it; or unset it")
    return int(text)


def refuse_step(environment: Mapping[str, str], typed: Sequence[str], parse_hosts: HostList) -> None:
    """Raise UsageError, with what to type, in a Slurm step of several tasks. `typed` is the command line after ``trainer``."""
    tasks = step_tasks(environment)
    if tasks <= 1:
        return
    if any(part == "--repeats" or part.startswith("--repeats=") for part in typed):
        raise UsageError(
            f"--repeats: starts runs on nodes of its own, and Slurm started {tasks} of these processes in one step (SLURM_STEP_NUM_TASKS), "
            f"each of which would do all of them; type: srun --ntasks 1 trainer {shlex.join(typed)}"
        )
    given = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or ""
    nodes = int(given) if given.isdecimal() and int(given) and tasks % int(given) == 0 else tasks
    host = "HOST-OF-NODE-0"
    for variable in ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"):
        with suppress(UsageError):  # not set, or no list of Slurm's
            host = parse_hosts(environment.get(variable, ""), variable)[0].name
    workers = f" --procs-per-node {tasks // nodes}" if tasks > nodes else ""
    inner = f"trainer {shlex.join(typed)} --nodes {nodes}{workers} --rendezvous {host}:{PORT} --node-rank $SLURM_NODEID"
    raise UsageError(
        f"Slurm started {tasks} of these processes in one step (SLURM_STEP_NUM_TASKS), and each would train the whole job alone; type: "
        f"srun --nodes {nodes} --ntasks-per-node 1 bash -c {shlex.quote(inner)}, with TRAINER_SECRET set, "
        "or say --launcher local if each is to train alone"
    )
