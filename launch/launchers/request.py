"""What is asked of a launcher, and what a launcher says of itself: so that no command has to know which launchers there are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.job import Job
from ..environments.base import Membership
from .base import Launcher
from .host_list import Host

__all__ = ["Allocation", "LaunchRequest", "LauncherPlugin"]


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A run whose nodes are to be started, by the process that is to be its driver.

    `membership` is the place of this process among those that something else started, None where nothing did; `secret` is what these
    share, and `asked` what all of them must have been asked for (`joining.py`). `hosts` are where the nodes are to be, in node order,
    `allocated` those that a batch system has given to the job in which this process runs, and `python` is the interpreter there: an
    absolute path, or None for the same as here. `options` has further options that were given and say where the nodes are, by name
    (`LauncherPlugin.takes`), and `environment` this process's variables. `warn` is called with a sentence for the user.
    """

    job: Job
    warn: Callable[[str], None]
    membership: Membership | None = None
    secret: bytes = b""
    asked: Mapping[str, Any] = field(default_factory=dict)
    hosts: Sequence[Host] = ()
    allocated: Sequence[Host] = ()
    python: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The hosts that a batch system has given to the job in which this process runs, and the variable that says so."""

    hosts: Sequence[Host]
    variable: str


def _no_allocation(environment: Mapping[str, str]) -> Allocation | None:
    return None


def _nothing_placed(environment: Mapping[str, str]) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class LauncherPlugin:
    """A launcher as commands know it: what makes one, and what it takes. A plain function that makes one stands for `LauncherPlugin(it)`.

    `make` returns the launcher of a request; what it and the launcher may raise says `Launcher`. `takes` are the options that say where its
    nodes are, by their names in the user's own file: ``hosts``, ``hostfile``, ``python`` and what else `core.settings.personal_options`
    has. What stands for one of them in that file counts for it as a flag does, and a flag that it does not take is refused as idle, save
    ``--hosts``, of which each launcher says itself what it thinks.

    `allocation` returns what a batch system has given, by the variables of a process; None outside of it. A run has as many nodes then,
    unless it says how many. `places` tells in the same way that this process runs within what gives this launcher's nodes: then the hosts
    of the user's own file do not count. `nodes_in_words` says which nodes these are. `own_cluster`: where its nodes are has nothing to do
    with a batch system's job in which this process may be.
    """

    make: Callable[[LaunchRequest], Launcher]
    takes: Collection[str] = ()
    allocation: Callable[[Mapping[str, str]], Allocation | None] = _no_allocation
    places: Callable[[Mapping[str, str]], bool] = _nothing_placed
    nodes_in_words: str = ""
    own_cluster: bool = False

    def gives_nodes(self, environment: Mapping[str, str]) -> bool:
        """Return whether a process with this environment runs where this launcher has nodes for it."""
        return self.places(environment) or self.allocation(environment) is not None
