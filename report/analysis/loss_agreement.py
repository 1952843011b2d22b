"""Loss agreement of runs that should train alike, and sentences on quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.console import one_line
from ...core.setting import LOSS
from ...metrics.base import MetricInfo
from ...records.text import figure_text, number_text
from ..compare.caveats import changed_on_resume
from ..compare.factors import RULES, some_of
from ..runs.run import Run
from .configurations import ConfigurationSet, counted, differing

EQUAL_WITHIN = 1e-4  # relative difference of equal losses: the effect of other kernels and orders of summation
MOST_PAIRS = 20
_MAY_DIFFER = frozenset({"budget", "until", "patience", "trainer"})  # settings without effect on the updates that two runs have in common
_DECIDING = [rule for rule in RULES if (LOSS in rule.confounds or rule.key == "global_batch_size") and rule.key not in _MAY_DIFFER]


@dataclass(frozen=True, slots=True)
class LossAgreement:
    """Agreement of the losses of two runs."""

    run: str
    other: str
    updates: int  # common to both
    identical: bool
    largest: float  # largest relative difference
    parts_at: int | None  # first update, from 1, with a difference above `EQUAL_WITHIN`, if any
    losses: tuple[float, float] | None  # of both at that update


def loss_agreements(runs: Sequence[Run]) -> list[LossAgreement]:
    """Return how sync runs agree with the first one of equal loss settings and seed."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if run.summary["mode"] == "sync" and not _changed_course(run):
            groups.setdefault(tuple(rule.value(run) for rule in _DECIDING), []).append(run)
    found: list[LossAgreement] = []
    for first, *others in groups.values():
        held = others[: MOST_PAIRS - len(found)]
        losses = first.step_series().loss if held else np.zeros(0, np.float32)
        agreements = [_agreement(first.name, losses, other) for other in held]
        found += [agreement for agreement in agreements if agreement is not None]
    return found


def _changed_course(run: Run) -> bool:
    """Return whether a resume changed loss settings: the job has only the last ones."""
    batch = {"global_batch_size", "accumulate"}
    if run.job.get("global_batch_size") is None:
        batch |= {"batch_size", "nodes", "procs_per_node"}
    return not batch.union(["mode"], (rule.key for rule in _DECIDING)).isdisjoint(changed_on_resume(run))


def _agreement(name: str, mine: NDArray[np.float32], other: Run) -> LossAgreement | None:
    theirs = other.step_series().loss
    updates = min(len(mine), len(theirs))
    if not updates:
        return None
    ours, its = mine[:updates].astype(np.float64), theirs[:updates].astype(np.float64)
    same = (ours == its) | (np.isnan(ours) & np.isnan(its))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.abs(ours - its) / np.maximum(np.abs(ours), np.abs(its))
    relative = np.where(same, 0.0, np.where(np.isfinite(relative), relative, np.inf))
    apart = np.flatnonzero(relative > EQUAL_WITHIN)
    identical, largest = bool(same.all()), float(relative.max())
    if not len(apart):
        return LossAgreement(other.name, name, updates, identical, largest, None, None)
    first = int(apart[0])
    return LossAgreement(other.name, name, updates, identical, largest, first + 1, (float(ours[first]), float(its[first])))


_MOST_REACHED = 2  # configurations named as reaching a quality


def quality_told(found: ConfigurationSet, *, speed: bool = True) -> list[str]:
    """Return sentences on the best quality and on runs not ranked; `speed`: throughput follows."""
    quality, every = found.quality, found.all
    lines = []
    if quality.leads and quality.best is not None:
        name = one_line(quality.info.label) if quality.info is not None else ""
        interval = quality.interval(quality.best)
        within = "" if interval is None else f"95 % CI {'–'.join(map(_figure(quality.info), interval))}, "
        places = [place for place in range(len(every)) if place in quality.judged and place != quality.best]
        kinds = (
            ("significantly worse:", [place for place in places if place in quality.worse]),
            ("not significantly worse:", [place for place in places if place not in quality.worse | quality.unknown]),
            ("significance unknown against", [place for place in places if place in quality.unknown]),
        )
        rest = [f"{kind} {some_of([f'{every[one].label}, {quality.text(one)}' for one in those])}" for kind, those in kinds if those]
        best = f"{every[quality.best].label} has the best test {name}, {quality.text(quality.best, within)}"
        lines.append(f"{'; '.join([best, *rest])}.")
    if quality.diverged:
        named = [f"{every[place].label} ({why})" for place, why in quality.diverged.items()]
        lines.append(f"Diverged, so not ranked: {some_of(named)}.")
    if not quality.learnt:
        worth = "its first evaluation or on guessing the most common class"
        lines.append(f"No run improved on {worth}{', so only throughput is ranked' * speed}.")
    outside: dict[str, list[str]] = {}
    for place in range(len(every)):
        if quality.leads and place not in quality.judged | quality.diverged.keys():
            outside.setdefault(differing(found.why_not_judged(every[place])), []).append(every[place].label)
    lines += [f"Not ranked, as the quality is not comparable{why}: {some_of(labels)}." for why, labels in outside.items()]
    if quality.undecided and not quality.leads:
        lines.append("The configurations train differently, and their quality is not comparable: no recommendation.")
    elif quality.unknown:
        single = "one run each" if all(len(one.runs) == 1 for one in every) else "too few repeats of other seeds"
        lines.append(f"The configurations train differently, and with {single} the significance is unknown: no recommendation.")
    elif speed and quality.leads and sum(map(found.ranks, every)) == 1 and len(every) > 1:
        lines.append("Throughput is not ranked: no other configuration has comparable quality.")
    return lines


