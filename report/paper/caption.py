"""The caption of a paper's table: what all runs share, how many repeats there are, what ± is, and what was left out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ..catalog.run import Run
from ..comparison.comparison import Comparison
from ..comparison.factors import CHOSEN, TARGET, WORK, Factor
from ..comparison.rows import Row
from ..conclusion.sentences import shared_settings
from ..conclusion.set_ups import axes_of
from ..tables.columns import MARK
from ..tables.footnotes import not_comparable
from .latex_text import latex_text

__all__ = ["caption"]

_SHARED = frozenset(
    {"model", "data", "backend", "mode", "nodes", "ps", "global_batch_size"}
    | {"optimizer", "lr", "schedule", "precision", "budget", "until"}
)
"""What a reader has to know of the runs, as far as all of them have it alike."""

_CHOSEN = {rule.key for rule in CHOSEN} - {"seed", "digest", "update_examples", "translation_signature", "translation_signature_at_the_end"}
"""What might be asked of rows that differ: neither their seeds, nor what follows from other settings or is told with the figures."""

_MOST_CHARACTERS = 2000
"""Of one sentence, such as the list of what cannot be compared."""

_SAYS_NOTHING = frozenset({"target none", "constant"})


def caption(
    comparison: Comparison, by: Sequence[Factor], groups: Collection[str | None], disturbed: Sequence[Run], *, intervals: bool
) -> str:
    """Return the caption as LaTeX, of rows that are grouped `by` some settings.

    `groups` are the kinds of figures that the table has, `intervals` says whether it has any interval.
    """
    sentences = _sentences(comparison, by, groups, len(disturbed), intervals=intervals)
    return "\n".join(latex_text(sentence, most=_MOST_CHARACTERS) for sentence in sentences)


def _sentences(
    comparison: Comparison, by: Sequence[Factor], groups: Collection[str | None], disturbed: int, *, intervals: bool
) -> Iterator[str]:
    rows = comparison.entries
    yield from _training(rows)
    if others := _not_shown(comparison, by):
        yield f"The rows differ in {others} as well."
    yield _repeats(rows, intervals=intervals)
    if any(row.converged and not row.all_converged for row in rows) and TARGET in groups:
        yield "In brackets: how many of the repeats reached the target; the time is the mean over those."
    if comparison.scaling:
        kinds = " and ".join(dict.fromkeys(series.kind for series in comparison.scaling))
        yield f"Speed-up ({kinds} scaling) is over the fewest nodes of a series, efficiency that over the ratio of the nodes."
    if any((run.summary.get("nodes_sharing_cores") or 1) > 1 for row in rows for run in row.runs):
        yield "Nodes of one machine share its cores."
    if any(run.summary.get("synthetic") for row in rows for run in row.runs):
        yield "Synthetic data: speed means something, loss and metrics do not."
    if reasons := not_comparable(comparison, groups):
        yield f"{MARK} Not comparable with the first row: {reasons}."
    if disturbed and not WORK.isdisjoint(groups):
        yield f"Speed and times of {disturbed} run{'' if disturbed == 1 else 's'} with CPU contention from other programs are not used."


def _training(rows: Sequence[Row]) -> Iterator[str]:
    firsts = [row.runs[0] for row in rows]
    keys = _SHARED | (set() if len({run.summary["global_batch_size"] for run in firsts}) == 1 else {"batch_size"})
    parts = [_in_prose(part) for part in shared_settings(firsts, keys) if part not in _SAYS_NOTHING]
    if parts:
        first, *others = parts
        yield f"Training: {first}{'; ' if others else ''}{', '.join(others)}."


def _in_prose(part: str) -> str:
    return part.replace(">=", " ≥ ").replace("<=", " ≤ ") if part.startswith("target ") else part


def _not_shown(comparison: Comparison, by: Sequence[Factor]) -> str:
    """Return the chosen settings in which the rows differ along with those that name them, each with its values in the rows' order."""
    shown = {key for axis in axes_of(comparison.entries, by) for key in axis.key.split(" and ")}
    known = comparison.comparability
    values = {one.key: one.values for one in (*known.independent, *known.faults)}
    found = [
        f"{one.label} ({', '.join(dict.fromkeys(value for value in one.values if value is not None))})"
        for one in (*known.independent, *known.faults)
        if one.key in _CHOSEN and one.key not in shown and one.values not in [values.get(key) for key in shown]
    ]
    return " and ".join(part for part in (", ".join(found[:-1]), *found[-1:]) if part)


def _repeats(rows: Sequence[Row], *, intervals: bool) -> str:
    counts = {len(row.runs) for row in rows}
    if counts == {1}:
        return "One run each." if len(rows) > 1 else "One run."
    each = "the runs of each row" if len(counts) > 1 else f"{min(counts):,} repeats{' each' if len(rows) > 1 else ''}"
    seeds = ", which differ by their seeds" if all(len(row.seeds) == len(row.runs) for row in rows) else ""
    if not intervals:
        return f"Means over {each}{seeds}."
    single = "; of a single run there is none" if 1 in counts else ""
    return f"Means over {each}{seeds}; ± is half the width of the 95 % interval of the mean by Student's t{single}."
