"""The packages whose releases a run records: those of our backends, and of the one that trains."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.errors import UsageError
from ..core.plugins import BUILT_IN, find

__all__ = ["recorded_packages"]


def recorded_packages(backend: str) -> dict[str, Sequence[str]]:
    """Return for each top-level module the distributions that it may come in; no framework is imported.

    A backend that cannot be loaded adds nothing here: whoever has to train on it says what is wrong with it.
    """
    rows = BUILT_IN["backend"]
    found: dict[str, Sequence[str]] = {row.requires: row.distributions for row in rows}
    if backend not in {row.name for row in rows}:
        from .loading import declared_capabilities

        try:
            found.update(declared_capabilities(find("backend", backend)).packages)
        except UsageError:
            return found
    return found
