"""The table: a line a row, in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .contestants import Reference, Row
from .figures import Figure, Measured, Spread, copies, ratios

UNITS: Mapping[Figure, tuple[str, float]] = {
    "steps_per_second": ("steps/s", 1),
    "examples_per_second": ("examples/s", 1),
    "first_step_seconds": ("s", 1),
    "monitor_cores": ("cores", 1),
    "peak_memory_bytes": ("MB", 1e6),
    "tree_memory_bytes": ("MB", 1e6),
    "data_wait_fraction": ("of the time", 1),
    "time_to_target_seconds": ("s", 1),
    "stall_seconds": ("s", 1),
    "save_cost_seconds": ("s", 1),
    "target_tokens_per_second": ("tokens/s", 1),
    "padding_share": ("of positions", 1),
    "exchange_seconds": ("s", 1),
}
"""Unit of a figure in tables, and its size in the figure's own unit."""
HEADER = ("row", "unit", "ours", "peer", "ratio", "target", "met")


@dataclass(frozen=True)
class Result:
    """A row with its figures; `met` is None without a target, `ours` None without figures.

    `ratio` is what the row's `relation` compares: the ratio, or copies of the state.
    """

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
        return {"name": self.name, **asdict(self.row), "repeats": self.repeats, **spreads, "met": self.met}


def compute(name: str, row: Row, runs: Mapping[str, Sequence[Measured | None]]) -> Result:
    """Compute a row from its contestants' runs, in order of repeats.

    A repeat counts if it has all figures that the row needs.
    """
    turns = zip(*(runs[contestant] for contestant in row.contestants), strict=True)
    complete = [turn for turn in turns if all(run is not None and getattr(run, row.figure) is not None for run in turn)]
    if not complete:
        return Result(name, row, None, None, None, None if row.target is None else False, 0)
    columns = list(zip(*complete, strict=True))
    ours = [getattr(run, row.figure) for run in columns[0]]
    if row.peer is None:
        return Result(name, row, Spread.from_values(ours), None, None, _met(row, Spread.from_values(ours).median), len(ours))
    theirs = [row.peer.value] * len(ours) if isinstance(row.peer, Reference) else [getattr(run, row.figure) for run in columns[1]]
    compared = Spread.from_values(copies(columns[0], columns[1], row.figure) if row.relation == "copies" else ratios(ours, theirs))
    return Result(name, row, Spread.from_values(ours), Spread.from_values(theirs), compared, _met(row, compared.median), len(ours))


def _met(row: Row, value: float) -> bool | None:
    if row.target is None:
        return None
    return value >= row.target if row.bound == "at_least" else value <= row.target


def render(results: Sequence[Result]) -> str:
    """Format the table: medians with [min–max]; the ratio is the median of the repeats' ratios."""
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
    unit, scale = UNITS[row.figure]
    peer = row.peer.source if isinstance(row.peer, Reference) else row.peer
    title = f"{result.name}: {row.ours}" + (f" / {peer}" if peer else "")
    target = "–" if row.target is None else f"{'≥' if row.bound == 'at_least' else '≤'} {row.target:g}"
    met = {None: "–", True: "yes", False: "NO"}[result.met]
    if result.ours is None:
        met = "no figures"
    theirs = _number(row.peer.value / scale) if isinstance(row.peer, Reference) else _spread(result.peer, scale)
    compared = _spread(result.ratio, 1) + (" copies" if row.relation == "copies" and result.ratio else "")
    return (title, unit, _spread(result.ours, scale), theirs, compared, target, met)


def _spread(spread: Spread | None, scale: float) -> str:
    if spread is None:
        return "–"
    median, least, most = (_number(value / scale) for value in (spread.median, spread.least, spread.most))
    return f"{median} [{least}–{most}]"


def _number(value: float) -> str:
    """Three or more digits that count: 23,500  214  5.31  0.0042."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
