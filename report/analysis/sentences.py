"""The conclusion as sentences, for a terminal, a page and a document."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich.cells import cell_len as text_width

from ...core.console import one_line
from ...metrics.base import MetricInfo
from ...records.text import duration_text, figure_text, number_text, rate_text, seconds_text
from ..compare.factors import RULES, some_of
from ..compare.ratios import MAX_REPEATS_TOLD, USUAL_SCATTER, Ratio, geometric_mean
from ..runs.cpu_starvation import timed_runs
from ..runs.run import Run, real_batch
from .conclusion import AxisVerdict, Best, Conclusion, Limit, cautions
from .configurations import (
    SPEED_FIGURE,
    ConfigurationSet,
    counted,
    differing,
    interval_text,
    ratio_text,
    shown,
    times_text,
    value_text,
)
from .configurations import TARGET_FIGURE as TARGET
from .explanation_text import held_back
from .quality import EQUAL_WITHIN, LossAgreement, grouped

_rate = partial(rate_text, unit="")
SHARED = ("model", "data", "backend", "mode", "nodes", "global_batch_size")  # settings in the head if equal for all configurations


@dataclass(frozen=True, slots=True)
class AxisLine:
    """The name of an axis, its compared values, and the ratio with interval and significance."""

    axis: str
    held: str
    ratio: str
    sure: str

    @property
    def sentence(self) -> str:
        """The line as a sentence."""
        return f"{self.axis}: {' '.join(filter(None, [self.held, self.ratio]))}{': ' if self.held else ''}{self.sure}."


@dataclass(frozen=True, slots=True)
class Told:
    """The sentences of a conclusion, by part."""

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
        """The parts below the axes that have sentences, with their names."""
        parts = {"Quality": self.learnt, "Bottleneck": self.why, "Recommendation": self.next}
        parts |= {"Loss agreement": self.losses, "Caveats": self.mind}
        return [(name, sentences) for name, sentences in parts.items() if sentences]

    @property
    def sentences(self) -> list[str]:
        """All sentences."""
        parts = [sentence for _, sentences in self.named for sentence in sentences]
        return [self.head, *self.best, *(line.sentence for line in self.axes), *parts]


def told(conclusion: Conclusion) -> Told:
    """Return the sentences of a conclusion."""
    found = conclusion.configurations
    unrepeated, many = _unrepeated(found), len(found.all)
    speed = SPEED_FIGURE in conclusion.figures
    best = [*quality_told(found, speed=speed)]
    advised = max((len(one.runs) for one in found.all), default=0) < _USUAL_REPEATS
    restated = {id(one): verdict for one in conclusion.best for verdict in conclusion.verdicts if _restates(verdict, one)}
    best += [_best(one, restated.get(id(one)), unrepeated, many, advised) for one in conclusion.best]
    quality_alone = found.quality.leads and sum(map(found.ranks, found.all)) == 1
    best += [_why_no_best(found)] if speed and not conclusion.best and not quality_alone else []
    best += [*_missed(found)] if TARGET in conclusion.figures else []
    by_target = {one.axis for one in conclusion.verdicts if one.figure == TARGET.key and one.ratio is not None}  # decided there
    lines = [
        _axis_line(one, unrepeated, advised)
        for one in conclusion.verdicts
        if one not in restated.values()
        and not (one.figure == SPEED_FIGURE.key and one.axis in by_target)
        and not _told_of_quality(one, found)
    ]
    return Told(
        one_line(_head(found)),
        _lines(best),
        tuple(AxisLine(*map(one_line, (line.axis, line.held, line.ratio, line.sure))) for line in lines),
        _lines(learnt_told(found)),
        _lines(_limits(conclusion.limits)),
        _lines(_next(conclusion)),
        _lines(agreements_told(conclusion.losses)),
        _lines(cautions(conclusion) if conclusion.figures else []),
    )


def _lines(sentences: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(one_line, sentences))


def _why_no_best(found: ConfigurationSet) -> str:
    if len(found.all) == 1:
        speeds = found.all[0].figures(SPEED_FIGURE)
        speed = f", with a throughput of {_rate(geometric_mean(speeds))} examples/s (n = {len(speeds)})" if speeds else ""
        return f"There is only one configuration{speed}."
    if void := [run.name for one in found.all if not timed_runs(one.runs) for run in one.runs]:
        contention = "CPU contention from other programs leaves no two configurations to compare"
        return f"Throughput is not compared: {contention}; repeat {some_of(void)}."
    return "No winner: no two configurations are comparable."


def _unrepeated(found: ConfigurationSet) -> str:
    counts = [len(one.runs) for one in found.all]
    if min(counts, default=0) > 1:
        return "CPU contention leaves fewer than two repeats of some"
    return "one run each" if max(counts, default=1) == 1 else "not every configuration has repeats"


_USUAL_REPEATS = 3  # advised if the scatter is unknown


def _head(found: ConfigurationSet) -> str:
    every = found.all
    runs = sum(len(one.runs) for one in every)
    counts = {len(one.runs) for one in every}
    if not counts:
        return counted(runs, "run")
    repeats = f"{min(counts)} repeats each" if len(counts) == 1 else f"{min(counts)} to {max(counts)} repeats each"
    settings = [one.removesuffix(_SHARING) for one in shared_settings([one.runs[0] for one in every])]  # in a caveat
    shared = [*settings, "one run each" if counts == {1} else repeats]
    return f"{counted(runs, 'run')}: {', '.join(shared)}"


_SHARING = " that share cores"


def shared_settings(firsts: Sequence[Run], keys: Collection[str] = SHARED) -> list[str]:
    """Return the common values of settings, given a run of each configuration."""
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


def _restates(verdict: AxisVerdict, best: Best) -> bool:
    return (
        best.compared == 2
        and not best.left
        and verdict.figure == best.figure.key
        and len(verdict.each) == 1
        and verdict.each[0] == best.over_worst
    )


def _told_of_quality(verdict: AxisVerdict, found: ConfigurationSet) -> bool:
    axis = next(one for one in found.axes if one.key == verdict.axis)
    groups = [group for group in found.strata(axis) if len(group) > 1]
    return found.quality.leads and bool(groups) and all(sum(map(found.ranks, group)) < 2 for group in groups)


def _best(one: Best, restated: AxisVerdict | None, unrepeated: str, configurations: int, advised: bool) -> str:
    what = _does(one)
    if one.left:
        what = f"{what}, of {counted(one.compared, 'comparable configuration')}"
    if one.worst is None or one.over_worst is None:
        return f"{one.configuration.label} {what}{'; no other does in every run' if one.figure is TARGET and configurations > 1 else ''}."
    slowest = "" if one.compared <= 2 else ", the slowest of them" if one.left else ", the slowest"
    times = f"{times_text(one.over_worst.ratio)} as fast as {one.worst.label}{slowest}{_interval(one.over_worst)}"
    if restated is None:
        significance = _significance(one.over_worst, unrepeated)
    else:
        significance = _sure(one.over_worst, restated.repeats, unrepeated, advised)
    return f"{one.configuration.label} {what}{_rivals(one)}: {times}; {significance}."


MAX_RIVALS = 2  # named if not significantly worse than the best


def _rivals(one: Best) -> str:
    if not one.rivals:
        return ""
    rivals = [(other, other.figures(one.figure)) for other in one.rivals[:MAX_RIVALS]]
    show = duration_text if one.figure is TARGET else lambda value: f"{_rate(value)} examples/s"
    named = [f"{other.label} ({show(geometric_mean(values))}, n = {len(values)})" for other, values in rivals]
    more = [f"{len(one.rivals) - MAX_RIVALS} more"] if len(one.rivals) > MAX_RIVALS else []
    return f", not significantly {'before' if one.figure is TARGET else 'more than'} {' and '.join([*named, *more])}"


def _interval(found: Ratio) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" ({interval_text(ratio_text(found.low), ratio_text(found.high), widened=found.widened)})"


MAX_MISSED = 4  # named if they missed the target


def _missed(found: ConfigurationSet) -> Iterator[str]:
    by_goal = grouped((one_line(str(one.row.figures["target"])), one) for one in found.all if one.missed_target)
    for goal, missed in by_goal.items():
        named = [f"{one.label} ({one.row.converged} of {len(one.runs)})" for one in missed[:MAX_MISSED]]
        more = f" and {len(missed) - MAX_MISSED} more" if len(missed) > MAX_MISSED else ""
        every = len(missed) == len(found.all)
        what = f"No configuration reached {goal} in every run" if every else f"Not reached in every run ({goal})"
        yield f"{what}: {', '.join(named)}{more}."


def _does(one: Best) -> str:
    within = ""
    if one.interval is not None:
        low, high = map(duration_text if one.figure is TARGET else _rate, one.interval)
        within = f"geometric mean; {interval_text(low, high, widened=one.configuration.contended)}, "
    interval = f" ({within}n = {len(one.configuration.figures(one.figure))})"
    if one.figure is TARGET:
        goal = one_line(str(one.configuration.row.figures["target"]))
        return f"reaches {goal} first, after {duration_text(one.value)}{interval}"
    return f"has the highest throughput, {_rate(one.value)} examples/s{interval}"


def _significance(found: Ratio, unrepeated: str) -> str:
    if not found.known:
        why = unrepeated if found.low is None else "CPU contention was not measured in every run"
        return f"significance unknown ({why})"
    if found.open_by_contention:
        return "not significant, as CPU contention may explain it"
    return "significant" if found.sure else "not significant"


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
    needed = f"about {repeats} repeats each" if repeats else f"more than {MAX_REPEATS_TOLD} repeats each"
    return f"{significance}; needs {needed}{' without CPU contention' * found.widened}"


def _opposed(one: AxisVerdict) -> str:
    if one.ratio is None or not one.ratio.opposed:
        return ""
    against: list[str] = []
    alike: list[str] = []
    for where, found in zip(one.where, one.each, strict=True):
        if found.ratio < 1.0:
            (alike if found.known and not found.sure else against).append(f"{where} ({times_text(found.ratio)})")
    said = {"reversed at": against, "not significant at": alike if one.ratio.sure else []}
    return "".join(f"; {words} {', '.join(named)}" for words, named in said.items() if named)


def _limits(limits: Sequence[Limit]) -> Iterator[str]:
    """Yield each bottleneck with the time of equal examples, as fractions do not compare."""
    first = limits[0].configuration.typical_run if limits else None
    batch = None if first is None else first.summary.get("global_batch_size")
    examples = None if first is None or not batch else real_batch(first.job, batch)
    for limit in limits:
        speeds = limit.configuration.figures(SPEED_FIGURE)
        takes = f" ({examples:,} examples take {seconds_text(examples / geometric_mean(speeds))})" if examples and speeds else ""
        yield f"{limit.configuration.label}: {held_back(limit.explanation)}{takes}."


def _next(conclusion: Conclusion) -> list[str]:
    if not conclusion.advice:
        return []
    gains = [
        f"{one.change}, {one.bound} {times_text(one.speedup or 1.0)}{' as fast' * (place == 0)}"
        for place, one in enumerate(conclusion.advice)
    ]
    check = "; check the quality" if any(one.caution for one in conclusion.advice) else ""
    return [f"{conclusion.limits[0].configuration.label}: {'; '.join(gains)} (estimated{check})."]


QUESTION = "Comparison"
_GAP = "  "
_NAME = 16  # width of the column of the parts' names
_PROSE = 120  # maximum line length


def as_text(told: Told, width: int | None) -> str:
    """Return the conclusion for a terminal of `width` (None: no terminal), and an empty line."""
    width = min(width or _PROSE, _PROSE)
    parts = [_wrapped(f"{QUESTION} of {told.head}", width, "")]
    parts += ["\n".join(_wrapped(sentence, width, _GAP) for sentence in told.best)] if told.best else []
    if told.axes:
        parts.append("\n".join(_axes(told, width)))
    if told.named:
        parts.append("\n".join(_named(name, sentences, width) for name, sentences in told.named))
    return "\n\n".join(parts) + "\n\n"


def closing_text(told: Told, width: int | None) -> str:
    """Repeat the best for the end of a terminal's output; empty without a terminal."""
    if width is None or not told.best:
        return ""
    return "\n" + "\n".join(_wrapped(sentence, min(width, _PROSE), "") for sentence in told.best) + "\n"


