"""Verdicts on a run's loss curves, its learning rates, training set and checkpoint files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...core.console import one_line
from ...core.update_rules import schedule_text
from ...metrics import LOSS
from ...records.store.schema import EvalRecord
from ...records.summary import read_job
from ...records.text import bytes_text, count_text, figure_text, saving_text
from ..runs.run import Run, diverged, number
from ..runs.series_arrays import Floats, StepSeries
from ..runs.translation_scores import Searched, scored_at_the_end
from .evidence import Answer, digits3

State = Literal["improving", "flat", "rising", "overfitting", "worsening", "unclear"]
MIN_EVALUATIONS = 8  # for a trend and its noise
NOISE_EVALUATIONS = 6  # minimum for the noise, which is that of the later half
RECENT = 0.4  # part of the evaluations whose trend is judged
MIN_RECENT = 4
NOTABLE = 0.01  # minimum change as a part of the gain; less is flat
CERTAIN = 4.0  # standard errors of a certain change; high, as errors from few evaluations have long tails
CHANCE = 2.0  # standard errors below which a change is chance
MAX_SIZE = 1e40  # loss; float32 holds less
RISEN = 0.05  # overfitting: the loss is above its best by this part of the gain


@dataclass(frozen=True, slots=True)
class Learning:
    """A verdict on a run's curves. Losses are means over examples."""

    state: State  # see `assess_curves`
    reason: str
    evaluations: int
    recent: int | None = None  # last evaluations of the trend
    change: float | None = None  # rise of the fitted line over them
    change_error: float | None = None  # standard error
    gain: float | None = None  # fall from the first to the best evaluation, smoothed over three
    rise: float | None = None  # last loss above the best, both smoothed
    noise: float | None = None
    smoothed_best_index: int | None = None  # of the best, from 0
    train_change: float | None = None  # since the best evaluation (overfitting, worsening), else since the trend's beginning

    @property
    def standard_errors(self) -> float | None:
        """The change in standard errors; None if not judged, or without noise."""
        return abs(self.change) / self.change_error if self.change is not None and self.change_error else None


def assess_curves(losses: Floats, train_losses: Floats) -> Learning:
    """Return the verdict on evaluation losses [n] and training losses around them [n].

    Losses are smoothed by medians of three; *gain* is the fall from the first to the lowest. The noise of an evaluation comes from second
    differences, close to 0 for a smooth curve, so that scaled or shifted curves get the same verdict. Overfitting: the last is above the
    lowest by `RISEN` of the gain and `CERTAIN` times its noise, the lowest at least three evaluations ago, and the training loss has fallen
    since; if it has not, or is unknown, worsening. Flat: the recent line changes by less than `NOTABLE` of the gain, or less than `CHANCE`
    standard errors. Improving, rising: by at least `CERTAIN` standard errors; unclear: by fewer, too few evaluations, or some not finite.
    """
    n = len(losses)
    if n < MIN_EVALUATIONS:
        return Learning("unclear", f"{n} evaluation{'s' if n != 1 else ''} of at least {MIN_EVALUATIONS}", n)
    if not np.all(np.abs(losses) <= MAX_SIZE):  # also excludes NaN
        return Learning("unclear", "some evaluations have a loss that is not finite", n)
    smooth = _smoothed(losses)
    best = int(np.argmin(smooth))
    gain, rise = float(smooth[0] - smooth[best]), float(smooth[-1] - smooth[best])
    noise = _noise(losses)
    recent = max(MIN_RECENT, int(np.ceil(RECENT * n)))
    change, unit_error = _line(losses[-recent:])
    error = noise * unit_error
    scale = max(gain, rise)
    # Noise of the difference of two medians of three neighbours; rounding of equal losses counts as noise, too.
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
    middle = np.median(np.stack([values[:-2], values[1:-1], values[2:]]), axis=0)
    return np.concatenate([middle[:1], middle, middle[-1:]])


