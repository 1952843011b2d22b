"""Charts of what `trainer diverge` found: errors over depth and over updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...records.store.lockstep_results import Comparison
from ..runs.run import Run
from ..runs.series_arrays import Floats
from .figure import Band, Curve, Panel, Picture, stroke

_NOTE = (
    "Decimal logarithms. Left: the largest error of each layer's results against float64, each layer by itself. Right: how far the two"
    " trainings are apart after an update from equal states. Pale: what rounding explains."
)
LEAST = 1e-10  # errors below are drawn there
ROUNDING = (LEAST, 2.0**-19)  # of a layer by itself in float32: 32 units in the last place


def diverged(runs: Sequence[Run]) -> Iterator[Picture]:
    """Yield a picture for each run that was compared. Raises DamagedRunError."""
    for run in runs:
        if (comparison := run.diverged) is not None:
            yield _picture(run, comparison)


def _picture(run: Run, comparison: Comparison) -> Picture:
    panels = tuple(panel for panel in (_over_depth(comparison), _over_updates(comparison)) if panel is not None)
    title = f"Where {comparison.first.name} and {comparison.second.name} part"
    return Picture(f"diverge-{run.number}", title, _NOTE, comparison.sentence, panels, run=None)


def _logarithms(values: Sequence[float]) -> Floats:
    finite = np.nan_to_num(np.array(values, float), nan=1.0, posinf=1.0)
    logarithms: Floats = np.log10(np.clip(finite, LEAST, 1.0))
    return logarithms


def _over_depth(comparison: Comparison) -> Panel | None:
    layers = comparison.rows_by_layer
    if len(layers) < 2:
        return None
    depth = np.arange(1.0, len(layers) + 1)
    largest = [[max(getattr(row, side) for row in rows) for rows in layers.values()] for side in ("first", "second")]
    names = comparison.first.name, comparison.second.name
    curves = tuple(Curve(name, stroke(number), depth, _logarithms(largest[number]), number, "points") for number, name in enumerate(names))
    low, high = (np.full(len(depth), value) for value in _logarithms(ROUNDING))
    in_float32 = all(side.precision == "fp32" for side in (comparison.first, comparison.second))
    bands = (Band(stroke(2), depth, low, high, 0),) if in_float32 else ()
    return Panel("over depth", "layer, from the input", "log10 of the error", curves, bands=bands, counts=True)


def _over_updates(comparison: Comparison) -> Panel | None:
    updates = np.array([row.update + 1.0 for row in comparison.probes])
    if len(updates) < 2:
        return None
    parts = ("loss", "gradients")
    curves = tuple(
        Curve(part, stroke(number + 3), updates, _logarithms([getattr(row, part) for row in comparison.probes]), number, "points")
        for number, part in enumerate(parts)
    )
    moved = _logarithms([64 * row.moved_gradients for row in comparison.probes])
    band = Band(stroke(2), updates, np.full(len(updates), _logarithms(ROUNDING)[0]), moved, 0)
    return Panel("over updates", "update", "log10 of the relative difference", curves, bands=(band,), counts=True, logarithmic=True)
