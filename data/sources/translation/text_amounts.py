"""How much text is held at once: what is counted in lines is counted in bytes too, as a line may be as long as a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["entry_bytes", "parts", "text_bytes"]

T = TypeVar("T")


def text_bytes(text: str) -> int:
    """Return the size of a text in UTF-8. Python may take four times that: as many bytes for each character as the widest needs."""
    return len(text) if text.isascii() else len(text.encode())


def entry_bytes(entry: tuple[str, str] | str) -> int:
    """Return the size of a pair's text in UTF-8; 0 for one that is left out, of which the reason alone is there."""
    return 0 if isinstance(entry, str) else sum(map(text_bytes, entry))


def parts(entries: Iterable[T], most: int, most_bytes: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the entries in lists of at most so many, and of so many bytes, as `size` has them; one that is larger is a list of its own."""
    part: list[T] = []
    held = 0
    for entry in entries:
        more = size(entry)
        if part and (len(part) == most or held + more > most_bytes):
            yield part
            part, held = [], 0
        part.append(entry)
        held += more
    if part:
        yield part
