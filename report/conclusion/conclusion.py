"""What some runs say together: which set-up is best, by how much along each axis, how sure that is, why, and what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...records.store.jsonl import finite_json
from ..catalog.run import Run, labelled
from ..comparison.factors import Factor
from ..comparison.ratios import Ratio, geometric_mean
from ..diagnosis.advice import advise
from ..diagnosis.batch_size_advice import Advice
from ..diagnosis.verdict import Explanation, explain
from .axis import AxisVerdict, judge_axis
from .loss_agreement import LossAgreement, loss_agreements
from .set_ups import FIGURES, Figure, SetUp, SetUps, set_ups, times_as_good

__all__ = ["Best", "Conclusion", "Limit", "conclude"]

MOST_ADVICE = 2


@dataclass(frozen=True, slots=True)
class Best:
    """The set-up that is best by a figure: its geometric mean over the repeats, and the interval of 95 %, None for one run alone.

    `worst` is the last of the set-ups that it compares with, and `over_worst` how many times as good it is; None where there is no other.
    `rivals` are those between, best first, of which the scatter leaves open whether they are worse.
    `compared` is how many compare, with it, and `left` how many have the figure too and cannot be compared with them.
    """

    set_up: SetUp
    figure: Figure
    value: float
    interval: tuple[float, float] | None
    worst: SetUp | None
    over_worst: Ratio | None
    compared: int = 1
    left: int = 0
    rivals: tuple[SetUp, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "set_up": self.set_up.label,
            "figure": self.figure.key,
            "value": self.value,
            "runs": len(self.set_up.figures(self.figure)),
            "interval": self.interval,
            "worst": None if self.worst is None else self.worst.label,
            "ratio_over_worst": None if self.over_worst is None else self.over_worst.to_json(),
            "compared": self.compared,
            "not_comparable": self.left,
            "not_surely_worse": [one.label for one in self.rivals],
        }


@dataclass(frozen=True, slots=True)
class Limit:
    """What holds a set-up back, by the calibration of its typical run."""

    set_up: SetUp
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What some runs say together.

    `best` has the best set-up by each figure that there is. `verdicts` are on each axis, by each figure. `limits` say what holds back the
    best and the worst set-up, and `advice` what to try next with the best. `losses` say whether runs that should train alike do so.
    `figures` are those that set-ups were to be ranked by.
    """

    set_ups: SetUps
    best: tuple[Best, ...]
    verdicts: tuple[AxisVerdict, ...]
    limits: tuple[Limit, ...]
    advice: tuple[Advice, ...]
    losses: tuple[LossAgreement, ...] = ()
    figures: tuple[Figure, ...] = FIGURES

    @property
    def concludes(self) -> bool:
        """Whether there is more than one run to conclude from."""
        return sum(len(one.runs) for one in self.set_ups.all) > 1

    def to_json(self, sentences: Sequence[str] = ()) -> dict[str, Any]:
        """Return it as a JSON object, with the sentences that say it."""
        document = {
            "sentences": list(sentences),
            "set_ups": [{"label": one.label, "runs": [run.name for run in one.runs]} for one in self.set_ups.all],
            "best": [one.to_json() for one in self.best],
            "axes": [one.to_json() for one in self.verdicts],
            "limits": [
                {"set_up": limit.set_up.label, "run": limit.explanation.evidence.name, "verdict": limit.explanation.verdict}
                for limit in self.limits
            ],
            "next": [{"option": one.option, "speedup": one.speedup, "bound": one.bound, "reason": one.reason} for one in self.advice],
            "losses": [one.to_json() for one in self.losses],
            "quality": self.set_ups.quality.to_json([one.label for one in self.set_ups.all]),
            "left_out": [
                {"run": one.run.name, "starved_fraction": one.by.fraction, "foreign_cores": one.by.foreign_cores}
                for one in self.set_ups.disturbed
            ],
        }
        found: dict[str, Any] = finite_json(document)
        return found


def conclude(runs: Sequence[Run], swept: Sequence[Factor] = (), figures: Sequence[Figure] = FIGURES) -> Conclusion:
    """Return what runs that have figures say together. `swept` is what was varied on purpose, where that is known; see `set_ups`.

    Set-ups are ranked by `figures`; without any there is a conclusion on what they have learnt alone.
    """
    found = set_ups(labelled(runs), swept)
    best = [one for figure in figures if (one := _best(found, figure)) is not None]
    verdicts = [judge_axis(found, axis, figure) for axis in found.axes for figure in figures if _measured(found, figure)]
    limits = _limits(found, best) if figures and sum(len(one.runs) for one in found.all) > 1 else []
    decided = not found.quality.undecided
    advice = [one for one in advise(limits[0].explanation) if one.speedup is not None] if limits and decided else []
    every = [run for one in found.all for run in one.runs]
    losses = tuple(loss_agreements(every))
    return Conclusion(found, tuple(best), tuple(verdicts), tuple(limits), tuple(advice[:MOST_ADVICE]), losses, tuple(figures))


def _measured(found: SetUps, figure: Figure) -> bool:
    """Return whether a figure says anything of these runs: a target alone where two set-ups at least reached it in every run."""
    return sum(bool(one.figures(figure)) for one in found.all) > 1 if figure.better < 0 else True


def _best(found: SetUps, figure: Figure) -> Best | None:
    """Return the best set-up by a figure; None where no other one can be held against it, save others that missed the target."""
    among = found.all_comparable(figure)
    if not among or (len(among) == 1 and not (len(found.all) > 1 and _alone_reached(found, among[0], figure))):
        return None
    ordered = sorted(among, key=lambda one: -figure.better * geometric_mean(one.figures(figure)))
    first, last = ordered[0], ordered[-1]
    own = first.figures(figure)
    over = None if first is last else times_as_good(first, last, figure)
    left = sum(bool(one.figures(figure)) and found.ranks(one) for one in found.all) - len(among)
    rivals = [one for one in ordered[1:-1] if not times_as_good(first, one, figure).sure] if over is not None and over.known else []
    worst = None if first is last else last
    return Best(first, figure, geometric_mean(own), first.interval(figure), worst, over, len(among), left, tuple(rivals))


def _alone_reached(found: SetUps, one: SetUp, figure: Figure) -> bool:
    """Return whether all others had the same target, could be compared in it, and missed it."""
    return figure.better < 0 and all(
        other is one or (other.row.converged is not None and not other.all_reached and found.comparable(one, other, figure.group))
        for other in found.all
    )


def _limits(found: SetUps, best: Sequence[Best]) -> list[Limit]:
    """Return what holds back the best set-up and the worst that it compares with, by the first figure; none where that is not known.

    Without a best one by a figure it is that of the best quality, or the only one.
    """
    place = found.quality.best if found.quality.best is not None else 0 if len(found.all) == 1 else None
    alone = () if place is None or not found.quality.ranks(place) else (found.all[place],)
    looked_at = (best[0].set_up, best[0].worst) if best else alone
    return [Limit(one, explanation) for one in looked_at if one is not None and (explanation := _explained(one)) is not None]


def _explained(one: SetUp) -> Explanation | None:
    """Return what holds back a set-up; None where its run was not calibrated, so that hardly anything is known of it."""
    return None if one.typical_run.calibration is None else explain(one.typical_run)