def learnt_told(found: ConfigurationSet) -> list[str]:
    """Return a sentence on the best and the worst quality, if comparable and without target."""
    quality, every = found.quality, found.all
    runs = [run for one in every for run in one.runs]
    info = quality.info
    if len(every) < 2 or info is None or any(run.summary.get("target") is not None or run.summary.get("synthetic") for run in runs):
        return []
    places = [place for place in range(len(every)) if place not in quality.diverged]
    means = {place: mean for place in places if (mean := quality.mean(place)) is not None and place in quality.judged - quality.idle}
    if len(means) < 2 or (len(means) < len(places) and not quality.leads):
        return []
    ordered = sorted(means, key=means.__getitem__, reverse=info.better == "higher")
    best, worst = ordered[0], ordered[-1]
    name, shown = one_line(info.label), _figure(info)
    if means[best] == means[worst]:
        return [f"Final test {name}: {shown(means[best])} in all configurations."]
    lowest = (min if info.better == "higher" else max)(value for place in means for value in quality.values[place])
    until = f"--until '{info.name}{_that_all_reach(info, lowest)}'"
    if quality.leads:
        repeats = "all repeats of " * any(len(quality.values[place]) > 1 for place in means)
        reached = f"{len(means)} configurations" if len(means) > _MOST_REACHED else " and ".join(every[place].label for place in ordered)
        return [f"Rerun with {until}, which {repeats}{reached} reached, to compare time to {name}."]
    both = f"best {quality.text(best)} with {every[best].label}, worst {quality.text(worst)} with {every[worst].label}"
    return [f"Final test {name}: {both}. Rerun with {until}, which all runs reached, to compare time to {name}."]


def _figure(info: MetricInfo | None) -> Callable[[float], str]:
    return partial(figure_text, "" if info is None else info.name)


def _that_all_reach(info: MetricInfo, worst: float) -> str:
    """Return a target of two digits that the worst value reaches: ``>=0.81``."""
    unit = (10.0 ** (math.floor(math.log10(abs(worst))) - 1) if worst else 1.0) or abs(worst)
    if info.better == "higher":
        return f">={math.floor(worst / unit) * unit:.6g}"
    return f"<={math.ceil(worst / unit) * unit:.6g}"


MOST_PAIRS_TOLD = 2  # more pairs are only counted


def agreements_told(found: Sequence[LossAgreement]) -> list[str]:
    """Return the agreement of pairs of runs as sentences; many pairs are grouped."""
    if len(found) <= MOST_PAIRS_TOLD:
        return [_agreement_told(one) for one in found]
    same = [one for one in found if one.parts_at is None and one.identical]
    near = [one for one in found if one.parts_at is None and not one.identical]
    parts = [one for one in found if one.parts_at is not None]
    of = f"of {counted(len(found), 'pair')} of runs"
    told = []
    if same:
        told.append(f"{len(same)} {of}: bitwise identical over {_updates(same)}.")
    if near:
        difference = f"(largest difference {max(one.largest for one in near):.1e})"
        told.append(f"{len(near)} {of} agree within {EQUAL_WITHIN:.2%} over {_updates(near)} {difference}.")
    if len(parts) <= MOST_PAIRS_TOLD:
        return [*told, *(_agreement_told(one) for one in parts)]
    places = sorted(one.parts_at or 0 for one in parts)
    last = "" if places[0] == places[-1] else f" to {places[-1] - 1:,}"
    return [*told, f"{len(parts)} {of} of one seed agree within {EQUAL_WITHIN:.2%} up to update {places[0] - 1:,}{last}."]


def _updates(found: Sequence[LossAgreement]) -> str:
    counts = sorted(one.updates for one in found)
    return counted(counts[0], "update") if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,} updates"


def _agreement_told(one: LossAgreement) -> str:
    pair = f"{one.run} and {one.other}"
    over = f"over {counted(one.updates, 'update')}"
    if one.identical:
        return f"{pair}: bitwise identical {over}."
    if one.parts_at is None or one.losses is None:
        return f"{pair} agree within {EQUAL_WITHIN:.2%} {over} (largest difference {one.largest:.1e})."
    mine, theirs = one.losses
    told = f"({number_text(theirs, 6)} and {number_text(mine, 6)})"
    if one.parts_at == 1:
        return f"{pair} differ from the first update on {told}."
    return f"{pair} agree within {EQUAL_WITHIN:.2%} until they diverge at update {one.parts_at:,} of {one.updates:,} {told}."
