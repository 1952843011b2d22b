"""What runs are called side by side, in every table, page, picture and curve: as their directories are called now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

__all__ = ["labels"]


def labels(paths: Sequence[Path]) -> list[str]:
    """Return a label for each run directory, no two alike.

    It is the directory's name; of those that would be called alike, with as many of the folders above before it as tell them apart. A
    directory that is there twice has a number behind it from the second time on.
    """
    parts = [path.resolve().parts for path in paths]
    depths = [1] * len(parts)
    while True:
        found = ["/".join(part[-depth:]) for part, depth in zip(parts, depths, strict=True)]
        counts = Counter(label for label, _ in set(zip(found, parts, strict=True)))
        if all(count == 1 for count in counts.values()):
            return _numbered(found)
        depths = [depth + (counts[label] > 1) for label, depth in zip(found, depths, strict=True)]


def _numbered(found: Sequence[str]) -> list[str]:
    times: Counter[str] = Counter()
    numbered = []
    for label in found:
        times[label] += 1
        numbered.append(label if times[label] == 1 else f"{label} #{times[label]}")
    return numbered
