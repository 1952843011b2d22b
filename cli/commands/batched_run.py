"""What the commands have in common that hand a run to others to start: its settings, checked here rather than hours later over there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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

SECRET = ("--notify", "--on-failure")
"""Options whose values may hold a password."""


def checked(
    where: str, config: str, more: Sequence[str], nodes: int, name: str, environ: Mapping[str, str], decided: Collection[str] = ()
) -> Resolved:
    """Return the job that will be trained. `where` names what starts it, and is its own command; `decided` are further options of its.

    Raises UsageError for what is wrong with the job, and for options that are decided there.
    """
    for word in more:
        option = word.split("=", 1)[0]
        if option in DECIDED or option in decided:
            raise UsageError(f"{option}: decided by {where}; give it to that itself, or leave it out")
        if option in SECRET:
            raise UsageError(
                f"{option}: is not written into a script, which others may read; set its variable where the run starts, or write it into "
                f"your own file there ({own_file(environ)})"
            )
    context = run.make_context("run", [*more, "--config", config, "--nodes", str(nodes), "--name", name])
    return resolve(given_options(context), environ, config)
