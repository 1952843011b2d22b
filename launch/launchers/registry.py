"""The launchers by name, which are plug-ins (`core.plugins`), and the choice of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...core.job import Job
from ...core.plugins import BUILT_IN, Plugin, find, load, plugin_code
from .base import Launcher
from .environments import Membership, in_ray_job
from .host_list import Host
from .machine_checks import allow_files_of_nodes


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A run whose nodes this process, its driver, starts.

    `membership` is this process's place among those started externally, `secret` what these share, and `asked` the request that all must
    have (`joining.py`). `hosts` are in node order, `allocated` those of a batch system's job, and `python` is the interpreter there: an
    absolute path, or None for the same as here. `options` has the other options about nodes, by name (`LauncherPlugin.takes`).
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
    """The hosts of a batch system's job, and the variable that lists them."""

    hosts: Sequence[Host]
    variable: str


@dataclass(frozen=True, slots=True)
class LauncherPlugin:
    """A launcher for commands. A plain function `make` is short for `LauncherPlugin(make)`.

    `make` returns the launcher of a request; for its exceptions see `Launcher`. `takes` are its options about nodes, by their names in the
    user's own file: ``hosts``, ``hostfile``, ``python`` and the rest of `core.settings.personal`. Other flags about nodes are
    refused as idle, except ``--hosts``, which each launcher checks itself. `allocation` returns a batch system's nodes from a process's
    variables, None outside of its jobs; they set the default number of nodes. `places` returns whether this process runs where this
    launcher has nodes; then hosts of the user's own file are ignored. `nodes_in_words` describes these nodes. `own_cluster`: its nodes are
    unrelated to a batch system's job.
    """

    make: Callable[[LaunchRequest], Launcher]
    takes: Collection[str] = ()
    allocation: Callable[[Mapping[str, str]], Allocation | None] = lambda environment: None
    places: Callable[[Mapping[str, str]], bool] = lambda environment: False
    nodes_in_words: str = ""
    own_cluster: bool = False


Serves = Callable[[LaunchRequest], bool]
AUTO = "auto"
AUTOMATIC: Sequence[tuple[str, Serves]] = (
    ("rendezvous", lambda run: run.membership is not None),
    ("ssh", lambda run: bool(run.hosts)),
    ("ray", lambda run: "ray_address" in run.options or in_ray_job(run.environment)),
    ("slurm", lambda run: len(run.allocated) > 1),
    ("local", lambda run: True),
)  # ``auto`` selects the first launcher whose predicate holds
FOLLOW_OTHERS = (AUTO, "rendezvous")  # the launchers for which a process checks whether something else has started it as one of several


def launcher_plugin(name: str) -> LauncherPlugin:
    """Return a launcher's plug-in, requirements unchecked. Raises UsageError."""
    return _plugin(find("launcher", name))


def takes_option(launcher: str, option: str) -> bool:
    """Return whether a launcher takes an option about nodes; ``auto`` takes all of them."""
    return launcher == AUTO or option in launcher_plugin(launcher).takes


def launcher_taking(option: str) -> str:
    """Return the name of the built-in launcher that takes an option."""
    return next(plugin.name for plugin in BUILT_IN["launcher"] if option in _plugin(plugin).takes)


def placed_without(option: str, environment: Mapping[str, str]) -> bool:
    """Return whether a built-in launcher without this option has nodes for this environment."""
    plugins = (plugin for plugin in _built_in() if option not in plugin.takes)
    return any(plugin.places(environment) or plugin.allocation(environment) is not None for plugin in plugins)


def allocated(launcher: str, environment: Mapping[str, str]) -> tuple[Sequence[Host], str | None]:
    """Return a batch system's hosts, and the variable that lists them if it sets the nodes."""
    allocation = None if launcher == AUTO else _plugin_allocation(find("launcher", launcher), environment)
    if allocation is not None:
        return allocation.hosts, allocation.variable
    first = next((offered for plugin in _built_in() if (offered := plugin.allocation(environment)) is not None), None)
    return ((), None) if first is None else (first.hosts, first.variable if launcher == AUTO else None)


def _plugin_allocation(row: Plugin, environment: Mapping[str, str]) -> Allocation | None:
    with plugin_code(row, "launcher", "its `allocation`"):
        allocation: object = _plugin(row).allocation(environment)
        if not isinstance(allocation, Allocation | None):
            raise TypeError(f"returned {type(allocation).__name__}, neither an Allocation nor None")
        return allocation


def name_of_launcher(run: LaunchRequest, automatic: Sequence[tuple[str, Serves]] = AUTOMATIC) -> str:
    """Return the name of the job's launcher; with ``auto`` the first that serves the request."""
    return next(name for name, serves in automatic if serves(run)) if run.job.launcher == AUTO else run.job.launcher


def choose_launcher(run: LaunchRequest, automatic: Sequence[tuple[str, Serves]] = AUTOMATIC) -> Launcher:
    """Return the job's launcher; with ``auto`` the first that serves the request.

    Raises UsageError if it is unknown, cannot start this run's nodes, this process cannot serve so many, or, with the package's name, a
    package's launcher is invalid or raises another exception.
    """
    allow_files_of_nodes(run.job.nodes + (run.membership.standbys if run.membership else 0), joining=run.membership is not None)
    row = find("launcher", name_of_launcher(run, automatic))
    load(row, "launcher")  # reports a missing requirement
    make = _plugin(row).make
    if row in BUILT_IN["launcher"]:
        return make(run)
    with plugin_code(row, "launcher", "its `make`"):
        launcher: object = make(run)
    if isinstance(launcher, Launcher):
        return launcher
    missing = ", ".join(sorted(name for name in _METHODS if not hasattr(launcher, name)))
    returned = f"has returned {launcher!r}, which is no launcher: missing {missing}"
    raise UsageError(f"launcher: {row.described} {returned}; that is for its authors to mend")


_METHODS = ("check", "close", "ended", "interrupt", "kill", "prestart", "replace", "start")


def _built_in() -> Iterator[LauncherPlugin]:
    return map(_plugin, BUILT_IN["launcher"])


def _plugin(row: Plugin) -> LauncherPlugin:
    loaded = load(replace(row, requires=""), "launcher")
    plugin = loaded if isinstance(loaded, LauncherPlugin) else LauncherPlugin(loaded)
    with plugin_code(row, "launcher", "its declaration"):
        wrong = [name for name in ("make", "allocation", "places") if not callable(getattr(plugin, name))]
        if wrong or isinstance(plugin.takes, str) or not all(isinstance(option, str) for option in plugin.takes):
            raise TypeError(f"{wrong[0]} is no function" if wrong else "takes is no collection of names")
    return plugin
