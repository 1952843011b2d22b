"""Speed-up and parallel efficiency over nodes: strong scaling (a fixed global batch) and weak scaling (a fixed batch per worker)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..catalog.cpu_starvation import timed_runs
from ..catalog.summary_rows import number
from .caveats import changed_on_resume
from .ratios import Ratio, ratio
from .rows import Row

__all__ = ["ScalingPoint", "ScalingSeries", "families", "relative_speed", "relative_target", "scaling"]

Kind = Literal["strong", "weak"]

_BATCH: dict[Kind, str] = {"strong": "global_batch_size", "weak": "batch_size"}


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """A row of the comparison, by its index, on `nodes` nodes.

    `speedup` is its examples/s over those of the series' first point, `efficiency` that over the ratio of the nodes; None where the speed
    of either is not known. So is the efficiency where either had other nodes for a part of its time. `too_fast` says that the efficiency is
    above 1 by more than the scatter, which more nodes alone cannot do: one of the two was measured wrong, or had another advantage.
    """

    entry: int
    nodes: int
    speedup: float | None
    efficiency: float | None
    too_fast: bool = False


@dataclass(frozen=True, slots=True)
class ScalingSeries:
    """Rows on different numbers of nodes at one batch: ``strong`` scaling keeps the global batch, ``weak`` the batch per worker.

    `points` are in the order of their nodes; the first is what the others are relative to.
    """

    kind: Kind
    batch: int
    points: tuple[ScalingPoint, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object; ``row`` counts the rows of the comparison from 0."""
        points = [
            {
                "row": point.entry,
                "nodes": point.nodes,
                "speedup": point.speedup,
                "parallel_efficiency": point.efficiency,
                "beyond_ideal": point.too_fast,
            }
            for point in self.points
        ]
        return {"scaling": self.kind, _BATCH[self.kind]: self.batch, "points": points}


def scaling(entries: Sequence[Row], series: Callable[[Row], Any]) -> tuple[list[ScalingSeries], list[int]]:
    """Return the series among some rows, and the rows (by index) that are in none.

    `series` tells apart rows that differ by more than their nodes and batch. A row may be in a series of each kind; a series has rows on at
    least two different numbers of nodes.
    """
    found: list[ScalingSeries] = []
    for kind, batch in _BATCH.items():
        groups: dict[Any, list[int]] = {}
        for index, entry in enumerate(entries):
            groups.setdefault((series(entry), entry.figures[batch]), []).append(index)
        found += [_series(kind, key[1], entries, members) for key, members in groups.items() if _nodes_differ(entries, members)]
    inside = {point.entry for one in found for point in one.points}
    return found, [index for index in range(len(entries)) if index not in inside]


def families(entries: Sequence[Row], series: Callable[[Row], Any]) -> list[tuple[int, int, int]]:
    """Return a sort key for each row: it puts the rows of one series side by side, series by batch, and rows in no series last.

    A row that is in a series of each kind belongs to the kind that has more rows, to strong scaling where both have as many.
    """
    found, _ = scaling(entries, series)
    kinds = sorted(_BATCH, key=lambda kind: -sum(len(one.points) for one in found if one.kind == kind))
    places: dict[int, tuple[int, int, int]] = {}
    for place, one in sorted(enumerate(found), key=lambda pair: kinds.index(pair[1].kind)):
        for point in one.points:
            places.setdefault(point.entry, (kinds.index(one.kind), one.batch, place))
    return [places.get(index, (len(kinds), entry.figures["global_batch_size"], 0)) for index, entry in enumerate(entries)]


def _nodes_differ(entries: Sequence[Row], members: Sequence[int]) -> bool:
    return len({entries[index].figures["nodes"] for index in members}) > 1


def _series(kind: Kind, batch: int, entries: Sequence[Row], members: Sequence[int]) -> ScalingSeries:
    ordered = sorted(members, key=lambda index: entries[index].figures["nodes"])
    return ScalingSeries(kind, batch, tuple(_point(index, entries[index], entries[ordered[0]]) for index in ordered))


def _point(index: int, row: Row, first_row: Row) -> ScalingPoint:
    own, first = row.figures, first_row.figures
    mine, base = own["examples_per_second"], first["examples_per_second"]
    speedup = mine / base if mine is not None and base else None
    steady = not any("nodes" in changed_on_resume(run) for run in (*row.runs, *first_row.runs))
    efficiency = speedup / (own["nodes"] / first["nodes"]) if speedup is not None and steady else None
    times = _times(row, first_row) if efficiency is not None and row is not first_row else None
    return ScalingPoint(index, own["nodes"], speedup, efficiency, times is not None and times.above(own["nodes"] / first["nodes"]))


def _times(row: Row, other: Row) -> Ratio | None:
    """Return how many times as fast one row is as another, with its interval where both have repeats; None where a run has no speed."""
    sides = [[number(run.summary["examples_per_second"]) for run in timed_runs(one.runs)] for one in (row, other)]
    known = [[value for value in side if value is not None and 0 < value < math.inf] for side in sides]
    return ratio([(known[0], known[1])]) if all(known) and [len(side) for side in known] == [len(side) for side in sides] else None


def relative_speed(entries: Sequence[Row]) -> list[float | None]:
    """Return the examples/s of each row over those of the first."""
    speeds = [entry.figures["examples_per_second"] for entry in entries]
    return [None if speed is None or not speeds[0] else speed / speeds[0] for speed in speeds]


def relative_target(entries: Sequence[Row]) -> list[float | None]:
    """Return how many times as fast as the first row each reached the target; None where one of the two did not, or not in every run."""
    times = [entry.figures["time_to_target_seconds"] if entry.all_converged else None for entry in entries]
    return [None if not seconds or not times[0] else times[0] / seconds for seconds in times]