def _noise(values: Floats) -> float:
    """Return an evaluation's standard deviation: that of second differences is √6 times it."""
    later = values[min(len(values) // 2, len(values) - NOISE_EVALUATIONS) :]
    return float(np.sqrt(np.mean(np.square(np.diff(later, 2))) / 6.0))


def _line(values: Floats) -> tuple[float, float]:
    """Return the rise of the least-squares line, and its error per unit of noise."""
    k = len(values)
    x = np.arange(k) - (k - 1) / 2
    squares = float(x @ x)
    return float(x @ values) / squares * (k - 1), (k - 1) / np.sqrt(squares)


def _rounding(values: Floats) -> float:
    return float(np.max(np.abs(values))) * 1e-6


def _difference(train_losses: Floats, since: int) -> float | None:
    then, now = train_losses[max(0, since - 1) : since + 2], train_losses[-3:]
    change = float(np.median(now)) - float(np.median(then))
    return change if np.isfinite(change) else None


_WORDS = {"improving": "still falling", "worsening": "getting worse"}


def learning(run: Run, series: StepSeries) -> Answer | None:
    """Return the verdict on the curves; None without evaluations on the test split."""
    last_by_step = {record.step: record for record in run.tests}  # a resumed run may evaluate a step again
    tests = [record for _, record in sorted(last_by_step.items())]
    if not tests:
        return None
    losses = np.array([record.loss for record in tests], np.float64)
    trained = _train_losses(series, [record.step for record in tests])
    trend = assess_curves(losses, trained)
    headline = run.metrics[0]
    best = None if trend.smoothed_best_index is None else tests[int(np.argmin(losses))]
    figures: dict[str, Any] = {
        **asdict(trend),
        "best_step": None if best is None else best.step,
        "first_loss": tests[0].loss,
        "best_loss": None if best is None else best.loss,
        "last_loss": tests[-1].loss,
        "last_train_loss": None if np.isnan(trained[-1]) else float(trained[-1]),
        "headline": headline.name,
        "last_headline": tests[-1].figure(headline.name),
        "headline_at_the_end": _at_the_end(run),
    }
    text = _text(run, trend, tests, losses, trained)
    if headline.name != LOSS.name:
        text += f"; {headline.label} {figure_text(headline.name, tests[-1].figure(headline.name))}{_search(run)}"
    return Answer("learning", "learning", text, figures)


def _at_the_end(run: Run) -> float | None:
    headline = run.metrics[0]
    return number(run.summary["translated"][headline.name]) if headline in run.metrics_at_the_end else None


def _search(run: Run) -> str:
    if run.metrics[0].name not in run.translation_metrics:
        return ""
    training, end = Searched.while_training([run]), Searched.from_signatures([scored_at_the_end(run)])
    final = _at_the_end(run)
    return training.in_brackets() + (
        "" if final is None else f", at the end {figure_text(run.metrics[0].name, final)}{end.in_brackets('sentences')}"
    )


def _train_losses(series: StepSeries, steps: list[int]) -> Floats:
    bounds = np.searchsorted(series.step, steps)
    parts = [series.loss[begin:end].astype(np.float64) for begin, end in pairwise([0, *bounds.tolist()])]
    return np.array([part.mean() if len(part) and np.all(np.isfinite(part)) else np.nan for part in parts], np.float64)


def _text(run: Run, trend: Learning, tests: list[EvalRecord], losses: Floats, trained: Floats) -> str:
    word = _WORDS.get(trend.state, trend.state)
    if trend.smoothed_best_index is None or trend.recent is None:
        fallen = diverged(run.summary)
        why = trend.reason if fallen is None else "the loss is not finite"
        hint = " (--eval-every evaluates more often)" if trend.evaluations < MIN_EVALUATIONS else ""
        return f"{word}: {why}{hint}; test loss {digits3(tests[-1].loss)}"
    if trend.state in ("overfitting", "worsening"):
        best = trend.smoothed_best_index
        train = f"the training loss (means between evaluations) went from {digits3(trained[best])} to {digits3(trained[-1])}"
        return (
            f"{word}: test loss {digits3(tests[-1].loss)}, {digits3(trend.rise)} above its best around update {tests[best].step:,} "
            f"(noise {digits3(trend.noise)}), {trend.evaluations - 1 - best} evaluations ago; {train}"
        )
    since = len(tests) - trend.recent
    train = f"training loss {digits3(trained[since])} → {digits3(trained[-1])} (means between evaluations)"
    verb = "fell" if (trend.change or 0.0) < 0 else "rose"
    certain = f"{verb} by {digits3(abs(trend.change or 0.0))} ± {digits3(trend.change_error)}"
    over = f"over the last {trend.recent} of {len(tests)} evaluations"
    return f"{word}: test loss {digits3(tests[-1].loss)}, which {certain} {over}{_how_certain(trend)}; {train}"


def _how_certain(trend: Learning) -> str:
    if trend.state == "unclear":
        errors = f"{trend.standard_errors or 0.0:.1f} standard errors, which may be chance"
        return f": {errors}; more updates or evaluations would show (--steps, --eval-every)"
    certain = trend.change and abs(trend.change) >= CHANCE * (trend.change_error or 0.0)
    return f": less than {NOTABLE:.0%} of its total change" if trend.state == "flat" and certain else ""


MAX_POINTS = 50  # of the learning rates in ``--json``


def learning_rate(run: Run, series: StepSeries) -> Answer | None:
    """Return the learning rates of the updates, and the schedule; None without updates."""
    if series.learning_rate is None:
        raise ValueError("the series was read without its learning rates")
    finite = np.isfinite(series.learning_rate)
    steps, rates = series.step[finite], series.learning_rate[finite]
    if not len(steps):
        return None
    peak, least = int(np.argmax(rates)), int(np.argmin(rates))
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(MAX_POINTS, len(steps))).astype(np.int64))
    why = _why(run)
    figures: dict[str, Any] = {
        "schedule": run.job.get("schedule"),
        "why": why,
        "first": float(rates[0]),
        "last": float(rates[-1]),
        "last_step": int(steps[-1]),
        "peak": float(rates[peak]),
        "peak_step": int(steps[peak]),
        "least": float(rates[least]),
        "least_step": int(steps[least]),
        "course": [[int(steps[index]), float(rates[index])] for index in chosen],
    }
    if rates[peak] == rates[least]:
        course = f"constant {digits3(figures['first'])}"
    else:
        course = (
            f"{digits3(figures['first'])} at first, peak {digits3(figures['peak'])} at update {figures['peak_step'] + 1:,}, "
            f"{digits3(figures['last'])} at update {figures['last_step'] + 1:,}"
        )
    return Answer("learning_rate", "learning rate", one_line(why if why.startswith(course) else f"{course}: {why}"), figures)


