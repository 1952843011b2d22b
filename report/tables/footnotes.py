"""The sentences above and below the tables of a comparison: caveats, and what marks mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..catalog.cpu_starvation import contention_judged, cpu_starvation
from ..comparison.comparability import Comparability, Difference
from ..comparison.comparison import Comparison
from ..comparison.factors import ALL, GROUPS, RULES, STEPS, WORK
from ..comparison.names import setting_text, some_of
from .columns import MARK, Column
from .comparison_tables import TOO_FAST
from .run_tables import ACROSS_MODES, SYNTHETIC

__all__ = ["above", "below", "not_comparable"]

_MOST_VALUES = 5

_USUAL = frozenset(rule.key for rule in RULES if rule.independent)

_SAME = "data, seeds, precision, threads, machine, software versions, optimizer and schedule, augmentation, budget, evaluations and network"


_SAID_BY = {"workers": ("nodes",), "update_examples": ("global_batch_size", "batch_size")}
"""Settings that need not be named where others beside them have the same values."""


def above(comparison: Comparison) -> list[str]:
    """Return what is compared and what else is not alike, a line each; of a single row what is wrong with it."""
    copies = [f"Copies of one run, which count once: {', '.join(names)}." for names in comparison.copies]
    if len(comparison.entries) < 2:
        return [*copies, *(_fault(fault, comparison.comparability) for fault in comparison.comparability.faults)]
    return [*copies, *_differences(comparison)]


def _differences(comparison: Comparison) -> list[str]:
    comparability = comparison.comparability
    values = {one.key: one.values for one in comparability.independent}
    independent = [one for one in comparability.independent if not any(one.values == values.get(key) for key in _SAID_BY.get(one.key, ()))]
    lines = [f"Compared: {'; '.join(_named(one) for one in independent)}."] if independent else []
    for one in comparability.independent:
        if one.key in ("mode", "update_examples"):
            lines.append(f"  {one.label}: {one.why}.")
    if comparability.beside:
        lines.append(f"Differences without effect on the figures: {'; '.join(_named(one) for one in comparability.beside)}.")
    faults = comparability.faults
    if faults:
        lines += ["Confounding differences:", *(f"  {_fault(fault, comparability)}" for fault in faults)]
    elif not comparability.unrecorded:
        told = "" if any(one.key not in _USUAL for one in comparability.independent) else f": {_SAME} are the same"
        lines.append(f"{'Nothing else differs' if lines else 'Nothing differs'}{told}.")
    else:
        lines.append(f"No {'other ' if lines else ''}difference is known.")
    if comparability.unrecorded:
        lines.append(f"Not recorded, so possibly different: {_unrecorded(comparison)}.")
    return lines


def below(comparison: Comparison, columns: Sequence[Column] = (), *, side_by_side: bool = False) -> list[str]:
    """Return the explanations of what stands in the tables, a paragraph each.

    With `columns` (figures that were asked for) what concerns none of them is left out. `side_by_side`: whether a run has a column.
    """
    lines = []
    shown = {one.group for one in columns} if columns else set(GROUPS)
    if reasons := not_comparable(comparison, shown):
        lines.append(f"{MARK} not comparable with {comparison.entries[0].label}: {reasons}.")
    folded = [entry for entry in comparison.entries if len(entry.runs) > 1]
    if folded:
        counts = {len(entry.runs) for entry in comparison.entries}
        every = len(counts) == 1 and not any(entry.left_out or entry.counts for entry in folded)
        place = "column" if side_by_side else "row"
        which = f"Each {place} is the mean of {counts.pop()} repeats" if every else f"A {place} of several runs has their mean"
        lines.append(
            f"{which} ± half its 95 % confidence interval (trainer compare --no-fold keeps repeats apart). "
            "The conclusion has geometric means of speeds and times."
        )
    contended = [run.name for entry in folded if entry.counts for run in entry.runs if cpu_starvation(run.summary) is not None]
    if contended and not shown.isdisjoint(WORK):
        names = some_of(contended)
        lines.append(f"(n=…): the mean is over n runs; CPU contention from other programs invalidates the speed and times of {names}.")
    unjudged = [run.name for run in comparison.runs if not contention_judged(run.summary)]
    if unjudged and not shown.isdisjoint(WORK):
        lines.append(f"CPU contention was not measured (run under 2 s, or no samples): {some_of(unjudged)}.")
    for entry in folded:
        if entry.left_out:
            lines.append(f"{entry.label}: the fastest and the slowest are excluded ({', '.join(entry.left_out)}).")
    if comparison.fits_neither and not columns:
        names = "; ".join(comparison.entries[index].label for index in comparison.fits_neither)
        lines.append(f"In no scaling series, as no other number of nodes has the same global batch or batch per worker: {names}.")
    if any(point.too_fast for series in comparison.scaling or () for point in series.points) and not columns:
        lines.append(f"{TOO_FAST} significantly above 100 %, so a measurement is wrong or another advantage helped; measure both again.")
    modes = {run.summary["mode"] for run in comparison.runs}
    if len(modes) > 1 and (STEPS in shown or any(one.key == "steps" for one in columns)):
        lines.append(ACROSS_MODES)
    if any(run.summary.get("synthetic") for run in comparison.runs):
        lines.append(SYNTHETIC)
    return lines


def _named(one: Difference) -> str:
    return f"{one.label} {_values(one)}"


def _values(one: Difference) -> str:
    """Return the different values in the order of the rows; of many, the first and the last."""
    found = list(dict.fromkeys(value for value in one.values if value is not None))
    if len(found) > _MOST_VALUES:
        found = [*found[: _MOST_VALUES - 1], "…", found[-1]]
    return ", ".join(found)


def _by_rows(one: Difference, comparability: Comparability) -> str:
    """Return the different values, each with the rows that have it, called by a compared setting where that tells them apart."""
    known = list(dict.fromkeys(value for value in one.values if value is not None))
    names = comparability.names
    for axis in comparability.independent if None not in one.values else ():  # what is wrong with single rows is of no setting
        if None not in axis.values and len(set(zip(axis.values, one.values, strict=True))) == len(set(axis.values)):
            names = [setting_text(axis.label, str(value)) for value in axis.values]
            break
    if len(one.values) < 2 or len(set(names)) > _MOST_VALUES:
        return _values(one)
    holders = {value: dict.fromkeys(name for name, own in zip(names, one.values, strict=True) if own == value) for value in known}
    return "; ".join(f"{' and '.join(those)}{f': {value}' * (value != 'yes')}" for value, those in holders.items())


def _fault(one: Difference, comparability: Comparability) -> str:
    told = f"{one.label} ({_by_rows(one, comparability)})"
    names = comparability.called(one.confounds)
    if not names:
        return f"{told}: {one.why}."
    figures = "all figures" if set(one.confounds) == ALL else _enumerated(names)
    return f"{told}: {figures} {'is' if len(names) == 1 and names[0] != 'resources' else 'are'} not comparable; {one.why}."


def _enumerated(words: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def not_comparable(comparison: Comparison, shown: Collection[str | None]) -> str:
    """Return each kind of figures among those `shown` that carries a mark, with the settings that are to blame."""
    marked = {group for marks in comparison.marks for group in marks if group in shown}
    differences = [*comparison.comparability.independent, *comparison.comparability.faults]
    reasons: dict[str, list[str]] = {}
    for group in GROUPS:
        if group in marked:
            why = ", ".join(one.label for one in differences if group in one.confounds)
            reasons.setdefault(why, []).extend(comparison.comparability.called([group]))  # none of a kind that no run has
    reasons = {why: groups for why, groups in reasons.items() if groups}
    return "; ".join(f"{', '.join(groups)} ({why})" for why, groups in reasons.items())


def _unrecorded(comparison: Comparison) -> str:
    every = len(comparison.entries)
    by_runs: dict[Sequence[str], list[str]] = {}
    for label, names in comparison.comparability.unrecorded.items():
        by_runs.setdefault(tuple(names), []).append(label)
    return "; ".join(f"{', '.join(labels)} of {'all' if len(names) == every else ' and '.join(names)}" for names, labels in by_runs.items())
