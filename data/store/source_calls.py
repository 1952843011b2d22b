"""Calling what a source is made of: whatever its code raises is one sentence, with the file and line, and not ours to explain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ...core.errors import TrainerError, UsageError, raised
from .writer import BrokenSourceError

__all__ = ["FailedSourceError", "called", "of_source", "yielded"]

T = TypeVar("T")


class FailedSourceError(BrokenSourceError):
    """A source's own code raised something; another try may go better, so that what it has done so far is kept."""


def called(function: Callable[..., T], *arguments: object) -> T:
    """Return what a function of a source returns.

    What it raises for people (TrainerError) or of the disk, the network and the memory comes out as it is; anything else is a
    FailedSourceError.
    """
    try:
        return function(*arguments)
    except (TrainerError, BrokenSourceError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise FailedSourceError(raised(error)) from error


def yielded(function: Callable[[], Iterable[T]], name: str) -> Iterator[T]:
    """Yield what a function of a source yields; see `called`. BrokenSourceError, with its `name`, where it yields nothing."""
    found = called(function)
    if not isinstance(found, Iterable):
        raise BrokenSourceError(f"{name} returned {type(found).__name__}, not blocks one after another")
    iterator = called(iter, found)
    end = object()
    while (block := called(next, iterator, end)) is not end:
        yield block


def of_source(name: str, function: Callable[..., T], *arguments: object) -> T:
    """Return what a function of the source of a dataset called `name` returns; see `called`. UsageError where its code fails."""
    try:
        return called(function, *arguments)
    except FailedSourceError as error:
        raise UsageError(f"data: the source of {name!r} is broken: {error}.") from error
