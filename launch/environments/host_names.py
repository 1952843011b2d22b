"""Addresses of host names that a cluster's name service knows only some time after the hosts have been started."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from ...core.errors import InterruptedRunError, RunFailedError
from ...core.untrusted.console import note

__all__ = ["NameResolver"]

RETRY_SECONDS = 0.5


class NameResolver:
    """Looks names up until they are known, for `timeout_seconds` from now on in all; `interrupted` says whether the user has had enough.

    Inside a node names may not resolve, so that tasks are told addresses.
    """

    def __init__(self, timeout_seconds: float, interrupted: Callable[[], bool]) -> None:
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self._interrupted = interrupted
        self._told: set[str] = set()

    def address(self, host: str) -> str:
        """Return a host's address. Raises RunFailedError where it has none until the time is over, InterruptedRunError."""
        while True:
            try:
                return socket.gethostbyname(host)
            except OSError as error:
                self.again(host, f"has no address: {error.strerror}")

    def again(self, host: str, why: str) -> None:
        """Wait before a host is looked at again, and say once why; raises as `address` does where the time is over."""
        if self._interrupted():
            raise InterruptedRunError(f"interrupted by the user, while the host {host!r} {why}")
        if time.monotonic() >= self._deadline:
            raise RunFailedError(f"the host {host!r} {why}; it was looked up for {self._timeout_seconds:g} s (--start-timeout)")
        if host not in self._told:
            self._told.add(host)
            note(f"trainer: the host {host!r} {why}; it is looked up again until --start-timeout ({self._timeout_seconds:g} s)")
        time.sleep(RETRY_SECONDS)
