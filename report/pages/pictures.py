"""The charts of the report's page and of `trainer plot`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..runs.run import Run
from .decision_charts import decision
from .figure import Bars, Dots, Picture, Place
from .lines import Lines, lines_of
from .resource_charts import resources
from .swept_charts import over_settings
from .time_share_charts import time_shares
from .training_charts import training

_MAIN = ("loss", "speed")  # not behind a click if there are several lines; of small multiples only the first


def pictures(runs: Sequence[Run], lines: Lines | None = None) -> list[Picture]:
    """Return the non-empty pictures of labelled runs. Raises DamagedRunError."""
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
