"""Checks of the settings of a run that a batch system or cluster starts later."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import click

from ...core.errors import UsageError
from ...core.settings.personal import personal_file
from ...core.settings.sources import Resolved, resolve
from ..options import given_options
from .run import run

CHECKPOINTS = "600s"  # default interval: the most that a lost node costs
DECIDED = {  # options of ``trainer run`` that what starts the nodes sets, or that rule out training
    *("--name", "--nodes", "--launcher", "--resume", "--like", "--hosts", "--hostfile"),
    *("--rendezvous", "--node-rank", "--repeats", "--config", "--secret-file", "--print-config"),
}
ELSEWHERE = {  # alternatives to options that these commands do not have
    "--config": "CONFIG, its first argument, says that",
    "--print-config": "`trainer run --config CONFIG --print-config` shows the settings",
    "--hosts": "the nodes are where it starts them, so leave it out",
    "--hostfile": "the nodes are where it starts them, so leave it out",
    "--like": "write what the run is to have into CONFIG",
    "--resume": "it resumes the run of its --name by itself; remove this option",
}
SECRET = ("--notify", "--on-failure")  # options whose values may contain a password


def _alternative(option: str) -> str:
    options = {name for parameter in click.get_current_context().command.params for name in parameter.opts}
    if option == "--repeats" and "--array" in options:
        return "--array 0-4 is a run for each of five seeds"
    return "give it to that itself, before --" if option in options else ELSEWHERE.get(option, "leave it out")


def check_settings(
    where: str, config: str, more: Sequence[str], nodes: int, name: str, environ: Mapping[str, str], decided: Collection[str] = ()
) -> Resolved:
    """Return the checked job; `where` starts it and sets `decided`. Raises UsageError."""
    for word in more:
        option = word.split("=", 1)[0]
        if option in DECIDED or option in decided:
            raise UsageError(f"{option}: decided by {where}; {_alternative(option)}")
        if option in SECRET:
            raise UsageError(
                f"{option}: is not written into a script, which others may read; set its variable where the run starts, or write it into "
                f"your own file there ({personal_file(environ)})"
            )
    if Path(config).exists() and not Path(config).is_file():
        raise UsageError(f"CONFIG: {config!r} is no regular file, and {where} reads it again later; write the settings into a file")
    context = run.make_context("run", [*more, "--config", config, "--nodes", str(nodes), "--name", name])
    resolved = resolve(given_options(context), environ, config)
    resolved.refuse_idle_flags()
    return resolved
