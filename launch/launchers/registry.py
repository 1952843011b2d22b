"""Which launchers there are, and which of them starts the nodes of a run: a table, asked in order.

Each is a module with a function ``make``, which is imported only where it is chosen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import UsageError
from ...core.job import Job
from ..environments.base import Membership
from .base import Launcher

__all__ = ["LAUNCHERS", "LaunchRequest", "LauncherRow", "choose_launcher"]


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A run whose nodes are to be started, by the process that is to be its driver.

    `membership` is the place of this process among those that something else started, None where nothing did; `secret` is what these
    share, and `asked` what all of them must have been asked for (`joining.py`). `warn` is called with a sentence for the user.
    """

    job: Job
    warn: Callable[[str], None]
    membership: Membership | None = None
    secret: bytes = b""
    asked: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LauncherRow:
    """A launcher: the name by which ``--launcher`` may ask for it, what it starts, its module, and whether it can serve a request."""

    name: str
    starts: str
    module: str
    serves: Callable[[LaunchRequest], bool]


LAUNCHERS: Sequence[LauncherRow] = (
    LauncherRow(
        "rendezvous", "node 0's agent; the others were started elsewhere, and join", ".rendezvous", lambda run: run.membership is not None
    ),
    LauncherRow("local", "every node, on this machine", ".local", lambda run: run.membership is None),
)
"""In the order in which they are asked where the job says ``auto``; the first that serves a request is taken."""


def choose_launcher(run: LaunchRequest, launchers: Sequence[LauncherRow] = LAUNCHERS) -> Launcher:
    """Return the launcher that the job names, or with ``auto`` the first that serves the request. Raises UsageError where none does."""
    wanted = run.job.launcher
    for row in launchers:
        if wanted in ("auto", row.name) and row.serves(run):
            launcher: Launcher = importlib.import_module(row.module, __package__).make(run)
            return launcher
    raise UsageError(
        f"launcher: got {wanted!r}, which cannot start the nodes of this run; there are {', '.join(row.name for row in launchers)}"
    )