def _axes(told: Told, width: int) -> list[str]:
    rows = [(line.axis, line.held, line.ratio) for line in told.axes]
    widths = [max(map(text_width, column)) for column in zip(*rows, strict=True)]
    found = []
    for line, row in zip(told.axes, rows, strict=True):
        if not line.held:
            found.append(_wrapped(f"{line.axis}: {line.sure}", width, _GAP))
            continue
        head = _GAP.join(["", *(text + " " * (wide - text_width(text)) for text, wide in zip(row, widths, strict=True))])
        if text_width(head) + len(_GAP) + text_width(line.sure) <= width:
            found.append(f"{head}{_GAP}{line.sure}")
        elif text_width(head.rstrip()) <= width:
            found += [head.rstrip(), _wrapped(line.sure, width, 3 * _GAP)]
        else:
            found.append(_wrapped(line.sentence.removesuffix("."), width, _GAP))
    return found


_wrap = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


def _named(name: str, sentences: Sequence[str], width: int) -> str:
    lines = [line for sentence in sentences for line in _wrap(sentence, width - _NAME - 2)]
    return "\n".join(f"{_GAP}{name if index == 0 else '':<{_NAME}}{line}" for index, line in enumerate(lines))


def _wrapped(text: str, width: int, indent: str) -> str:
    return "\n".join(_wrap(text, width, initial_indent=indent, subsequent_indent=f"{indent}{_GAP}"))


