"""The page of those runs that can be read: one that cannot does not take the others' page away, and is named with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import TrainerError, raised
from ..catalog.run import Run, started_runs
from ..page.page import render

__all__ = ["Rendered", "render_readable"]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The page, None where there is none; the runs that are not on it, and why; and what else kept it from being made, if anything."""

    page: str | None
    left_out: Mapping[Path, str]
    problem: str | None = None


def render_readable(paths: Sequence[Path]) -> Rendered:
    """Return the page of the runs. Never raises for what is wrong with their files, nor where these vanish or change meanwhile."""
    left_out: dict[Path, str] = {}
    kept = list(paths)
    while kept:
        page = _attempt(kept)
        if isinstance(page, str):
            return Rendered(page, left_out)
        found = _culprits(kept, page)
        if not found:
            return Rendered(None, left_out, page.text)
        left_out |= found
        kept = [path for path in kept if path not in found]
    return Rendered(None, left_out)


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


def _attempt(paths: Sequence[Path]) -> str | _Failure:
    try:
        return render(started_runs([Run(path) for path in paths]))
    except TrainerError as error:
        return _Failure(str(error))
    except Exception as error:  # noqa: BLE001 — of files that change or vanish while they are read; told on the page, which goes on
        return _Failure(raised(error))


def _culprits(paths: Sequence[Path], failure: _Failure) -> dict[Path, str]:
    """Return which of the runs, of which no page together could be made, have none by themselves either, and why; by halving."""
    if len(paths) == 1:
        return {paths[0]: failure.text}
    found: dict[Path, str] = {}
    for half in (paths[: len(paths) // 2], paths[len(paths) // 2 :]):
        page = _attempt(half)
        if isinstance(page, _Failure):
            found |= _culprits(half, page)
    return found
