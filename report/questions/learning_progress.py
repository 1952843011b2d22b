"""Does the run still learn, has it stopped, or does it learn its training examples by heart? A rule over the evaluations' losses.

The rule looks at differences alone, in units of what the loss has gained in all and of its own noise: curves that are scaled or shifted
get the same verdict.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["CERTAIN", "CHANCE", "LEAST_EVALUATIONS", "NOTABLE", "Learning", "judge_curves"]

Floats = NDArray[np.float64]
State = Literal["improving", "flat", "rising", "overfitting", "worsening", "unclear"]

LEAST_EVALUATIONS = 8
"""With fewer a trend, its noise and the bend of a curve that still falls fast cannot be told apart."""

NOISE_EVALUATIONS = 6
"""The noise is that of the later half of the evaluations, and of at least so many."""

RECENT = 0.4
"""The trend is that of this part of the evaluations, the last ones, and of at least `LEAST_RECENT`."""

LEAST_RECENT = 4

NOTABLE = 0.01
"""A change is one if it is at least this part of all that the loss has gained: below that a run is as good as flat."""

CERTAIN = 4.0
"""A change is one if it is so many standard errors: the errors themselves come from few evaluations, and their tails are long."""

CHANCE = 2.0
"""Below so many standard errors a change is what chance makes of a flat curve; between this and `CERTAIN` it may be either."""

LARGEST = 1e40
"""Of a loss that is computed with: what float32 holds, and some more."""

RISEN = 0.05
"""Overfitting: the loss is above its best by this part of the gain."""


@dataclass(frozen=True, slots=True)
class Learning:
    """A verdict on a run's curves, with the figures that it follows from. Losses are means over examples.

    - `state`: ``improving``; ``flat``; ``rising``; ``overfitting`` (the evaluation loss rises from its best while the training loss falls);
      ``worsening`` (both rise, or the training loss is not known); ``unclear`` where the change may be chance, there are too few
      evaluations, or not all are finite
    - `recent`: how many of the last evaluations the trend is of; `change` is what the fitted line rises over them, `change_error` its
      standard error, `gain` the fall from the first to the best evaluation, smoothed over three
    - `rise`: the last loss above the best, both smoothed; `smoothed_best_index` is the place of that best one, from 0
    - `train_change`: training loss now less that of around the best evaluation (overfitting, worsening) or of the trend's beginning
    """

    state: State
    reason: str
    evaluations: int
    recent: int | None = None
    change: float | None = None
    change_error: float | None = None
    gain: float | None = None
    rise: float | None = None
    noise: float | None = None
    smoothed_best_index: int | None = None
    train_change: float | None = None

    @property
    def standard_errors(self) -> float | None:
        """By how many of its standard errors the loss changed; None where that is not judged, or where there is no noise."""
        return abs(self.change) / self.change_error if self.change is not None and self.change_error else None

    def to_json(self) -> dict[str, object]:
        """Return the figures as a JSON value."""
        return asdict(self)


def judge_curves(losses: Floats, train_losses: Floats) -> Learning:
    """Return the verdict on the evaluations' losses [n], in their order, and the training losses around each of them [n] (NaN: unknown).

    The rule: of the losses, smoothed by medians of three, *gain* is the fall from the first to the lowest. The noise of one evaluation is
    taken from second differences, which a smooth curve has next to none of.

    - overfitting: the last is above the lowest by `RISEN` of the gain and by `CERTAIN` times its noise, the lowest at least three
      evaluations ago, and the training loss has fallen since. Where that has not fallen, worsening.
    - flat: the line through the recent ones changes by less than `NOTABLE` of the gain, or by less than `CHANCE` standard errors
    - improving, rising: it falls or rises by `CERTAIN` standard errors or more; unclear: by fewer than these
    """
    n = len(losses)
    if n < LEAST_EVALUATIONS:
        return Learning("unclear", f"{n} evaluation{'s' if n != 1 else ''} of at least {LEAST_EVALUATIONS}", n)
    if not np.all(np.abs(losses) <= LARGEST):  # which a NaN is not either
        return Learning("unclear", "some evaluations have a loss that is not finite", n)
    smooth = _smoothed(losses)
    best = int(np.argmin(smooth))
    gain, rise = float(smooth[0] - smooth[best]), float(smooth[-1] - smooth[best])
    noise = _noise(losses)
    recent = max(LEAST_RECENT, int(np.ceil(RECENT * n)))
    change, unit_error = _line(losses[-recent:])
    error = noise * unit_error
    scale = max(gain, rise)
    # Noise of the difference of two medians of three neighbours; rounding of losses that are all alike counts as noise, too.
    risen = rise >= max(RISEN * scale, CERTAIN * noise) and rise > _rounding(losses) and n - 1 - best >= 3
    since = best if risen else n - recent
    train_change = _difference(train_losses, since)
    figures = (n, recent, change, error, gain, rise, noise, best, train_change)
    if risen:
        if train_change is not None and train_change < 0:
            return Learning("overfitting", "the evaluation loss rises from its best while the training loss falls", *figures)
        return Learning("worsening", "the evaluation loss rises from its best, and the training loss does not fall", *figures)
    size = abs(change)
    if size < max(NOTABLE * scale, CHANCE * error) or size <= _rounding(losses):
        why = "its noise" if size < CHANCE * error else f"{NOTABLE:.0%} of what it has changed by in all"
        return Learning("flat", f"the evaluation loss neither falls nor rises by more than {why}", *figures)
    if size < CERTAIN * error:
        return Learning("unclear", "the change of the evaluation loss may be chance", *figures)
    return Learning("improving" if change < 0 else "rising", f"the evaluation loss still {'falls' if change < 0 else 'rises'}", *figures)


def _smoothed(values: Floats) -> Floats:
    """Medians of three neighbours; at the ends of the three outermost."""
    middle = np.median(np.stack([values[:-2], values[1:-1], values[2:]]), axis=0)
    return np.concatenate([middle[:1], middle, middle[-1:]])


def _noise(values: Floats) -> float:
    """Return the standard deviation of one evaluation about a smooth curve, from second differences of the later half.

    A second difference of independent noise has the standard deviation √6 σ. Their root mean square is used: of a handful of evaluations
    a median may be anything.
    """
    later = values[min(len(values) // 2, len(values) - NOISE_EVALUATIONS) :]
    return float(np.sqrt(np.mean(np.square(np.diff(later, 2))) / 6.0))


def _line(values: Floats) -> tuple[float, float]:
    """Return the rise of the least-squares line through equidistant values from the first to the last, and its error per unit of noise."""
    k = len(values)
    x = np.arange(k) - (k - 1) / 2
    squares = float(x @ x)
    return float(x @ values) / squares * (k - 1), (k - 1) / np.sqrt(squares)


def _rounding(values: Floats) -> float:
    """What a loss of this size may differ by as a float32 alone."""
    return float(np.max(np.abs(values))) * 1e-6


def _difference(train_losses: Floats, since: int) -> float | None:
    """Return the training loss now less that of around evaluation `since`, both medians of up to three; None where not finite."""
    then, now = train_losses[max(0, since - 1) : since + 2], train_losses[-3:]
    change = float(np.median(now)) - float(np.median(then))
    return change if np.isfinite(change) else None