def as_lines(told: Told) -> list[str]:
    """Return every sentence as a line."""
    head, *others = told.sentences
    return [f"{QUESTION} of {head}.", *others]


_MAX_REACHED = 2  # configurations named as reaching a quality


def quality_told(found: ConfigurationSet, *, speed: bool = True) -> Iterator[str]:
    """Yield sentences on the best quality and on runs not ranked; `speed`: throughput follows."""
    quality, every = found.quality, found.all
    if quality.leads and quality.best is not None:
        name = one_line(quality.info.label) if quality.info is not None else ""
        interval = quality.interval(quality.best)
        within = "" if interval is None else f"95 % CI {'–'.join(map(_figure(quality.info), interval))}, "
        others = [place for place in sorted(quality.judged) if place != quality.best]
        kinds = {
            "significantly worse:": [place for place in others if place in quality.worse],
            "not significantly worse:": [place for place in others if place not in quality.worse | quality.unknown],
            "significance unknown against": [place for place in others if place in quality.unknown],
        }
        named = {kind: [f"{every[place].label}, {quality.text(place)}" for place in places] for kind, places in kinds.items()}
        rest = "".join(f"; {kind} {some_of(those)}" for kind, those in named.items() if those)
        yield f"{every[quality.best].label} has the best test {name}, {quality.text(quality.best, within)}{rest}."
    if quality.diverged:
        yield f"Diverged, so not ranked: {some_of([f'{every[place].label} ({why})' for place, why in quality.diverged.items()])}."
    if not quality.learnt:
        worth = "its first evaluation or on guessing the most common class"
        yield f"No run improved on {worth}{', so only throughput is ranked' * speed}."
    unjudged = [one for place, one in enumerate(every) if quality.leads and place not in quality.judged | quality.diverged.keys()]
    for why, labels in grouped((differing(found.why_not_judged(one)), one.label) for one in unjudged).items():
        yield f"Not ranked, as the quality is not comparable{why}: {some_of(labels)}."
    if quality.undecided and not quality.leads:
        yield "The configurations train differently, and their quality is not comparable: no recommendation."
    elif quality.unknown:
        single = "one run each" if all(len(one.runs) == 1 for one in every) else "too few repeats of other seeds"
        yield f"The configurations train differently, and with {single} the significance is unknown: no recommendation."
    elif speed and quality.leads and sum(map(found.ranks, every)) == 1 and len(every) > 1:
        yield "Throughput is not ranked: no other configuration has comparable quality."


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
        reached = f"{len(means)} configurations" if len(means) > _MAX_REACHED else " and ".join(every[place].label for place in ordered)
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


