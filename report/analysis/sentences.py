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
from ..compare.ratios import MAX_LISTED_REPEATS, USUAL_SCATTER, Ratio, geometric_mean
from ..runs.cpu_starvation import timed_runs
from ..runs.run import Run, real_batch
from .conclusion import AxisRanking, Best, Conclusion, ConfigurationDiagnosis, render_caveats
from .configurations import (
    SPEED_FIGURE,
    ConfigurationSet,
    bare_value_text,
    count_with_noun,
    differences_text,
    interval_text,
    ratio_text,
    times_text,
    value_text,
)
from .configurations import TARGET_FIGURE as TARGET
from .diagnosis_text import bottleneck_text
from .quality import EQUAL_WITHIN, LossAgreement, grouped

_rate = partial(rate_text, unit="")
SHARED = ("model", "data", "backend", "mode", "nodes", "global_batch_size")  # settings in the head if equal for all configurations


@dataclass(frozen=True, slots=True)
class AxisLine:
    """The name of an axis, its compared values, and the ratio with interval and significance."""

    axis: str
    compared: str
    ratio: str
    significance: str

    @property
    def sentence(self) -> str:
        """The line as a sentence."""
        return f"{self.axis}: {' '.join(filter(None, [self.compared, self.ratio]))}{': ' if self.compared else ''}{self.significance}."


@dataclass(frozen=True, slots=True)
class ConclusionText:
    """The sentences of a conclusion, by part."""

    head: str
    best: tuple[str, ...]
    axes: tuple[AxisLine, ...]
    final_metrics: tuple[str, ...]
    bottlenecks: tuple[str, ...]
    recommendations: tuple[str, ...]
    losses: tuple[str, ...]
    caveats: tuple[str, ...]

    @property
    def sections(self) -> list[tuple[str, tuple[str, ...]]]:
        """The parts below the axes that have sentences, with their names."""
        parts = {"Quality": self.final_metrics, "Bottleneck": self.bottlenecks, "Recommendation": self.recommendations}
        parts |= {"Loss agreement": self.losses, "Caveats": self.caveats}
        return [(name, sentences) for name, sentences in parts.items() if sentences]

    @property
    def sentences(self) -> list[str]:
        """All sentences."""
        parts = [sentence for _, sentences in self.sections for sentence in sentences]
        return [self.head, *self.best, *(line.sentence for line in self.axes), *parts]


def render_conclusion(conclusion: Conclusion) -> ConclusionText:
    """Return the sentences of a conclusion."""
    configs = conclusion.configurations
    unrepeated, many = _unrepeated(configs), len(configs.all)
    speed = SPEED_FIGURE in conclusion.figures
    best = [*render_quality(configs, speed=speed)]
    advised = max((len(config.runs) for config in configs.all), default=0) < _USUAL_REPEATS
    restated = {id(entry): verdict for entry in conclusion.best for verdict in conclusion.rankings if _is_restated(verdict, entry)}
    best += [_best_sentence(entry, restated.get(id(entry)), unrepeated, many, advised) for entry in conclusion.best]
    quality_alone = configs.quality.leads and sum(map(configs.is_ranked, configs.all)) == 1
    best += [_why_no_best(configs)] if speed and not conclusion.best and not quality_alone else []
    best += [*_missed_targets(configs)] if TARGET in conclusion.figures else []
    by_target = {
        ranking.axis for ranking in conclusion.rankings if ranking.figure == TARGET.key and ranking.ratio is not None
    }  # decided there
    lines = [
        _axis_line(ranking, unrepeated, advised)
        for ranking in conclusion.rankings
        if ranking not in restated.values()
        and not (ranking.figure == SPEED_FIGURE.key and ranking.axis in by_target)
        and not _is_decided_by_quality(ranking, configs)
    ]
    return ConclusionText(
        one_line(_head(configs)),
        _lines(best),
        tuple(AxisLine(*map(one_line, (line.axis, line.compared, line.ratio, line.significance))) for line in lines),
        _lines(render_final_metrics(configs)),
        _lines(_bottlenecks(conclusion.diagnoses)),
        _lines(_recommendations(conclusion)),
        _lines(render_agreements(conclusion.losses)),
        _lines(render_caveats(conclusion) if conclusion.figures else []),
    )


