"""Formatting of metrics: two decimals for percentages, and labels instead of names."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_samples import EVALUATION, summary_of, sync_run

from crosstrain.metrics.base import described_metrics, metrics
from crosstrain.records.store.run_directory import RunReader
from crosstrain.records.text import evaluation_text, figure_text, number_text
from crosstrain.report.analysis.learning import assess_curves
from crosstrain.report.compare.run_tables import one_run, to_text
from crosstrain.report.compare.runs_list import runs_table
from crosstrain.report.runs.columns import row

VALUES = [(4.13e-06, "0.00"), (0.0, "0.00"), (0.07, "0.07"), (7.0, "7.00"), (99.68277, "99.68"), (100.0, "100.00")]


@settings(derandomize=True, database=None)
@given(st.floats(0, 100))
def test_percentages_have_two_decimals(value):
    for name in ("bleu", "chrf", "eval_bleu", "best_eval_chrf"):
        assert figure_text(name, value) == f"{value:.2f}"
    for name in ("loss", "accuracy", "exact", "eval_perplexity"):
        assert figure_text(name, value) == number_text(value)


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, "NaN"])
def test_non_finite_figure_is_written_as_number_text(value):
    assert figure_text("bleu", value) == number_text(value)


@pytest.mark.parametrize(("bleu", "text"), VALUES)
def test_figure_is_the_same_in_progress_table_and_list(tmp_path, bleu, text):
    path = sync_run(tmp_path)
    figures = {"bleu": bleu, "exact": 0.5}
    infos = [metric.info for metric in metrics("13a")]
    assert f"  BLEU {text}  exact matches 0.5000" in evaluation_text(replace(EVALUATION, metrics=figures), infos)
    job = {**RunReader(path).job(), "metrics": described_metrics(infos)}
    patience = {"metric": "bleu", "best": bleu, "best_step": 20, "without_improvement": 1, "evaluations": 1, "exhausted": True}
    eval_figures = {name: value for name, value in summary_of(path)["eval"].items() if name != "accuracy"}
    summary = {**summary_of(path), "eval": {**eval_figures, **figures}, "patience": patience}
    table = [line.split() for line in to_text(one_run(summary, job)).splitlines()]
    assert ["test", "BLEU", text] in table
    assert f"patience ended by 1 evaluation without a better BLEU: best {text} after 20 updates".split() in table
    head, line, *_ = runs_table([{"folder": None, "created_at": None, "path": str(path), **row(summary)}])[0].splitlines()
    assert text in line.split()
    assert "bleu" in head.split()


@pytest.mark.parametrize(("count", "words"), [(0, "0 evaluations"), (1, "1 evaluation"), (2, "2 evaluations")])
def test_count_of_evaluations_is_pluralized(count, words):
    import numpy as np

    assert assess_curves(np.ones(count), np.ones(count)).reason.startswith(f"{words} of at least 8")
