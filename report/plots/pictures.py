"""The list of charts of some runs: what the report's page and `trainer plot` draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..catalog.run import Run
from .decision_charts import decision
from .figure import Bars, Dots, Picture, Place
from .lines import Lines, lines_of
from .resource_charts import resources
from .swept_charts import over_settings
from .time_share_charts import time_shares
from .training_charts import training

__all__ = ["pictures"]

_MAIN = ("loss", "speed")
"""What a page of several set-ups shows of training beside what decides, of small multiples the first; the rest is behind a click."""


def pictures(runs: Sequence[Run], lines: Lines | None = None) -> list[Picture]:
    """Return the pictures of labelled runs, in the order in which they are shown; those that none of the runs has figures for are left out.

    Repeats are one line each, as the set-ups of a conclusion are; `lines` are those of the runs, where they are known already. Raises
    DamagedRunError where records cannot be read.
    """
    lines = lines or lines_of(runs)
    decided = decision(lines)
    found = [] if decided is None else [decided]
    found += over_settings(lines)
    for picture in (*training(lines), time_shares(lines)):
        shown = _MAIN if len(lines.parts) == 1 else _MAIN[:1]
        place: Place = "more" if len(lines.all) > 1 and picture.name not in shown else "plots"
        found.append(replace(picture, place=place))
    found += resources(runs, [run.node_series() for run in runs])
    return [picture for picture in found if any(isinstance(panel, Bars | Dots) or panel.curves for panel in picture.panels)]