def _lines(sentences: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(one_line, sentences))


def _why_no_best(configs: ConfigurationSet) -> str:
    if len(configs.all) == 1:
        speeds = configs.all[0].figures(SPEED_FIGURE)
        speed = f", with a throughput of {_rate(geometric_mean(speeds))} examples/s (n = {len(speeds)})" if speeds else ""
        return f"There is only one configuration{speed}."
    if void := [run.name for config in configs.all if not timed_runs(config.runs) for run in config.runs]:
        contention = "CPU contention from other programs leaves no two configurations to compare"
        return f"Throughput is not compared: {contention}; repeat {some_of(void)}."
    return "No winner: no two configurations are comparable."


def _unrepeated(configs: ConfigurationSet) -> str:
    counts = [len(config.runs) for config in configs.all]
    if min(counts, default=0) > 1:
        return "CPU contention leaves fewer than two repeats of some"
    return "one run each" if max(counts, default=1) == 1 else "not every configuration has repeats"


_USUAL_REPEATS = 3  # advised if the scatter is unknown


def _head(configs: ConfigurationSet) -> str:
    every = configs.all
    runs = sum(len(config.runs) for config in every)
    counts = {len(config.runs) for config in every}
    if not counts:
        return count_with_noun(runs, "run")
    repeats = f"{min(counts)} repeats each" if len(counts) == 1 else f"{min(counts)} to {max(counts)} repeats each"
    settings = [setting.removesuffix(_SHARED_CORES) for setting in shared_settings([setting.runs[0] for setting in every])]  # in a caveat
    shared = [*settings, "one run each" if counts == {1} else repeats]
    return f"{count_with_noun(runs, 'run')}: {', '.join(shared)}"


_SHARED_CORES = " that share cores"


def shared_settings(firsts: Sequence[Run], keys: Collection[str] = SHARED) -> list[str]:
    """Return the common values of settings, given a run of each configuration."""
    shared: dict[str, str] = {}
    for rule in RULES:
        values = {rule.value(run) for run in firsts}
        if rule.key in keys and len(values) == 1 and None not in values:
            value = values.pop()
            shared[rule.key] = bare_value_text(rule, value) if rule.key in ("model", "data") else value_text(rule, value)
    model, data = shared.pop("model", None), shared.pop("data", None)
    parts = [f"{model} on {data}"] if model and data else [name for name in (model, data) if name]
    cores = {run.summary.get("nodes_sharing_cores") for run in firsts}
    nodes = shared.pop("nodes", None)
    if nodes:
        parts.append(nodes if cores == {1} or None in cores else f"{nodes}{_SHARED_CORES}")
    return parts + list(shared.values())


def _is_restated(verdict: AxisRanking, best: Best) -> bool:
    return (
        best.compared == 2
        and not best.left
        and verdict.figure == best.figure.key
        and len(verdict.ratios) == 1
        and verdict.ratios[0] == best.over_worst
    )


def _is_decided_by_quality(verdict: AxisRanking, configs: ConfigurationSet) -> bool:
    axis = next(factor for factor in configs.axes if factor.key == verdict.axis)
    groups = [group for group in configs.strata(axis) if len(group) > 1]
    return configs.quality.leads and bool(groups) and all(sum(map(configs.is_ranked, group)) < 2 for group in groups)


def _best_sentence(best: Best, restated: AxisRanking | None, unrepeated: str, configurations: int, advised: bool) -> str:
    what = _achievement(best)
    if best.left:
        what = f"{what}, of {count_with_noun(best.compared, 'comparable configuration')}"
    if best.worst is None or best.over_worst is None:
        return f"{best.configuration.label} {what}{'; no other does in every run' if best.figure is TARGET and configurations > 1 else ''}."
    slowest = "" if best.compared <= 2 else ", the slowest of them" if best.left else ", the slowest"
    times = f"{times_text(best.over_worst.ratio)} as fast as {best.worst.label}{slowest}{_interval(best.over_worst)}"
    if restated is None:
        significance = _significance(best.over_worst, unrepeated)
    else:
        significance = _significance_and_advice(best.over_worst, restated.repeats, unrepeated, advised)
    return f"{best.configuration.label} {what}{_rivals(best)}: {times}; {significance}."


