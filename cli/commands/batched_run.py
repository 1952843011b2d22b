"""What the commands have in common that hand a run to others to start: its settings, checked here rather than hours later over there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import click

from ...core.errors import UsageError
from ...core.settings.personal import own_file
from ...core.settings.sources import Resolved, resolve
from ..options import given_options
from .run import run

__all__ = ["CHECKPOINTS", "checked"]

CHECKPOINTS = "600s"
"""Where the job says nothing of checkpoints: what a lost node costs at most."""

DECIDED = frozenset(
    {
        "--name",
        "--nodes",
        "--launcher",
        "--resume",
        "--like",
        "--hosts",
        "--hostfile",
        "--rendezvous",
        "--node-rank",
        "--repeats",
        "--config",
    }
    | {"--secret-file", "--print-config"}
)
"""Options of ``trainer run`` that whoever starts the nodes decides; with the last it would train nothing."""

ELSEWHERE = {
    "--config": "CONFIG, its first argument, says that",
    "--print-config": "`trainer run --config CONFIG --print-config` shows the settings",
    "--hosts": "the nodes are where it starts them, so leave it out",
    "--hostfile": "the nodes are where it starts them, so leave it out",
    "--like": "write what the run is to have into CONFIG",
    "--resume": "it resumes the run of its --name by itself; remove this option",
}
"""What to do in place of an option that neither of these commands has."""

SECRET = ("--notify", "--on-failure")
"""Options whose values may hold a password."""


def _instead(option: str) -> str:
    """Return what to do in place of an option that is decided by the command that runs now."""
    own = {name for parameter in click.get_current_context().command.params for name in parameter.opts}
    if option == "--repeats" and "--array" in own:
        return "--array 0-4 is a run for each of five seeds"
    return "give it to that itself, before --" if option in own else ELSEWHERE.get(option, "leave it out")


def checked(
    where: str, config: str, more: Sequence[str], nodes: int, name: str, environ: Mapping[str, str], decided: Collection[str] = ()
) -> Resolved:
    """Return the job that will be trained. `where` names what starts it, and is its own command; `decided` are further options of its.

    Raises UsageError for what is wrong with the job, and for options that are decided there.
    """
    for word in more:
        option = word.split("=", 1)[0]
        if option in DECIDED or option in decided:
            raise UsageError(f"{option}: decided by {where}; {_instead(option)}")
        if option in SECRET:
            raise UsageError(
                f"{option}: is not written into a script, which others may read; set its variable where the run starts, or write it into "
                f"your own file there ({own_file(environ)})"
            )
    if Path(config).exists() and not Path(config).is_file():
        raise UsageError(f"CONFIG: {config!r} is no regular file, and {where} reads it again later; write the settings into a file")
    context = run.make_context("run", [*more, "--config", config, "--nodes", str(nodes), "--name", name])
    return resolve(given_options(context), environ, config)
