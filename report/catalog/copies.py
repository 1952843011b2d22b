"""Which run directories are copies of the same run? Copies are one measurement, and count once."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .run import Run

__all__ = ["measurements"]


def measurements(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs in groups of copies of one measurement, most of one run alone, in the order of first appearance.

    Copies have the same documents, whatever their directories are called: the moment of each start, and every figure to the last digit. Two
    runs of one job differ in these.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(_identity(run), []).append(run)
    return list(found.values())


def _identity(run: Run) -> str:
    figures = {key: value for key, value in run.summary.items() if key != "run"}
    return json.dumps([figures, dict(run.job), [dict(node) for node in run.nodes]], sort_keys=True, default=str)
