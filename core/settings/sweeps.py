"""Sweeps: from a grid of settings to the jobs of its points; starts nothing.

A grid comes from ``--grid FIELD=VALUE,VALUE`` and from the table ``[sweep]`` of a configuration (`Grid`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..job import Job
from ..suggestions import did_you_mean
from .job_fields import flag_name, is_boolean, schema
from .sources import SWEEP, SWEEP_KEYS, is_axis, read_config, refuse_misplaced, resolve

SWEEP_FILE = "sweep.json"  # identifies a sweep's folder
EARLIER = ".earlier"  # attempts that could not resume; hidden, as they are no points
NOT_SWEPT = ("name", "out")  # a run's location, not its content
MAX_REPEATS = 10_000  # seeds per job; enough for a mean, and all are planned first
MAX_POINTS = 100_000  # all are planned in memory before the first runs
MAX_NAME = 180  # of a point's folder; file systems allow 255 bytes
_SHAPE = "TOML such as grid = {batch_size = [5, 10], mode = ['sync', 'async']}, cases = [{nodes = 2, batch_size = 5}], repeats = 3"


@dataclass(frozen=True, slots=True)
class Grid:
    """Every combination of the `axes`, with each of the `cases`, if any; `repeats` seeds each.

    In a configuration::

        [sweep]
        grid = {batch_size = [5, 10], mode = ["sync", "async"]}    # every combination
        cases = [{nodes = 1}, {nodes = 2, cores_per_node = [1, 0.5]}]    # points that are no product; each goes with every combination
        repeats = 3    # seeds, from the job's on
    """

    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    cases: Sequence[Mapping[str, Any]] = ()
    repeats: int | None = None

    def merged_over(self, lower: Grid) -> Grid:
        """Merge this grid over another: its axes of the same name and its cases replace others."""
        return Grid(
            {**lower.axes, **self.axes}, self.cases or lower.cases, self.repeats if self.repeats is not None else lower.repeats
        ).checked()

    def checked(self) -> Grid:
        """Return the grid. Raises UsageError if axes, cases or repeats set the same field."""
        in_cases = {name for case in self.cases for name in case}
        for name in self.axes:
            if name in in_cases:
                raise UsageError(f"{name}: is decided by the cases of the sweep; a grid over it as well has no meaning")
        if self.repeats is not None and "seed" in {*self.axes, *in_cases}:
            raise UsageError("seed: --repeats goes through seeds itself; give one of the two")
        return self

    @property
    def points(self) -> int:
        """The number of runs."""
        return math.prod(map(len, self.axes.values())) * max(1, len(self.cases)) * (self.repeats or 1)

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield the settings of each point, without repeats, the last axis changing fastest."""
        for case in self.cases or ({},):
            for values in itertools.product(*self.axes.values()):
                yield {**case, **dict(zip(self.axes, values, strict=True))}


@dataclass(frozen=True, slots=True)
class Point:
    """A run of a sweep: its folder's name, its own settings (as in JSON), and the whole job."""

    name: str
    settings: Mapping[str, Any]
    job: Job

    @property
    def text(self) -> str:
        """Its own settings as text: ``batch_size=5, mode=sync``."""
        return settings_text(self.settings)


def read_axis(text: str) -> tuple[str, list[str]]:
    """Read ``batch_size=5,10``, or ``cores_per_node=1,1;1,0.5`` for lists. Raises UsageError."""
    name, sign, values_text = text.partition("=")
    name = name.strip().replace("-", "_")
    separator = ";" if ";" in values_text or (name in Job.model_fields and schema(name).get("type") == "array") else ","
    values = [value.strip() for value in values_text.split(separator)]
    if not sign or not name or not all(values):
        raise UsageError.of("--grid", text, "FIELD=VALUE,VALUE such as batch_size=5,10,20; with ; between values that contain commas")
    _check_name("--grid", name)
    return name, values


def read_grid(config: Path | str) -> Grid:
    """Return the grid in the table ``[sweep]`` of a configuration; empty if there is none."""
    label, values = read_config(config)
    table = values.pop(SWEEP, {})
    refuse_misplaced(label, values)
    where = f"sweep (in {label})"
    if not isinstance(table, Mapping):
        raise UsageError.of(where, table, _SHAPE)
    _refuse_other_keys(table, where)
    axes, cases, repeats = table.get("grid", {}), table.get("cases", []), table.get("repeats")
    if not isinstance(axes, Mapping):
        raise UsageError.of(f"{where}: grid", axes, _SHAPE)
    for name, axis_values in axes.items():
        if not isinstance(axis_values, list) or not axis_values:
            raise UsageError.of(f"{where}: grid: {name}", axis_values, f"a list of values; {_SHAPE}")
    if not isinstance(cases, list) or not all(isinstance(case, Mapping) and case for case in cases):
        raise UsageError.of(f"{where}: cases", cases, _SHAPE)
    if repeats is not None and (isinstance(repeats, bool) or not isinstance(repeats, int) or not 1 <= repeats <= MAX_REPEATS):
        raise UsageError.of(f"{where}: repeats", repeats, f"a whole number from 1 to {MAX_REPEATS}")
    for name in (*axes, *(name for case in cases for name in case)):
        _check_name(where, name)
    return Grid(axes, tuple(cases), repeats).checked()


