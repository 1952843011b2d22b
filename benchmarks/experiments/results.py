"""Results of an experiment's runs: figures by the settings of their points."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Settings = Mapping[str, Any]
Value = Callable[["Results"], "float | None"]


@dataclass(frozen=True)
class Point:
    """A point of a sweep that succeeded: its settings, run directory, job and summary."""

    settings: Settings
    path: Path
    job: Mapping[str, Any]
    summary: Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """The points of a sweep that succeeded, in its order, and how many it has in all."""

    points: Sequence[Point]
    requested: int

    def select(self, **settings: Any) -> list[Point]:
        """Return the points with these settings."""
        return [point for point in self.points if all(point.settings.get(name) == value for name, value in settings.items())]

    def mean(self, name: str, **settings: Any) -> float | None:
        """Return the mean of a figure over the points with these settings.

        None if there is no point or one has no such figure.
        """
        values = [figure(point.summary, name) for point in self.select(**settings)]
        known = [value for value in values if isinstance(value, int | float)]
        return statistics.fmean(known) if known and len(known) == len(values) else None


def figure(summary: Mapping[str, Any], name: str) -> Any:
    """Return a figure by its path, such as ``per_node.0.cpu_cores_used.mean``.

    ``*`` makes a list over nodes; None if it is missing.
    """
    value: Any = summary
    parts = name.split(".")
    for index, part in enumerate(parts):
        if value is None:
            return None
        if part == "*":
            return [figure(item, ".".join(parts[index + 1 :])) for item in value]
        nodes = isinstance(value, list)
        value = value.get(part) if not nodes else value[int(part)] if int(part) < len(value) else None
    return value


def ratio(name: str, above: Settings, below: Settings) -> Value:
    """Return what divides a figure at some settings by the same figure at others."""

    def value(results: Results) -> float | None:
        first, second = results.mean(name, **above), results.mean(name, **below)
        return first / second if first is not None and second else None

    return value


def share_of_the_others(name: str, **settings: Any) -> Value:
    """Return what divides a node figure of node 0 by the sum of the other nodes'."""

    def value(results: Results) -> float | None:
        per_node = [figure(point.summary, f"per_node.*.{name}") for point in results.select(**settings)]
        if not per_node or any(known is None for nodes in per_node for known in nodes):
            return None
        of_others = math.fsum(math.fsum(nodes[1:]) for nodes in per_node)
        return math.fsum(nodes[0] for nodes in per_node) / of_others if of_others else None

    return value


def above_the_others(name: str, **settings: Any) -> Value:
    """Return what divides a node figure of node 0 by the mean of the other nodes'."""
    shared = share_of_the_others(name, **settings)

    def value(results: Results) -> float | None:
        share = shared(results)
        nodes = {point.summary["nodes"] for point in results.select(**settings)}
        return share * (nodes.pop() - 1) if share is not None and len(nodes) == 1 else None

    return value


def read_results(folder: Path) -> Results | None:
    """Return what a sweep's folder holds; None where it has not begun."""
    if not (folder / "sweep.json").exists():
        return None
    document = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    points = []
    for entry in document["points"]:
        path = folder / entry["name"]
        if entry["state"] == "succeeded":
            summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
            points.append(Point(entry["settings"], path, entry["job"], {**summary, "shares": _shares(summary)}))
    return Results(points, len(document["points"]))


def _shares(summary: Mapping[str, Any]) -> dict[str, list[float | None]] | None:
    """Return each node's fractions of a step for communication and for waiting.

    None for a run without calibration.
    """
    shares = summary.get("time_shares")
    if shares is None:
        return None

    def part(name: str) -> list[float | None]:
        return [node[name] / node["step_seconds"] if node["step_seconds"] else None for node in shares["nodes"]]

    return {"communicating": part("communicate_seconds"), "waiting": part("peers_seconds")}
