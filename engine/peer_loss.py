"""Does an error, or the end of a log, say that a peer was lost? A task that ended for that is a victim, and not the cause of a failure."""

from __future__ import annotations

import re

__all__ = ["caused_by_peer_loss", "indicates_peer_loss"]

_TOLD = re.compile(
    r"(?:reset|closed|aborted) by (?:the )?(?:remote )?peer|connection (?:was )?(?:reset|closed|aborted|lost|refused|timed out)"
    r"|broken pipe|socket closed|no route to host|failed to connect to all addresses|heartbeat timeout"
    r"|lost (?:the chief|a parameter server|worker-\d+)|every worker is lost",
    re.IGNORECASE,
)
"""How the system, the libraries under the frameworks and our backends say it; frameworks raise their general errors about it."""


def indicates_peer_loss(text: str) -> bool:
    """Return whether a text says that the other end of a connection has gone."""
    return _TOLD.search(text) is not None


def caused_by_peer_loss(error: BaseException | None) -> bool:
    """Return whether an error is, or was raised because of, the loss of a connection."""
    seen: set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ConnectionError) or indicates_peer_loss(str(error)):
            return True
        error = error.__cause__
    return False
