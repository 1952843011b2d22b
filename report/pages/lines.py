"""The lines of a picture: configurations with their repeats, by colour and dash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..analysis.set_ups import Disturbed, SetUp, SetUps, called, set_ups
from ..compare.factors import Factor, some_of
from ..runs.cpu_starvation import contention_judged
from ..runs.run import Run
from .figure import COLOURS, DASHES, Stroke, stroke

REPEATS = "Line: mean over the repeats, up to where the shortest ends. Band: minimum to maximum. Thin pale line: a repeat that ran longer."


@dataclass(frozen=True, slots=True)
class Line:
    """A configuration with its repeats, or a run without figures, and how it is drawn."""

    number: int
    label: str
    stroke: Stroke
    part: str  # name of its small multiple
    runs: tuple[Run, ...]
    set_up: SetUp | None
    timed: tuple[Run, ...]  # without CPU contention, drawn over time
    repeated: bool = False  # whether some line of the picture has repeats

    def named(self, count: int) -> str:
        """Return the label, with the number of drawn runs if some line of the picture has repeats."""
        return f"{self.label} (n={count})" if self.repeated else self.label


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines, the contended runs, and the keys of the axes that colour and dash show."""

    all: tuple[Line, ...]
    left_out: tuple[Disturbed, ...]
    set_ups: SetUps | None
    coloured: str | None = None
    dashed: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the small multiples; one empty name if there are none."""
        return tuple(dict.fromkeys(line.part for line in self.all))

    @property
    def runs(self) -> list[Run]:
        """All runs."""
        return [run for line in self.all for run in line.runs]

    @property
    def repeated(self) -> bool:
        """Whether a line represents several runs."""
        return any(len(line.runs) > 1 for line in self.all)

    @property
    def note(self) -> str:
        """The note on repeats and CPU contention; may be empty."""
        return " ".join(filter(None, [REPEATS if self.repeated else "", self.left_out_note]))

    @property
    def left_out_note(self) -> str:
        """The note on runs with CPU contention, or with unknown contention; may be empty."""
        unjudged = [run.name for line in self.all for run in line.runs if run.has_summary and not contention_judged(run.summary)]
        names = some_of([one.run.name for one in self.left_out])
        every = len(self.left_out) == len(self.runs)
        void = f"Not drawn over time, because of CPU contention from other programs: {names}."
        void = "All runs had CPU contention from other programs: their speeds and times are not their own." if every else void
        unknown = f"CPU contention was not measured (run under 2 s, or no samples): {some_of(unjudged)}."
        return " ".join([*([void] if self.left_out else []), *([unknown] if unjudged else [])])


def lines_of(runs: Sequence[Run]) -> Lines:
    """Return the lines for labelled runs; without any uncontended run, all are drawn over time."""
    ended = [run for run in runs if run.has_summary]
    others = [run for run in runs if not run.has_summary]
    found = set_ups(ended) if ended else None
    if found is None:
        return Lines(tuple(Line(number, run.name, stroke(number), "", (run,), None, (run,)) for number, run in enumerate(runs)), (), None)
    coloured, dashed, looks = _looks(found)
    ordered = sorted(zip(found.all, looks, strict=True), key=lambda pair: [_place(found, axis, pair[0]) for axis in found.axes])
    every = sum(len(one.runs) for one in found.all)
    void = {id(one.run) for one in found.disturbed} if len(found.disturbed) < every else set()
    timed = [tuple(run for run in one.runs if id(run) not in void) for one, _ in ordered]
    repeated = bool(found.axes) and any(len(one.runs) > 1 for one in found.all)
    lines = [
        Line(number, _label(one, found, len(runs)), drawn, part, one.runs, one, timed[number], repeated)
        for number, (one, (drawn, part)) in enumerate(ordered)
    ]
    used = len(set(looks))
    part = "" if {line.part for line in lines} == {""} else "without figures"
    lines += [
        Line(len(lines) + place, run.name, Stroke(used + place, used + place), part, (run,), None, (run,))
        for place, run in enumerate(others)
    ]
    return Lines(tuple(lines), found.disturbed, found, coloured, dashed)


def _label(one: SetUp, found: SetUps, runs: int) -> str:
    if runs == 1:
        return one.runs[0].name
    return one.label if found.axes else one.row.label


def _looks(found: SetUps) -> tuple[str | None, str | None, list[tuple[Stroke, str]]]:
    """Return the axes of colour and dash, and each configuration's stroke and small multiple."""
    # Colour shows the first axis with a colour for each value (numbers have pictures of their own), dash the next, small multiples the
    # others. If two would look equal, or without axes, configurations are numbered, as many to a picture as there are colours.
    ordered = sorted(found.axes, key=lambda axis: counts_something(values_of(found, axis)))
    coloured = next((axis for axis in ordered if len(values_of(found, axis)) <= len(COLOURS)), None)
    dashed = next((axis for axis in ordered if axis is not coloured and len(values_of(found, axis)) <= len(DASHES)), None)
    rest = [axis for axis in found.axes if axis is not coloured and axis is not dashed]
    looks = [
        (Stroke(_place(found, coloured, one), _place(found, dashed, one)), called(rest, one.values) if rest else "") for one in found.all
    ]
    if coloured is not None and len(set(looks)) == len(looks):
        return coloured.key, None if dashed is None else dashed.key, looks
    size, count = len(COLOURS), len(found.all)
    parts = [f"{first + 1} to {min(first + size, count)} of {count}" for first in range(0, count, size)]
    return None, None, [(stroke(index % size), parts[index // size] if count > size else "") for index in range(count)]


def values_of(found: SetUps, axis: Factor) -> list[Any]:
    """Return the sorted values of an axis, None last."""
    values = {one.values[axis.key] for one in found.all}
    return sorted(values, key=lambda value: (value is None, () if value is None else axis.order(value)))


def counts_something(values: Sequence[Any]) -> bool:
    """Return whether all values of an axis are numbers."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _place(found: SetUps, axis: Factor | None, one: SetUp) -> int:
    return 0 if axis is None else values_of(found, axis).index(one.values[axis.key])
