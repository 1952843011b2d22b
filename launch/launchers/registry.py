"""Which launcher starts the nodes of a run? The one that the job names, else the first of a table that serves the request.

Launchers are a kind of plug-in (`core.plugins`): each is a `LauncherPlugin`, or a function that makes one for a `LaunchRequest`, and is
imported only where it is asked something. What commands have to know of a launcher they ask here, by its name.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ...core.errors import TrainerError, UsageError
from ...core.plugins import BUILT_IN, Plugin, find, load
from ..environments.ray_job import in_ray_job
from ..open_files import allow_files_of_nodes
from .base import Launcher
from .host_list import Host
from .request import LauncherPlugin, LaunchRequest

__all__ = [
    "AUTOMATIC",
    "FOLLOW_OTHERS",
    "LaunchRequest",
    "LauncherPlugin",
    "allocated",
    "choose_launcher",
    "launcher_plugin",
    "name_of_launcher",
    "placed_without",
    "takes_option",
    "who_takes",
]

Serves = Callable[[LaunchRequest], bool]

AUTO = "auto"

AUTOMATIC: Sequence[tuple[str, Serves]] = (
    ("rendezvous", lambda run: run.membership is not None),
    ("ssh", lambda run: bool(run.hosts)),
    ("ray", lambda run: "ray_address" in run.options or in_ray_job(run.environment)),
    ("slurm", lambda run: len(run.allocated) > 1),
    ("local", lambda run: True),
)
"""What ``auto`` stands for: the launchers' names, and which requests each serves, in the order in which they are asked."""


FOLLOW_OTHERS = (AUTO, "rendezvous")
"""The launchers with which a process looks whether something else has started it as one of several."""


def launcher_plugin(name: str) -> LauncherPlugin:
    """Return what a launcher says of itself, also where what it needs is not installed.

    Raises UsageError where there is none of that name, or it is broken.
    """
    return _plugin(find("launcher", name))


def takes_option(launcher: str, option: str) -> bool:
    """Return whether an option that says where nodes are is for this launcher; ``auto`` takes each, as it goes by what is given."""
    return launcher == AUTO or option in launcher_plugin(launcher).takes


def who_takes(option: str) -> str:
    """Return the name of the launcher of ours that takes an option."""
    return next(plugin.name for plugin in BUILT_IN["launcher"] if option in _plugin(plugin).takes)


def placed_without(option: str, environment: Mapping[str, str]) -> bool:
    """Return whether a process with this environment has nodes there, by a launcher of ours that does not take this option."""
    return any(plugin.gives_nodes(environment) for plugin in _built_in() if option not in plugin.takes)


def allocated(launcher: str, environment: Mapping[str, str]) -> tuple[Sequence[Host], str | None]:
    """Return the hosts that a batch system has given to a process with this environment, none outside of its jobs.

    The variable that says so comes with them where this launcher starts as many nodes as there are, unless the job says how many.
    """
    own = None if launcher == AUTO else launcher_plugin(launcher).allocation(environment)
    if own is not None:
        return own.hosts, own.variable
    found = next((given for plugin in _built_in() if (given := plugin.allocation(environment)) is not None), None)
    return ((), None) if found is None else (found.hosts, found.variable if launcher == AUTO else None)


def name_of_launcher(run: LaunchRequest, automatic: Sequence[tuple[str, Serves]] = AUTOMATIC) -> str:
    """Return the name of the launcher that the job names, or with ``auto`` of the first that serves the request."""
    return next(name for name, serves in automatic if serves(run)) if run.job.launcher == AUTO else run.job.launcher


def choose_launcher(run: LaunchRequest, automatic: Sequence[tuple[str, Serves]] = AUTOMATIC) -> Launcher:
    """Return the launcher that the job names, or with ``auto`` the first that serves the request.

    Raises UsageError where there is none of that name, or where it cannot start the nodes of this run, or this process not serve so many;
    and where a package's is none, or raises what it should not, with the package's name.
    """
    allow_files_of_nodes(run.job.nodes + (run.membership.standbys if run.membership else 0), joining=run.membership is not None)
    row = find("launcher", name_of_launcher(run, automatic))
    load(row, "launcher")  # says what it needs, where that is not installed
    make = _plugin(row).make
    if row in BUILT_IN["launcher"]:
        return make(run)
    try:
        launcher: object = make(run)
    except TrainerError:
        raise
    except Exception as error:  # a package's code may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        raised = f"has raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        raise UsageError(f"launcher: {_in_words(row)} {raised}; that is for its authors to mend") from error
    if isinstance(launcher, Launcher):
        return launcher
    lacks = ", ".join(sorted(name for name in _METHODS if not hasattr(launcher, name)))
    returned = f"has returned {launcher!r}, which is no launcher: missing {lacks}"
    raise UsageError(f"launcher: {_in_words(row)} {returned}; that is for its authors to mend")


_METHODS = ("check", "close", "ended", "interrupt", "kill", "prestart", "replace", "start")


def _built_in() -> Iterator[LauncherPlugin]:
    return map(_plugin, BUILT_IN["launcher"])


def _plugin(row: Plugin) -> LauncherPlugin:
    found = load(replace(row, requires=""), "launcher")
    return found if isinstance(found, LauncherPlugin) else LauncherPlugin(found)


def _in_words(row: Plugin) -> str:
    return f"{row.name!r} ({row.target}{f', of the package {row.provider!r}' if row.provider else ''})"
