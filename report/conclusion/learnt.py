"""Sentences about what configurations have learnt: which is best in quality, which diverged, and a target that would compare them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ...core.untrusted.console import one_line
from ...metrics.base import MetricInfo
from ...records.text.numbers import figure_text
from ..comparison.names import some_of
from .number_words import differing
from .set_ups import SetUps

__all__ = ["learnt_told", "quality_told"]

_MOST_REACHED = 2
"""Configurations that are named as those that reached a quality."""


def quality_told(found: SetUps, *, speed: bool = True) -> list[str]:
    """Return what is to be said of quality before any speed: the best where quality leads, and what has diverged or learnt nothing.

    `speed`: whether a ranking by speed follows.
    """
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


def learnt_told(found: SetUps) -> list[str]:
    """Return a sentence on the best and the worst by their last evaluation; none where there is a target, or nothing to learn.

    Only set-ups that can be compared in what they have learnt are, and only where that is all that have not diverged.
    """
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
    """Return a target that the worst set-up reached too, in two digits: ``>=0.81``."""
    unit = (10.0 ** (math.floor(math.log10(abs(worst))) - 1) if worst else 1.0) or abs(worst)
    if info.better == "higher":
        return f">={math.floor(worst / unit) * unit:.6g}"
    return f"<={math.ceil(worst / unit) * unit:.6g}"
