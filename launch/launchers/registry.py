"""Which launcher starts the nodes of a run? The one that the job names, else the first of a table that serves the request.

Launchers are a kind of plug-in (`core.plugins`): each is a function that makes one for a `LaunchRequest`, and is imported only where it is
chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.job import Job
from ...core.plugins import find, load
from ..environments.base import Membership
from ..open_files import allow_files_of_nodes
from .base import Launcher
from .host_list import Host

__all__ = ["AUTOMATIC", "FOLLOW_OTHERS", "USE_ALLOCATION", "LaunchRequest", "choose_launcher", "starts_by_ray"]


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A run whose nodes are to be started, by the process that is to be its driver.

    `membership` is the place of this process among those that something else started, None where nothing did; `secret` is what these
    share, and `asked` what all of them must have been asked for (`joining.py`). `hosts` are where the nodes are to be, in node order,
    `allocated` those that a batch system has given to the job in which this process runs, and `python` is the interpreter there: an
    absolute path, or None for the same as here. `ray_address` is that of a Ray cluster, where the user names one; `in_ray_job`: this
    process runs in a job of such a cluster. `warn` is called with a sentence for the user.
    """

    job: Job
    warn: Callable[[str], None]
    membership: Membership | None = None
    secret: bytes = b""
    asked: Mapping[str, Any] = field(default_factory=dict)
    hosts: Sequence[Host] = ()
    allocated: Sequence[Host] = ()
    python: Path | None = None
    ray_address: str | None = None
    in_ray_job: bool = False


Serves = Callable[[LaunchRequest], bool]

AUTOMATIC: Sequence[tuple[str, Serves]] = (
    ("rendezvous", lambda run: run.membership is not None),
    ("ssh", lambda run: bool(run.hosts)),
    ("ray", lambda run: run.ray_address is not None or run.in_ray_job),
    ("slurm", lambda run: len(run.allocated) > 1),
    ("local", lambda run: True),
)
"""What ``auto`` stands for: the launchers' names, and which requests each serves, in the order in which they are asked."""


FOLLOW_OTHERS = ("auto", "rendezvous")
"""The launchers with which a process looks whether something else has started it as one of several."""

USE_ALLOCATION = ("auto", "slurm")
"""The launchers that start as many nodes as a batch system has allocated, unless the job says how many."""


def starts_by_ray(launcher: str, ray_address: str | None, *, in_ray_job: bool) -> bool:
    """Return whether the nodes of a run that nobody else has started are those of a Ray cluster."""
    return launcher == "ray" or (launcher == "auto" and (ray_address is not None or in_ray_job))


def choose_launcher(run: LaunchRequest, automatic: Sequence[tuple[str, Serves]] = AUTOMATIC) -> Launcher:
    """Return the launcher that the job names, or with ``auto`` the first that serves the request.

    Raises UsageError where there is none of that name, or where it cannot start the nodes of this run, or this process not serve so many.
    """
    allow_files_of_nodes(run.job.nodes + (run.membership.standbys if run.membership else 0), joining=run.membership is not None)
    wanted = run.job.launcher
    name = next(name for name, serves in automatic if serves(run)) if wanted == "auto" else wanted
    launcher: Launcher = load(find("launcher", name), "launcher")(run)
    return launcher