MAX_PAIRS_TOLD = 2  # more pairs are only counted


def agreements_told(found: Sequence[LossAgreement]) -> Iterator[str]:
    """Yield the agreement of pairs of runs as sentences; many pairs are grouped."""
    together = len(found) > MAX_PAIRS_TOLD
    same = [one for one in found if together and one.parts_at is None and one.identical]
    near = [one for one in found if together and one.parts_at is None and not one.identical]
    parts = [one for one in found if one.parts_at is not None or not together]
    of = f"of {counted(len(found), 'pair')} of runs"
    if same:
        yield f"{len(same)} {of}: bitwise identical over {_updates(same)}."
    if near:
        difference = f"(largest difference {max(one.largest for one in near):.1e})"
        yield f"{len(near)} {of} agree within {EQUAL_WITHIN:.2%} over {_updates(near)} {difference}."
    if len(parts) <= MAX_PAIRS_TOLD:
        yield from map(_agreement_told, parts)
        return
    places = sorted(one.parts_at or 0 for one in parts)
    last = "" if places[0] == places[-1] else f" to {places[-1] - 1:,}"
    yield f"{len(parts)} {of} of one seed agree within {EQUAL_WITHIN:.2%} up to update {places[0] - 1:,}{last}."


def _updates(found: Sequence[LossAgreement]) -> str:
    least, most = (choose(one.updates for one in found) for choose in (min, max))
    return counted(least, "update") if least == most else f"{least:,} to {most:,} updates"


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
