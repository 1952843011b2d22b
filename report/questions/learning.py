"""Does the test loss still fall, is it flat, or does the run overfit? What `learning_progress` says of the records of a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...metrics import LOSS
from ...records.schema import EvalRecord
from ...records.text.numbers import figure_text
from ..catalog.divergence import diverged
from ..catalog.run import Run
from ..catalog.summary_rows import number
from ..catalog.translations import Searched, scored_at_the_end
from ..series.arrays import Floats, StepSeries
from .answer import Answer, digits3
from .learning_progress import CHANCE, LEAST_EVALUATIONS, NOTABLE, Learning, judge_curves

__all__ = ["learning"]

_WORDS = {
    "improving": "still falling",
    "flat": "flat",
    "rising": "rising",
    "overfitting": "overfitting",
    "worsening": "getting worse",
    "unclear": "unclear",
}


def learning(run: Run, series: StepSeries) -> Answer | None:
    """Return the verdict on the curves; None where nothing was ever evaluated on the test split."""
    tests = _in_order(run.tests)
    if not tests:
        return None
    losses = np.array([record.loss for record in tests], np.float64)
    trained = _train_losses(series, [record.step for record in tests])
    found = judge_curves(losses, trained)
    headline = run.metrics[0]
    best = None if found.smoothed_best_index is None else tests[int(np.argmin(losses))]
    figures: dict[str, Any] = {
        **found.to_json(),
        "best_step": None if best is None else best.step,
        "first_loss": tests[0].loss,
        "best_loss": None if best is None else best.loss,
        "last_loss": tests[-1].loss,
        "last_train_loss": None if np.isnan(trained[-1]) else float(trained[-1]),
        "headline": headline.name,
        "last_headline": tests[-1].figure(headline.name),
        "headline_at_the_end": _at_the_end(run),
    }
    text = _text(run, found, tests, losses, trained)
    if headline.name != LOSS.name:
        text += f"; {headline.label} {figure_text(headline.name, tests[-1].figure(headline.name))}{_search(run)}"
    return Answer("learning", "learning", text, figures)


def _at_the_end(run: Run) -> float | None:
    """Return the headline metric of the translations at the run's end; None where it is none of theirs, or there were none."""
    headline = run.metrics[0]
    return number(run.summary["translated"][headline.name]) if headline in run.metrics_at_the_end else None


def _search(run: Run) -> str:
    """Say how the headline metric came about where it is one of translations, and what it is at the run's end."""
    if run.metrics[0].name not in run.translation_metrics:
        return ""
    training, end = Searched.while_training([run]), Searched.of([scored_at_the_end(run)])
    final = _at_the_end(run)
    return training.in_brackets() + (
        "" if final is None else f", at the end {figure_text(run.metrics[0].name, final)}{end.in_brackets('sentences')}"
    )


def _in_order(tests: list[EvalRecord]) -> list[EvalRecord]:
    """Return the evaluations in the order of their steps, of one step the last; a run that goes on may evaluate its beginning again."""
    return [record for _, record in sorted({record.step: record for record in tests}.items())]


def _train_losses(series: StepSeries, steps: list[int]) -> Floats:
    """Return the mean training loss of the updates since the evaluation before, for each evaluation; NaN where not known or not finite."""
    found, before = [], 0
    bounds = np.searchsorted(series.step, steps)
    for bound in bounds:
        losses = series.loss[before:bound].astype(np.float64)
        found.append(float(losses.mean()) if len(losses) and np.all(np.isfinite(losses)) else np.nan)
        before = int(bound)
    return np.array(found, np.float64)


def _text(run: Run, found: Learning, tests: list[EvalRecord], losses: Floats, trained: Floats) -> str:
    word = _WORDS[found.state]
    if found.smoothed_best_index is None or found.recent is None:
        fallen = diverged(run.summary)
        why = found.reason if fallen is None else "the loss is not finite"
        hint = " (--eval-every evaluates more often)" if found.evaluations < LEAST_EVALUATIONS else ""
        return f"{word}: {why}{hint}; test loss {digits3(tests[-1].loss)}"
    if found.state in ("overfitting", "worsening"):
        best = found.smoothed_best_index
        train = f"the training loss (means between evaluations) went from {digits3(trained[best])} to {digits3(trained[-1])}"
        return (
            f"{word}: test loss {digits3(tests[-1].loss)}, {digits3(found.rise)} above its best around update {tests[best].step:,} "
            f"(noise {digits3(found.noise)}), {found.evaluations - 1 - best} evaluations ago; {train}"
        )
    since = len(tests) - found.recent
    train = f"training loss {digits3(trained[since])} → {digits3(trained[-1])} (means between evaluations)"
    verb = "fell" if (found.change or 0.0) < 0 else "rose"
    certain = f"{verb} by {digits3(abs(found.change or 0.0))} ± {digits3(found.change_error)}"
    over = f"over the last {found.recent} of {len(tests)} evaluations"
    return f"{word}: test loss {digits3(tests[-1].loss)}, which {certain} {over}{_how_certain(found)}; {train}"


def _how_certain(found: Learning) -> str:
    """Say why a change is none, or may be none, where its figures alone do not."""
    if found.state == "unclear":
        errors = f"{found.standard_errors or 0.0:.1f} standard errors, which may be chance"
        return f": {errors}; more updates or evaluations would show (--steps, --eval-every)"
    certain = found.change and abs(found.change) >= CHANCE * (found.change_error or 0.0)
    return f": less than {NOTABLE:.0%} of its total change" if found.state == "flat" and certain else ""
