"""Have this process open as many files as its nodes need: most systems allow a process 1,024, unless it asks for more."""

from __future__ import annotations

import resource

from ..core.errors import UsageError

__all__ = ["allow_files_of_nodes"]

FILES_OF_A_CHILD = 8
"""A node whose agent this process starts: pipes and sockets to it and to the probe before it, and what serves them all."""

FILES_OF_A_CONNECTION = 2
"""A node that has joined: its connection, and what serves them all."""

OTHER_FILES = 512
"""Records, data, models, and strangers at the door (`core.untrusted.listener`)."""


def allow_files_of_nodes(nodes: int, *, joining: bool) -> None:
    """Raise the limit of open files (RLIMIT_NOFILE) as far as a driver of so many nodes needs it; `joining`: others have started them.

    Raises UsageError where the system does not allow so many.
    """
    needed = OTHER_FILES + nodes * (FILES_OF_A_CONNECTION if joining else FILES_OF_A_CHILD)
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY or needed <= allowed:
        return
    if most != resource.RLIM_INFINITY and needed > most:
        raise UsageError(
            f"nodes: got {nodes:,}, for which this process may have to open {needed:,} files, and the system allows it {most:,} "
            "(ulimit -Hn). Take fewer nodes, or have that limit raised."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
