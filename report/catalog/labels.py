"""The label of each run where several are shown together: its directory's name, with as much of the path as tells runs apart."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ...core.untrusted.console import one_line

__all__ = ["labels"]


def labels(paths: Sequence[Path]) -> list[str]:
    """Return a label for each run directory, no two alike.

    It is the directory's name; of those that would be called alike, with as many of the folders above before it as tell them apart. A
    directory that is there twice has a number behind it from the second time on, and so have two whose paths look alike in every part.
    """
    parts = [path.resolve().parts for path in paths]
    depths = [1] * len(parts)
    while True:
        found = [one_line("/".join(part[-depth:])) for part, depth in zip(parts, depths, strict=True)]
        counts = Counter(label for label, _ in set(zip(found, parts, strict=True)))
        longer = [counts[label] > 1 and depth < len(part) for label, depth, part in zip(found, depths, parts, strict=True)]
        if not any(longer):
            return _numbered(found)
        depths = [depth + more for depth, more in zip(depths, longer, strict=True)]


def _numbered(found: Sequence[str]) -> list[str]:
    taken, numbered = set(found), []
    seen: set[str] = set()
    for label in found:
        names = itertools.chain([label], (f"{label} #{number}" for number in itertools.count(2)))
        numbered.append(next(name for name in names if name not in (seen if name == label else taken)))
        seen.add(label)
        taken.add(numbered[-1])
    return numbered
