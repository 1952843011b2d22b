"""An error as a message: what a task says of the one that ends it, and an agent of a task that it cannot start."""

from __future__ import annotations

from ...core.errors import TrainerError
from ...core.liveness.memory_exhaustion import told_of
from .messages import MOST_ERROR_CHARACTERS, Message

__all__ = ["error_message"]


def error_message(error: BaseException, *, peer_lost: bool) -> Message:
    """Return the message about an error, whatever has raised it; `peer_lost`: it is of no other cause than the loss of a peer.

    What a user's code raises may have anything as its number, and texts of any length.
    """
    return Message(
        "error",
        {
            "type": _told(type(error).__name__),
            "message": _told(str(error)),
            "errno": _code(error.errno) if isinstance(error, OSError) else None,
            "exit_code": _code(error.exit_code) if isinstance(error, TrainerError) else None,
            "peer_lost": peer_lost,
            "out_of_memory": None if (told := told_of(error)) is None else _told(told),
        },
    )


def _told(text: str) -> str:
    """Return what of a text can be told; names of files need not be Unicode."""
    return text.encode(errors="backslashreplace").decode()[:MOST_ERROR_CHARACTERS]


def _code(number: object) -> int | None:
    """Return a number of the system's; None for what is none: ``raise OSError("could not load", path)`` makes a text of it."""
    return number if type(number) is int and -(2**31) <= number < 2**31 else None
