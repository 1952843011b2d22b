"""The page of experiments, with measured figures between markers."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstrain.core.settings.sources import resolve
from crosstrain.core.settings.sweeps import value_text
from crosstrain.records.text import UNKNOWN, bytes_text, count_text, duration_text, number_text, rate_text

from .catalog import Experiment
from .results import Point, Results, figure

NOT_RUN = "*Not measured yet.*"
LOG_EQUAL = math.log(1.05)
"""Ratios within a twentieth of 1 count as no difference."""

Show = Callable[[Any], str]


def _rate(value: float | None) -> str:
    return rate_text(value).removesuffix("/s")


def _bytes_rate(value: float | None) -> str:
    return bytes_text(value, per_second=True)


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


def _cores(value: float | None) -> str:
    return number_text(value, 2)


COLUMNS: Mapping[str, tuple[str, Show]] = {
    "run time": ("run_seconds", duration_text),
    "time of each node": ("per_node.*.train_seconds", duration_text),
    "time to target": ("time_to_target_seconds", duration_text),
    "examples/s": ("examples_per_second", _rate),
    "updates": ("steps", count_text),
    "steps/s": ("steps_per_second", _rate),
    "test loss": ("eval.loss", number_text),
    "test accuracy": ("eval.accuracy", number_text),
    "final train loss": ("final_train_loss", number_text),
    "staleness": ("staleness.mean", _cores),
    "updates by worker": ("updates_by_worker", count_text),
    "CPU cores": ("per_node.*.cpu_cores_used.mean", _cores),
    "mean memory": ("per_node.*.memory_rss_bytes.mean", bytes_text),
    "peak memory": ("per_node.*.memory_rss_bytes.max", bytes_text),
    "sent": ("per_node.*.network_sent_bytes_per_second", _bytes_rate),
    "received": ("per_node.*.network_received_bytes_per_second", _bytes_rate),
    "communicating": ("shares.communicating", _percent),
    "waiting for peers": ("shares.waiting", _percent),
    "checkpoints": ("checkpoints.saved", count_text),
}
"""Columns by label: where a summary has the figure, and how it is written. Figures of nodes are in node order, with a slash between."""


def places(page: str) -> list[str]:
    """Return the names of the places that are filled in, in the order of the page."""
    return re.findall(r"^<!-- begin ([\w-]+) -->$", page, re.MULTILINE)


def fill(page: str, name: str, text: str) -> str:
    """Return the page with `text` between the markers of a place.

    Raises ValueError unless the page has exactly one such place.
    """
    pattern = re.compile(rf"(^<!-- begin {re.escape(name)} -->\n).*?(^<!-- end {re.escape(name)} -->$)", re.MULTILINE | re.DOTALL)
    filled, count = pattern.subn(lambda match: f"{match[1]}{text.strip()}\n{match[2]}", page)
    if count != 1:
        raise ValueError(f"the page has {count} places for {name!r} instead of one")
    return filled


def machine_text(point: Point) -> str:
    """Return what a run was measured on, in a sentence."""
    node = json.loads((point.path / "env.json").read_text(encoding="utf-8"))["nodes"][0]
    memory = bytes_text(node["memory_total_bytes"])
    processor = f"{node['cores_available']:g} cores, {node['cpu_model']}, {memory}"
    return f"Measured on one machine: {processor}, Linux {node['kernel']}, Python {node['python']}."


def measured_text(experiment: Experiment, results: Results | None, pictures: Sequence[str]) -> str:
    """Format the results of an experiment: table, comparison and plots.

    Paths are relative to the page.
    """
    if results is None or not results.points:
        return NOT_RUN
    parts = [_table(experiment, results)]
    if len(results.points) < results.requested:
        parts.append(f"{results.requested - len(results.points)} of {results.requested} points are missing.")
    if experiment.compared:
        parts.append(_comparison(experiment, results))
    parts += [f"![{Path(path).stem.replace('_', ' ')}]({path})" for path in pictures]
    return "\n\n".join(parts)


def _table(experiment: Experiment, results: Results) -> str:
    """Return a row for each point; seeds are merged into mean ± standard deviation."""
    groups: dict[str, list[Point]] = {}
    for point in results.points:
        groups.setdefault(json.dumps({key: value for key, value in point.settings.items() if key != "seed"}, sort_keys=True), []).append(
            point
        )
    swept = [name for name in dict.fromkeys(name for point in results.points for name in point.settings) if name != "seed"]
    shown = [label for label in experiment.figures if any(_known(figure(point.summary, COLUMNS[label][0])) for point in results.points)]
    seeds = ["seeds"] if any(len(group) > 1 for group in groups.values()) else []
    budget = _budget_name(results.points[0]) + (", at most" if results.points[0].job.get("until") else "")
    lines = [_row([*swept, *seeds, budget, *shown]), _row(["---"] * len(swept) + ["---:"] * (len(seeds) + 1 + len(shown)))]
    for group in groups.values():
        first = group[0]
        cells = [value_text(first.settings[name], " / ") if name in first.settings else UNKNOWN for name in swept]
        cells += [str(len(group))] if seeds else []
        cells += [_budget(experiment, first), *(_cell(group, label) for label in shown)]
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _known(value: Any) -> bool:
    return any(part is not None for part in value) if isinstance(value, list) else value is not None


def _cell(group: Sequence[Point], label: str) -> str:
    path, show = COLUMNS[label]
    values = [figure(point.summary, path) for point in group]
    nodes = [value for value in values if isinstance(value, list)]
    if nodes:
        return " / ".join(_spread(parts, show) for parts in zip(*nodes, strict=True))
    return _spread(values, show)


def _spread(values: Sequence[Any], show: Show) -> str:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return show(known[0] if known else None)
    return f"{show(statistics.fmean(known))} ± {show(statistics.stdev(known))}"


def _budget_name(point: Point) -> str:
    return "steps" if point.job["steps"] is not None else "epochs"


def _shortened(experiment: Experiment, point: Point) -> str | None:
    """Return the configured epochs or steps if the run was to have fewer, or None."""
    job = resolve({}, {}, experiment.config).job
    unit = "steps" if job.steps is not None else "epochs"
    configured = getattr(job, unit)
    if configured is None:
        return None
    if _budget_name(point) != unit:
        return f"{count_text(configured)} {unit}"
    return count_text(configured) if point.job[unit] < configured else None


def _budget(experiment: Experiment, point: Point) -> str:
    configured = _shortened(experiment, point)
    budget = count_text(point.job[_budget_name(point)])
    return budget if configured is None else f"shortened to {budget} from {configured}"


def _comparison(experiment: Experiment, results: Results) -> str:
    shortened = any(_shortened(experiment, point) is not None for point in results.points)
    lines = [
        _row(["ratio", "reference", "here (shortened)" if shortened else "here", "same direction"]),
        _row(["---", "---:", "---:", "---"]),
    ]
    for ratio in experiment.compared:
        value = ratio.value(results)
        here = UNKNOWN if value is None else f"{value:.2f}"
        agreement = UNKNOWN if value is None else _agreement(ratio.reference, value)
        lines.append(_row([ratio.text, ratio.sentence or f"{ratio.reference:.2f}", here, agreement]))
    return "\n".join(lines)


def _agreement(reference: float, value: float) -> str:
    return "yes" if _direction(reference) == _direction(value) else "no"


def _direction(value: float) -> int:
    """Return 1 for more, -1 for less, 0 where a ratio is 1 within `LOG_EQUAL`."""
    logarithm = math.log(value) if value > 0 else -math.inf
    return 0 if abs(logarithm) <= LOG_EQUAL else int(math.copysign(1, logarithm))