MAX_RIVALS = 2  # named if not significantly worse than the best


def _rivals(best: Best) -> str:
    if not best.rivals:
        return ""
    rivals = [(rival, rival.figures(best.figure)) for rival in best.rivals[:MAX_RIVALS]]
    show = duration_text if best.figure is TARGET else lambda value: f"{_rate(value)} examples/s"
    named = [f"{rival.label} ({show(geometric_mean(values))}, n = {len(values)})" for rival, values in rivals]
    more = [f"{len(best.rivals) - MAX_RIVALS} more"] if len(best.rivals) > MAX_RIVALS else []
    return f", not significantly {'before' if best.figure is TARGET else 'more than'} {' and '.join([*named, *more])}"


def _interval(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return ""
    return f" ({interval_text(ratio_text(ratio.low), ratio_text(ratio.high), widened=ratio.widened)})"


MAX_MISSED = 4  # named if they missed the target


def _missed_targets(configs: ConfigurationSet) -> Iterator[str]:
    by_goal = grouped((one_line(str(config.row.figures["target"])), config) for config in configs.all if config.missed_target)
    for goal, missed in by_goal.items():
        named = [f"{config.label} ({config.row.converged} of {len(config.runs)})" for config in missed[:MAX_MISSED]]
        more = f" and {len(missed) - MAX_MISSED} more" if len(missed) > MAX_MISSED else ""
        every = len(missed) == len(configs.all)
        what = f"No configuration reached {goal} in every run" if every else f"Not reached in every run ({goal})"
        yield f"{what}: {', '.join(named)}{more}."


def _achievement(best: Best) -> str:
    within = ""
    if best.interval is not None:
        low, high = map(duration_text if best.figure is TARGET else _rate, best.interval)
        within = f"geometric mean; {interval_text(low, high, widened=best.configuration.contended)}, "
    interval = f" ({within}n = {len(best.configuration.figures(best.figure))})"
    if best.figure is TARGET:
        goal = one_line(str(best.configuration.row.figures["target"]))
        return f"reaches {goal} first, after {duration_text(best.value)}{interval}"
    return f"has the highest throughput, {_rate(best.value)} examples/s{interval}"


def _significance(ratio: Ratio, unrepeated: str) -> str:
    if not ratio.known:
        why = unrepeated if ratio.low is None else "CPU contention was not measured in every run"
        return f"significance unknown ({why})"
    if ratio.open_by_contention:
        return "not significant, as CPU contention may explain it"
    return "significant" if ratio.sure else "not significant"


def _axis_line(ranking: AxisRanking, unrepeated: str, advised: bool) -> AxisLine:
    by = "in time to target" if ranking.figure == TARGET.key else "in throughput"
    if ranking.ratio is None:
        return AxisLine(ranking.label, "", "", f"{by.removeprefix('in ')} not ranked, as {ranking.why_not}")
    last = "" if ranking.over_last is None else f"; {ranking.winner} over {ranking.last}: {times_text(ranking.over_last.ratio)}"
    sure = "depends on other settings" if ranking.depends else _significance_and_advice(ranking.ratio, ranking.repeats, unrepeated, advised)
    return AxisLine(
        ranking.label,
        f"{ranking.winner} over {ranking.second}",
        f"{times_text(ranking.ratio.ratio)}{_interval(ranking.ratio)} {by}",
        f"{sure}{_exceptions(ranking)}{last}",
    )


def _significance_and_advice(ratio: Ratio, repeats: int | None, unrepeated: str, advised: bool) -> str:
    significance = _significance(ratio, unrepeated)
    if ratio.low is not None and not ratio.judged:
        return f"{significance}: use runs of a few seconds"
    if not ratio.known:
        usual = f"; runs of one job differ by up to {USUAL_SCATTER:.0%}" if abs(ratio.ratio - 1) < USUAL_SCATTER else ""
        return f"{significance}{usual}{f'; use --repeats {_USUAL_REPEATS}' * advised}"
    if ratio.sure:
        return significance
    if ratio.open_by_contention:
        return f"{significance}; repeat on a quiet machine"
    needed = f"about {repeats} repeats each" if repeats else f"more than {MAX_LISTED_REPEATS} repeats each"
    return f"{significance}; needs {needed}{' without CPU contention' * ratio.widened}"


def _exceptions(ranking: AxisRanking) -> str:
    if ranking.ratio is None or not ranking.ratio.opposed:
        return ""
    against: list[str] = []
    unclear: list[str] = []
    for where, ratio in zip(ranking.where, ranking.ratios, strict=True):
        if ratio.ratio < 1.0:
            (unclear if ratio.known and not ratio.sure else against).append(f"{where} ({times_text(ratio.ratio)})")
    parts = {"reversed at": against, "not significant at": unclear if ranking.ratio.sure else []}
    return "".join(f"; {words} {', '.join(named)}" for words, named in parts.items() if named)


def _bottlenecks(diagnoses: Sequence[ConfigurationDiagnosis]) -> Iterator[str]:
    """Yield each bottleneck with the time of equal examples, as fractions do not compare."""
    first = diagnoses[0].configuration.median_run if diagnoses else None
    batch = None if first is None else first.summary.get("global_batch_size")
    examples = None if first is None or not batch else real_batch(first.job, batch)
    for limit in diagnoses:
        speeds = limit.configuration.figures(SPEED_FIGURE)
        takes = f" ({examples:,} examples take {seconds_text(examples / geometric_mean(speeds))})" if examples and speeds else ""
        yield f"{limit.configuration.label}: {bottleneck_text(limit.diagnosis)}{takes}."


def _recommendations(conclusion: Conclusion) -> list[str]:
    if not conclusion.advice:
        return []
    gains = [
        f"{advice.change}, {advice.bound} {times_text(advice.speedup or 1.0)}{' as fast' * (place == 0)}"
        for place, advice in enumerate(conclusion.advice)
    ]
    check = "; check the quality" if any(advice.caution for advice in conclusion.advice) else ""
    return [f"{conclusion.diagnoses[0].configuration.label}: {'; '.join(gains)} (estimated{check})."]


QUESTION = "Comparison"
_GAP = "  "
_NAME = 16  # width of the column of the parts' names
_PROSE = 120  # maximum line length


def as_text(text: ConclusionText, width: int | None) -> str:
    """Return the conclusion for a terminal of `width` (None: no terminal), and an empty line."""
    width = min(width or _PROSE, _PROSE)
    parts = [_wrapped(f"{QUESTION} of {text.head}", width, "")]
    parts += ["\n".join(_wrapped(sentence, width, _GAP) for sentence in text.best)] if text.best else []
    if text.axes:
        parts.append("\n".join(_axes(text, width)))
    if text.sections:
        parts.append("\n".join(_section_text(name, sentences, width) for name, sentences in text.sections))
    return "\n\n".join(parts) + "\n\n"


def closing_text(text: ConclusionText, width: int | None) -> str:
    """Repeat the best for the end of a terminal's output; empty without a terminal."""
    if width is None or not text.best:
        return ""
    return "\n" + "\n".join(_wrapped(sentence, min(width, _PROSE), "") for sentence in text.best) + "\n"


def _axes(text: ConclusionText, width: int) -> list[str]:
    rows = [(line.axis, line.compared, line.ratio) for line in text.axes]
    widths = [max(map(text_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for line, row in zip(text.axes, rows, strict=True):
        if not line.compared:
            lines.append(_wrapped(f"{line.axis}: {line.significance}", width, _GAP))
            continue
        head = _GAP.join(["", *(cell + " " * (wide - text_width(cell)) for cell, wide in zip(row, widths, strict=True))])
        if text_width(head) + len(_GAP) + text_width(line.significance) <= width:
            lines.append(f"{head}{_GAP}{line.significance}")
        elif text_width(head.rstrip()) <= width:
            lines += [head.rstrip(), _wrapped(line.significance, width, 3 * _GAP)]
        else:
            lines.append(_wrapped(line.sentence.removesuffix("."), width, _GAP))
    return lines


_wrap = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


def _section_text(name: str, sentences: Sequence[str], width: int) -> str:
    lines = [line for sentence in sentences for line in _wrap(sentence, width - _NAME - 2)]
    return "\n".join(f"{_GAP}{name if index == 0 else '':<{_NAME}}{line}" for index, line in enumerate(lines))


def _wrapped(text: str, width: int, indent: str) -> str:
    return "\n".join(_wrap(text, width, initial_indent=indent, subsequent_indent=f"{indent}{_GAP}"))


def as_lines(text: ConclusionText) -> list[str]:
    """Return every sentence as a line."""
    head, *rest = text.sentences
    return [f"{QUESTION} of {head}.", *rest]


_MAX_NAMED = 2  # configurations named as reaching a quality


def render_quality(configs: ConfigurationSet, *, speed: bool = True) -> Iterator[str]:
    """Yield sentences on the best quality and on runs not ranked; `speed`: throughput follows."""
    quality, every = configs.quality, configs.all
    if quality.leads and quality.best is not None:
        name = one_line(quality.info.label) if quality.info is not None else ""
        interval = quality.interval(quality.best)
        within = "" if interval is None else f"95 % CI {'–'.join(map(_figure(quality.info), interval))}, "
        best = [place for place in sorted(quality.judged) if quality.mean(place) == quality.mean(quality.best)]
        rivals = [place for place in sorted(quality.judged) if place not in best]
        kinds = {
            "significantly worse:": [place for place in rivals if place in quality.worse],
            "not significantly worse:": [place for place in rivals if place not in quality.worse | quality.unknown],
            "significance unknown against": [place for place in rivals if place in quality.unknown],
        }
        named = {kind: [f"{every[place].label}, {quality.text(place)}" for place in places] for kind, places in kinds.items()}
        rest = "".join(f"; {kind} {some_of(names)}" for kind, names in named.items() if names)
        whose = f"{some_of([every[place].label for place in best])} {'has' if len(best) == 1 else 'have'}"
        yield f"{whose} the best test {name}, {quality.text(quality.best, within)}{rest}."
    if quality.diverged:
        yield f"Diverged, so not ranked: {some_of([f'{every[place].label} ({why})' for place, why in quality.diverged.items()])}."
    if not quality.learnt:
        worth = "its first evaluation or on guessing the most common class"
        yield f"No run improved on {worth}{', so only throughput is ranked' * speed}."
    unjudged = [config for place, config in enumerate(every) if quality.leads and place not in quality.judged | quality.diverged.keys()]
    for why, labels in grouped((differences_text(configs.why_not_judged(config)), config.label) for config in unjudged).items():
        yield f"Not ranked, as the quality is not comparable{why}: {some_of(labels)}."
    if quality.undecided and not quality.leads:
        yield "The configurations train differently, and their quality is not comparable: no recommendation."
    elif quality.unknown:
        single = "one run each" if all(len(config.runs) == 1 for config in every) else "too few repeats of other seeds"
        yield f"The configurations train differently, and with {single} the significance is unknown: no recommendation."
    elif speed and quality.leads and sum(map(configs.is_ranked, every)) == 1 and len(every) > 1:
        yield "Throughput is not ranked: no other configuration has comparable quality."


def render_final_metrics(configs: ConfigurationSet) -> list[str]:
    """Return a sentence on the best and the worst quality, if comparable and without target."""
    quality, every = configs.quality, configs.all
    runs = [run for config in every for run in config.runs]
    info = quality.info
    if len(every) < 2 or info is None or any(run.summary.get("target") is not None or run.summary.get("synthetic") for run in runs):
        return []
    places = [place for place in range(len(every)) if place not in quality.diverged]
    means = {place: mean for place in places if (mean := quality.mean(place)) is not None and place in quality.judged - quality.idle}
    if len(means) < 2 or (len(means) < len(places) and not quality.leads):
        return []
    ordered = sorted(means, key=means.__getitem__, reverse=info.better == "higher")
    best, worst = ordered[0], ordered[-1]
    name, format_value = one_line(info.label), _figure(info)
    if means[best] == means[worst]:
        return [f"Final test {name}: {format_value(means[best])} in all configurations."]
    lowest = (min if info.better == "higher" else max)(value for place in means for value in quality.values[place])
    until = f"--until '{info.name}{_common_target(info, lowest)}'"
    if quality.leads:
        repeats = "all repeats of " * any(len(quality.values[place]) > 1 for place in means)
        reached = f"{len(means)} configurations" if len(means) > _MAX_NAMED else " and ".join(every[place].label for place in ordered)
        return [f"Rerun with {until}, which {repeats}{reached} reached, to compare time to {name}."]
    both = f"best {quality.text(best)} with {every[best].label}, worst {quality.text(worst)} with {every[worst].label}"
    return [f"Final test {name}: {both}. Rerun with {until}, which all runs reached, to compare time to {name}."]


def _figure(info: MetricInfo | None) -> Callable[[float], str]:
    return partial(figure_text, "" if info is None else info.name)


def _common_target(info: MetricInfo, worst: float) -> str:
    """Return a target of two digits that the worst value reaches: ``>=0.81``."""
    unit = (10.0 ** (math.floor(math.log10(abs(worst))) - 1) if worst else 1.0) or abs(worst)
    if info.better == "higher":
        return f">={math.floor(worst / unit) * unit:.6g}"
    return f"<={math.ceil(worst / unit) * unit:.6g}"


MAX_LISTED_PAIRS = 2  # more pairs are only counted


def render_agreements(pairs: Sequence[LossAgreement]) -> Iterator[str]:
    """Yield the agreement of pairs of runs as sentences; many pairs are grouped."""
    together = len(pairs) > MAX_LISTED_PAIRS
    same = [pair for pair in pairs if together and pair.parts_at is None and pair.identical]
    near = [pair for pair in pairs if together and pair.parts_at is None and not pair.identical]
    parts = [pair for pair in pairs if pair.parts_at is not None or not together]
    of_pairs = f"of {count_with_noun(len(pairs), 'pair')} of runs"
    if same:
        yield f"{len(same)} {of_pairs}: bitwise identical over {_updates(same)}."
    if near:
        difference = f"(largest difference {max(pair.largest for pair in near):.1e})"
        yield f"{len(near)} {of_pairs} agree within {EQUAL_WITHIN:.2%} over {_updates(near)} {difference}."
    if len(parts) <= MAX_LISTED_PAIRS:
        yield from map(_render_agreement, parts)
        return
    places = sorted(pair.parts_at or 0 for pair in parts)
    last = "" if places[0] == places[-1] else f" to {places[-1] - 1:,}"
    yield f"{len(parts)} {of_pairs} of one seed agree within {EQUAL_WITHIN:.2%} up to update {places[0] - 1:,}{last}."


def _updates(pairs: Sequence[LossAgreement]) -> str:
    least, most = (choose(pair.updates for pair in pairs) for choose in (min, max))
    return count_with_noun(least, "update") if least == most else f"{least:,} to {most:,} updates"


def _render_agreement(pair: LossAgreement) -> str:
    runs = f"{pair.run} and {pair.other}"
    over = f"over {count_with_noun(pair.updates, 'update')}"
    if pair.identical:
        return f"{runs}: bitwise identical {over}."
    if pair.parts_at is None or pair.losses is None:
        return f"{runs} agree within {EQUAL_WITHIN:.2%} {over} (largest difference {pair.largest:.1e})."
    mine, theirs = pair.losses
    losses = f"({number_text(theirs, 6)} and {number_text(mine, 6)})"
    if pair.parts_at == 1:
        return f"{runs} differ from the first update on {losses}."
    return f"{runs} agree within {EQUAL_WITHIN:.2%} until they diverge at update {pair.parts_at:,} of {pair.updates:,} {losses}."