def _why(run: Run) -> str:
    total = run.job.get("total_steps")
    try:
        job = read_job(run.job)
    except ValueError:
        return "reason unknown: another version wrote job.json"
    changed = len(run.job.get("segments") or ()) > 1
    text = schedule_text(job, total)
    return f"{text}; these are the settings since the run was resumed" if changed else text


def training_set(run: Run) -> Answer | None:
    """Return the training set, from ``job.json``, if recorded."""
    dataset: Mapping[str, Any] = run.job.get("dataset") or {}
    sizes: Mapping[str, int] = dataset.get("sizes") or {}
    if "train" not in sizes:
        return None
    stored: Mapping[str, Any] = (dataset.get("stored") or {}).get("train") or {}
    amount, elements, text = stored.get("bytes"), stored.get("elements") or {}, bool(dataset.get("vocabulary_sizes"))
    figures = {
        "name": dataset.get("name"),
        "examples": sizes["train"],
        "test_examples": sizes.get("test"),
        "bytes": amount,
        "lines": sizes["train"] * len(elements) if text and elements else None,
        "tokens": dict(elements) if text else None,
        "elements": dict(elements),
        "epochs_trained": run.summary.get("epochs"),
    }
    return Answer("training_set", "training set", one_line(_size_text(figures, text=text)), figures)


def _size_text(figures: Mapping[str, Any], *, text: bool) -> str:
    lines = figures["lines"]
    lines_text = f" ({count_text(lines)} lines)" if lines is not None and lines != figures["examples"] else ""
    parts = [f"{count_text(figures['examples'])} examples{lines_text} of {figures['name'] or 'an unnamed dataset'}"]
    parts.append("size not recorded by the version that wrote it" if figures["bytes"] is None else bytes_text(figures["bytes"]))
    parts += [f"{count_text(number)} {'tokens' if text else 'elements'} of {column}" for column, number in figures["elements"].items()]
    if figures["epochs_trained"] is not None:
        epochs = digits3(figures["epochs_trained"])
        parts.append(f"{epochs} epoch{'s' if epochs != '1' else ''}")
    if figures["test_examples"]:
        parts.append(f"{count_text(figures['test_examples'])} test examples")
    return ", ".join(parts)


MAX_FILES = 1000  # checked of a checkpoint, and of its folder: external folders may have any number
_NAME = re.compile(r"step-(\d{9,30})")  # a checkpoint's folder, by its updates
MAX_FILES_NAMED = 4


def checkpoint_files(run: Run) -> Answer | None:
    """Return the newest checkpoint's files, and the number and bytes of all; None without."""
    sizes = [(path, checkpoint) for path in _newest_first(run.path / "checkpoints") if (checkpoint := _files(path))]
    if not sizes:
        return None
    newest, files = sizes[0]
    saving = (run.summary.get("checkpoints") if run.has_summary else None) or {}
    whole, every = sum(files.values()), sum(sum(checkpoint.values()) for _, checkpoint in sizes)
    figures: dict[str, Any] = {
        "newest": newest.name,
        "files": [{"name": name, "bytes": size} for name, size in files.items()],
        "bytes": whole,
        "kept": len(sizes),
        "kept_bytes": every,
        **{name: saving.get(name) for name in ("stall_seconds", "write_seconds")},
    }
    largest = sorted(files.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{name} {bytes_text(size)}" for name, size in largest[:MAX_FILES_NAMED])
    more = f" and {len(files) - MAX_FILES_NAMED} more" if len(files) > MAX_FILES_NAMED else ""
    cost = f"; {saving_text(saving)}" if saving.get("saved") else ""
    text = f"{newest.name} has {bytes_text(whole)}: {named}{more}; {len(sizes)} kept, {bytes_text(every)} in total{cost}"
    return Answer("checkpoint_files", "checkpoint files", one_line(text), figures)


def _newest_first(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MAX_FILES) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbered = [(int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))]
    return [folder / name for _, name in sorted(numbered, reverse=True)]


def _files(folder: Path) -> dict[str, int]:
    try:
        with os.scandir(folder) as entries:
            entries_of_files = [entry for entry in islice(entries, MAX_FILES) if entry.is_file(follow_symlinks=False)]
            return dict(sorted((entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries_of_files))
    except FileNotFoundError:
        return {}
