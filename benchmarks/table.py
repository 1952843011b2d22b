"""The table: a line a row, in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .figures import Measured, Spread, ratios
from .rows import Row

__all__ = ["Result", "compute", "render"]

UNITS = {"steps_per_second": "steps/s", "examples_per_second": "examples/s", "first_step_seconds": "s", "monitor_cores": "cores"}
HEADER = ("row", "unit", "ours", "peer", "ratio", "target", "met")


@dataclass(frozen=True)
class Result:
    """A row with its figures. `met` is None where there is no target; `ours` is None where no repeat gave figures."""

    name: str
    row: Row
    ours: Spread | None
    peer: Spread | None
    ratio: Spread | None
    met: bool | None
    repeats: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready value."""
        spreads = {
            key: vars(spread) if spread else None for key, spread in (("ours", self.ours), ("peer", self.peer), ("ratio", self.ratio))
        }
        return {"name": self.name, **vars(self.row), "repeats": self.repeats, **spreads, "met": self.met}


def compute(name: str, row: Row, runs: Mapping[str, Sequence[Measured | None]]) -> Result:
    """Put a row together from each contestant's runs, in order of repeats; a repeat counts where all that the row needs succeeded."""
    names = [row.ours] + ([row.peer] if row.peer else [])
    complete = [turn for turn in zip(*(runs[each] for each in names), strict=True) if None not in turn]
    values = [[getattr(run, row.figure) for run in turn] for turn in complete]
    if not values:
        return Result(name, row, None, None, None, None if row.target is None else False, 0)
    ours = [turn[0] for turn in values]
    if row.peer is None:
        return Result(name, row, Spread.of(ours), None, None, _met(row, Spread.of(ours).median), len(values))
    theirs = [turn[1] for turn in values]
    ratio = Spread.of(ratios(ours, theirs))
    return Result(name, row, Spread.of(ours), Spread.of(theirs), ratio, _met(row, ratio.median), len(values))


def _met(row: Row, value: float) -> bool | None:
    if row.target is None:
        return None
    return value >= row.target if row.bound == "at_least" else value <= row.target


def render(results: Sequence[Result]) -> str:
    """Return the table as text: medians with [smallest–largest]; the ratio is the median of the repeats' ratios."""
    cells = [HEADER, *(_cells(result) for result in results)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    left = {0, 1, len(HEADER) - 1}
    lines = [
        "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cells(result: Result) -> tuple[str, ...]:
    row = result.row
    title = f"{result.name}: {row.ours}" + (f" / {row.peer}" if row.peer else "")
    target = "–" if row.target is None else f"{'≥' if row.bound == 'at_least' else '≤'} {row.target:g}"
    met = {None: "–", True: "yes", False: "NO"}[result.met]
    if result.ours is None:
        met = "no figures"
    return (title, UNITS[row.figure], _spread(result.ours), _spread(result.peer), _spread(result.ratio), target, met)


def _spread(spread: Spread | None) -> str:
    return "–" if spread is None else f"{_number(spread.median)} [{_number(spread.least)}–{_number(spread.most)}]"


def _number(value: float) -> str:
    """Three or more digits that count: 23,500  214  5.31  0.0042."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