def _refuse_other_keys(table: Mapping[str, Any], where: str) -> None:
    for key, value in table.items():
        if is_axis(key, value):
            raise UsageError(f"{where}: {key!r} is a setting with several values; write it into a table [sweep.grid].")
        if key in Job.model_fields:
            raise UsageError(f"{where}: {key!r} is a setting with one value; write it above [sweep], outside of every table.")
        if key not in SWEEP_KEYS:
            raise UsageError.of(where, key, ", ".join(SWEEP_KEYS), SWEEP_KEYS)


def _check_name(where: str, name: str) -> None:
    if name in NOT_SWEPT:
        raise UsageError(f"{where}: {name!r} cannot be swept; it says where the runs lie")
    if name not in Job.model_fields:
        hint = did_you_mean(name, Job.model_fields)
        raise UsageError(f"{where}: no setting is called {name!r}.{hint} `trainer run --print-config` lists every setting.")


def plan(grid: Grid, flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | str | None) -> tuple[Point, ...]:
    """Return the points in their order, each validated as a job. Raises UsageError.

    Each seed covers all points before the next one, so that changes of the machine affect all points equally.
    """
    if grid.points > MAX_POINTS:
        raise UsageError(f"sweep: the grid has {grid.points:,} points; a sweep has at most {MAX_POINTS:,}.")
    combinations = list(grid.combinations())
    if combinations == [{}] and grid.repeats is None:
        raise UsageError(
            "sweep: there is nothing to sweep; give --grid FIELD=VALUE,VALUE or --repeats, or a file with a table [sweep.grid]"
        )
    swept = {name for settings in combinations for name in settings}
    for name in sorted(swept & set(flags)):
        raise UsageError(f"{flag_name(name)}: {name} is swept; --grid {name}={flags[name]} makes it the only value")
    jobs: list[tuple[dict[str, Any], Job]] = []
    for repeat in range(grid.repeats or 1):
        for number, settings in enumerate(combinations):
            point_settings = dict(settings)
            if grid.repeats is not None and repeat:
                point_settings["seed"] = jobs[number][1].seed + repeat
            place = f"point {len(jobs) + 1} of {len(combinations) * (grid.repeats or 1)}"
            jobs.append((point_settings, _resolve_point(place, point_settings, flags, environ, config)))
    every_settings = [_settings(point_settings, job, with_seed=grid.repeats is not None) for point_settings, job in jobs]
    seen: set[str] = set()
    for settings in every_settings:
        if (text := json.dumps(settings, sort_keys=True)) in seen:
            raise UsageError(f"sweep: two points have the same settings: {settings_text(settings)}")
        seen.add(text)
    names = _names(every_settings)
    return tuple(Point(name, settings, job) for name, settings, (_, job) in zip(names, every_settings, jobs, strict=True))


def _resolve_point(
    place: str, settings: Mapping[str, Any], flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | str | None
) -> Job:
    try:
        return resolve({**flags, **settings}, environ, config).job
    except UsageError as error:
        raise UsageError(f"{place} ({settings_text(settings)}): {error}") from error


def _settings(point_settings: Mapping[str, Any], job: Job, *, with_seed: bool) -> dict[str, Any]:
    values = job.model_dump(mode="json")
    return {name: values[name] for name in (*point_settings, *(("seed",) if with_seed and "seed" not in point_settings else ()))}


def _names(every_settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a readable folder name per point, numbered if invalid characters made two equal."""
    names: list[str] = []
    for number, settings in enumerate(every_settings, start=1):
        name = re.sub(r"[^\w.=,+@-]", "_", settings_text(settings, ","), flags=re.ASCII)
        if len(name) > MAX_NAME or name in names:
            name = f"{name[:MAX_NAME]}-{number}"
        names.append(name)
    return names


def settings_text(settings: Mapping[str, Any], separator: str = ", ") -> str:
    """Write settings on a line: ``batch_size=5, cores_per_node=1+0.5``."""
    return separator.join(f"{name}={value_text(value, '+')}" for name, value in settings.items())


def as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as options of ``trainer run``."""
    arguments: list[str] = []
    for name, value in settings.items():
        flag = flag_name(name)
        if is_boolean(name):
            arguments.append(flag if value_text(value) == "true" else f"--no-{flag[2:]}")
        else:
            arguments += [flag, value_text(value)]
    return arguments


def value_text(value: Any, separator: str = ",") -> str:
    """Write a value as an option takes it; `separator` joins a list."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return separator.join(value_text(part, separator) for part in value)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)
