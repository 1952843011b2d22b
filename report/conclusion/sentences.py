"""The conclusion in words: the same sentences on a terminal, in a page and in a document."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ...core.untrusted.console import one_line
from ...records.text.numbers import duration_text, rate_text, seconds_text
from ..catalog.batches import real_batch
from ..catalog.run import Run
from ..comparison.factors import RULES
from ..comparison.names import some_of
from ..comparison.ratios import MOST_REPEATS_TOLD, USUAL_SCATTER, Ratio, geometric_mean
from ..diagnosis.verdict import Explanation
from ..diagnosis.words import NAMES, percent
from .axis import AxisVerdict
from .cautions import cautions
from .conclusion import Best, Conclusion, Limit
from .learnt import learnt_told, quality_told
from .loss_sentences import agreements_told
from .number_words import counted, interval_text, ratio_text, times_text
from .set_ups import SPEED_FIGURE, Figure, SetUp, SetUps, shown, value_text
from .set_ups import TARGET_FIGURE as TARGET

__all__ = ["AxisLine", "Told", "held_back", "shared_settings", "told"]

SHARED = ("model", "data", "backend", "mode", "nodes", "global_batch_size")
"""Settings that the head names where all set-ups have the same."""


@dataclass(frozen=True, slots=True)
class AxisLine:
    """A line on an axis: its name, what is held against what, the ratio with its interval, and how sure that is."""

    axis: str
    held: str
    ratio: str
    sure: str

    @property
    def sentence(self) -> str:
        """All of it, in one sentence."""
        return f"{self.axis}: {' '.join(filter(None, [self.held, self.ratio]))}{': ' if self.held else ''}{self.sure}."


@dataclass(frozen=True, slots=True)
class Told:
    """The conclusion: `head` says what was compared, `best` which set-up is best, `axes` by how much along each; then the rest.

    `learnt` is empty where a target says what is good enough.
    """

    head: str
    best: tuple[str, ...]
    axes: tuple[AxisLine, ...]
    learnt: tuple[str, ...]
    why: tuple[str, ...]
    next: tuple[str, ...]
    losses: tuple[str, ...]
    mind: tuple[str, ...]

    @property
    def named(self) -> list[tuple[str, tuple[str, ...]]]:
        """What stands below the axes: what each part is called, and its sentences, of those that have any."""
        parts = (
            ("Quality", self.learnt),
            ("Bottleneck", self.why),
            ("Recommendation", self.next),
            ("Loss agreement", self.losses),
            ("Caveats", self.mind),
        )
        return [(name, sentences) for name, sentences in parts if sentences]

    @property
    def sentences(self) -> list[str]:
        """Everything, a sentence each."""
        below = [sentence for _, sentences in self.named for sentence in sentences]
        return [self.head, *self.best, *(line.sentence for line in self.axes), *below]


def told(conclusion: Conclusion) -> Told:
    """Return a conclusion in words."""
    unrepeated, many = _unrepeated(conclusion), len(conclusion.set_ups.all)
    speed = SPEED_FIGURE in conclusion.figures
    best = quality_told(conclusion.set_ups, speed=speed)
    advised = max((len(one.runs) for one in conclusion.set_ups.all), default=0) < _USUAL_REPEATS
    restated = {id(one): verdict for one in conclusion.best for verdict in conclusion.verdicts if _restates(verdict, one)}
    best += [_best(one, restated.get(id(one)), unrepeated, many, advised) for one in conclusion.best] or (
        [_nothing(conclusion)] if speed and not _speed_not_ranked(conclusion) else []
    )
    best += _missed(conclusion) if TARGET in conclusion.figures else []
    by_target = {one.axis for one in conclusion.verdicts if one.figure == TARGET.key and one.ratio is not None}  # what counts there
    lines = [
        _axis_line(one, unrepeated, advised)
        for one in conclusion.verdicts
        if one not in restated.values()
        and not (one.figure == SPEED_FIGURE.key and one.axis in by_target)
        and not _told_of_quality(one, conclusion.set_ups)
    ]
    return Told(
        one_line(_head(conclusion)),
        _lines(best),
        tuple(AxisLine(*map(one_line, (line.axis, line.held, line.ratio, line.sure))) for line in lines),
        _lines(learnt_told(conclusion.set_ups)),
        _lines(_limits(conclusion.limits)),
        _lines(_next(conclusion)),
        _lines(agreements_told(conclusion.losses)),
        _lines(cautions(conclusion) if conclusion.figures else []),
    )


def _lines(sentences: Iterable[str]) -> tuple[str, ...]:
    """Return each sentence on one line, whatever names the files of a run have in it."""
    return tuple(map(one_line, sentences))


def _speed_not_ranked(conclusion: Conclusion) -> bool:
    """Return whether quality alone decides: one configuration is better than all others."""
    found = conclusion.set_ups
    return found.quality.leads and sum(map(found.ranks, found.all)) == 1


def _nothing(conclusion: Conclusion) -> str:
    """Say why no configuration is the best by speed."""
    found = conclusion.set_ups
    if len(found.all) == 1:
        speeds = found.all[0].figures(SPEED_FIGURE)
        speed = f", with a throughput of {_rate(geometric_mean(speeds))} examples/s (n = {len(speeds)})" if speeds else ""
        return f"There is only one configuration{speed}."
    if found.without_speed:
        names = some_of([run.name for run in found.without_speed])
        return f"Throughput is not compared: CPU contention from other programs leaves no two configurations to compare; repeat {names}."
    return "No winner: no two configurations are comparable."


def _unrepeated(conclusion: Conclusion) -> str:
    """Return what is to be said where the scatter is not known."""
    counts = [len(one.runs) for one in conclusion.set_ups.all]
    if min(counts, default=0) > 1:
        return "CPU contention leaves fewer than two repeats of some"
    return "one run each" if max(counts, default=1) == 1 else "not every configuration has repeats"


_USUAL_REPEATS = 3
"""How many repeats are advised where the scatter is not known."""


def _head(conclusion: Conclusion) -> str:
    every = conclusion.set_ups.all
    runs = sum(len(one.runs) for one in every)
    counts = {len(one.runs) for one in every}
    if not counts:
        return counted(runs, "run")
    repeats = f"{min(counts)} repeats each" if len(counts) == 1 else f"{min(counts)} to {max(counts)} repeats each"
    settings = [one.removesuffix(_SHARING) for one in shared_settings([one.runs[0] for one in every])]  # a caveat says it
    shared = [*settings, "one run each" if counts == {1} else repeats]
    return f"{counted(runs, 'run')}: {', '.join(shared)}"


_SHARING = " that share cores"


def shared_settings(firsts: Sequence[Run], keys: Collection[str] = SHARED) -> list[str]:
    """Return what set-ups, of which each gives a run, have in common of some settings: model and data, nodes, and the others as names."""
    alike: dict[str, str] = {}
    for rule in RULES:
        values = {rule.value(run) for run in firsts}
        if rule.key in keys and len(values) == 1 and None not in values:
            value = values.pop()
            alike[rule.key] = shown(rule, value) if rule.key in ("model", "data") else value_text(rule, value)
    model, data = alike.pop("model", None), alike.pop("data", None)
    found = [f"{model} on {data}"] if model and data else [one for one in (model, data) if one]
    cores = {run.summary.get("nodes_sharing_cores") for run in firsts}
    nodes = alike.pop("nodes", None)
    if nodes:
        found.append(nodes if cores == {1} or None in cores else f"{nodes}{_SHARING}")
    return found + list(alike.values())


# The best -------------------------------------------------------------------------------------------------------------


def _restates(verdict: AxisVerdict, best: Best) -> bool:
    """Return whether a verdict on an axis is about the best and the only other configuration that compares with it."""
    return (
        best.compared == 2
        and not best.left
        and verdict.figure == best.figure.key
        and len(verdict.each) == 1
        and verdict.each[0] == best.over_worst
    )


def _told_of_quality(verdict: AxisVerdict, found: SetUps) -> bool:
    """Return whether the sentences on quality say why no two values of an axis are ranked."""
    axis = next(one for one in found.axes if one.key == verdict.axis)
    groups = [group for group in found.strata(axis) if len(group) > 1]
    return found.quality.leads and bool(groups) and all(sum(map(found.ranks, group)) < 2 for group in groups)


def _best(one: Best, restated: AxisVerdict | None, unrepeated: str, set_ups: int, advised: bool) -> str:
    """Say which configuration is best by a figure; `restated`: the verdict on an axis that would say the same."""
    what = _does(one)
    if one.left:
        what = f"{what}, of {counted(one.compared, 'comparable configuration')}"
    if one.worst is None or one.over_worst is None:
        return f"{one.set_up.label} {what}{'; no other does in every run' if one.figure is TARGET and set_ups > 1 else ''}."
    times = f"{times_text(one.over_worst.ratio)} as fast as {one.worst.label}{_slowest(one)}{_interval(one.over_worst)}"
    significance = _significance(one.over_worst, unrepeated)
    if restated is not None:
        significance = _sure(one.over_worst, restated.repeats, unrepeated, advised)
    return f"{one.set_up.label} {what}{_rivals(one)}: {times}; {significance}."


MOST_RIVALS = 2
"""Set-ups that are named among those which may be as good as the best."""


def _rivals(one: Best) -> str:
    """Say which set-ups the scatter leaves beside the best."""
    if not one.rivals:
        return ""
    rivals = [(other, other.figures(one.figure)) for other in one.rivals[:MOST_RIVALS]]
    named = [f"{other.label} ({_value(one.figure, geometric_mean(values))}, n = {len(values)})" for other, values in rivals]
    more = [f"{len(one.rivals) - MOST_RIVALS} more"] if len(one.rivals) > MOST_RIVALS else []
    return f", not significantly {'before' if one.figure is TARGET else 'more than'} {' and '.join([*named, *more])}"


def _value(figure: Figure, value: float) -> str:
    return duration_text(value) if figure is TARGET else f"{_rate(value)} examples/s"


def _interval(found: Ratio) -> str:
    return "" if found.low is None else f" ({interval_text(ratio_text(found.low), ratio_text(found.high), widened=found.widened)})"


MOST_MISSED = 4
"""Set-ups that are named among those that missed the target."""


def _missed(conclusion: Conclusion) -> list[str]:
    """Say which set-ups did not reach their target in every run, so that they are ranked behind by it."""
    by_goal: dict[str, list[SetUp]] = {}
    for one in conclusion.set_ups.all:
        if one.row.converged is not None and not one.all_reached:
            by_goal.setdefault(one_line(str(one.row.figures["target"])), []).append(one)
    found = []
    for goal, missed in by_goal.items():
        named = [f"{one.label} ({one.row.converged} of {len(one.runs)})" for one in missed[:MOST_MISSED]]
        more = f" and {len(missed) - MOST_MISSED} more" if len(missed) > MOST_MISSED else ""
        every = len(missed) == len(conclusion.set_ups.all)
        what = f"No configuration reached {goal} in every run" if every else f"Not reached in every run ({goal})"
        found.append(f"{what}: {', '.join(named)}{more}.")
    return found


def _slowest(one: Best) -> str:
    return "" if one.compared <= 2 else ", the slowest of them" if one.left else ", the slowest"


def _does(one: Best) -> str:
    within = ""
    if one.interval is not None:
        low, high = map(duration_text if one.figure is TARGET else _rate, one.interval)
        within = f"geometric mean; {interval_text(low, high, widened=one.set_up.contended)}, "
    interval = f" ({within}n = {len(one.set_up.figures(one.figure))})"
    if one.figure is TARGET:
        goal = one_line(str(one.set_up.row.figures["target"]))
        return f"reaches {goal} first, after {duration_text(one.value)}{interval}"
    return f"has the highest throughput, {_rate(one.value)} examples/s{interval}"


def _rate(value: float) -> str:
    return rate_text(value).removesuffix("/s")


UNJUDGED = "CPU contention was not measured in every run"


def _significance(found: Ratio, unrepeated: str) -> str:
    if not found.known:
        return f"significance unknown ({unrepeated if found.low is None else UNJUDGED})"
    if found.open_by_contention:
        return "not significant, as CPU contention may explain it"
    return "significant" if found.sure else "not significant"


# The axes -------------------------------------------------------------------------------------------------------------


def _axis_line(one: AxisVerdict, unrepeated: str, advised: bool) -> AxisLine:
    by = "in time to target" if one.figure == TARGET.key else "in throughput"
    if one.ratio is None:
        return AxisLine(one.label, "", "", f"{by.removeprefix('in ')} not ranked, as {one.why_not}")
    last = "" if one.over_last is None else f"; {one.winner} over {one.last}: {times_text(one.over_last.ratio)}"
    sure = "depends on other settings" if one.depends else _sure(one.ratio, one.repeats, unrepeated, advised)
    return AxisLine(
        one.label,
        f"{one.winner} over {one.other}",
        f"{times_text(one.ratio.ratio)}{_interval(one.ratio)} {by}",
        f"{sure}{_opposed(one)}{last}",
    )


def _sure(found: Ratio, repeats: int | None, unrepeated: str, advised: bool) -> str:
    """Return the significance of a ratio; `advised`: whether repeats are advised where there are too few to know."""
    significance = _significance(found, unrepeated)
    if found.low is not None and not found.judged:
        return f"{significance}: use runs of a few seconds"
    if not found.known:
        usual = f"; runs of one job differ by up to {USUAL_SCATTER:.0%}" if abs(found.ratio - 1) < USUAL_SCATTER else ""
        return f"{significance}{usual}{f'; use --repeats {_USUAL_REPEATS}' * advised}"
    if found.sure:
        return significance
    if found.open_by_contention:
        return f"{significance}; repeat on a quiet machine"
    needed = f"about {repeats} repeats each" if repeats else f"more than {MOST_REPEATS_TOLD} repeats each"
    return f"{significance}; needs {needed}{' without CPU contention' * found.widened}"


def _opposed(one: AxisVerdict) -> str:
    """Say where set-ups point both ways: beyond their scatter, within it, or where that is not known."""
    if one.ratio is None or not one.ratio.opposed:
        return ""
    against: list[str] = []
    alike: list[str] = []
    for where, found in zip(one.where, one.each, strict=True):
        if found.ratio < 1.0:
            (alike if found.known and not found.sure else against).append(f"{where} ({times_text(found.ratio)})")
    said = {"reversed at": against, "not significant at": alike if one.ratio.sure else []}
    return "".join(f"; {words} {', '.join(named)}" for words, named in said.items() if named)


# Why, what next, what to mind -----------------------------------------------------------------------------------------


def _limits(limits: Sequence[Limit]) -> list[str]:
    """Say what holds each back, and what the same number of examples takes with each: fractions of different times do not compare."""
    first = limits[0].set_up.typical_run if limits else None
    batch = None if first is None else first.summary.get("global_batch_size")
    examples = None if first is None or not batch else real_batch(first.job, batch)
    found = []
    for limit in limits:
        speeds = limit.set_up.figures(SPEED_FIGURE)
        takes = f" ({examples:,} examples take {seconds_text(examples / geometric_mean(speeds))})" if examples and speeds else ""
        found.append(f"{limit.set_up.label}: {held_back(limit.explanation)}{takes}.")
    return found


def held_back(found: Explanation) -> str:
    """Return what holds a run back, in a few words: ``communication, 68% of the step time``."""
    if found.verdict == "starved":
        return "CPU contention from other programs"
    if found.verdict == "unknown":
        return "unknown, as the run has no calibration"
    shares = {**found.run_fractions, **found.step_fractions} if found.verdict in found.step_fractions else found.run_fractions
    if found.verdict in shares:
        of = "step" if found.verdict in found.step_fractions else "run"
        return f"{NAMES[found.verdict]}, {percent(shares[found.verdict])} of the {of} time"
    largest = sorted(found.step_fractions.items(), key=lambda item: -item[1])[:2]
    parts = " and ".join(f"{NAMES[name]} {percent(share)}" for name, share in largest)
    return f"no single bottleneck{f', {parts} of the step time' if parts else ''}"


def _next(conclusion: Conclusion) -> list[str]:
    if not conclusion.advice:
        return []
    gains = [
        f"{one.change}, {one.bound} {times_text(one.speedup or 1.0)}{' as fast' * (place == 0)}"
        for place, one in enumerate(conclusion.advice)
    ]
    check = "; check the quality" if any(one.caution for one in conclusion.advice) else ""
    return [f"{conclusion.limits[0].set_up.label}: {'; '.join(gains)} (estimated{check})."]
