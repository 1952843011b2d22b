"""Final scores of all test sentences, shown in addition to those of evaluations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from comparison_samples import made, written
from hypothesis import given, settings
from hypothesis import strategies as st
from questioned_runs import asked, trained

from crosstrain.cli.commands.compare import compare
from crosstrain.cli.commands.evaluate import _print as print_evaluation
from crosstrain.cli.commands.runs import runs as runs_command
from crosstrain.metrics import LOSS
from crosstrain.metrics import base as language
from crosstrain.metrics.base import ACCURACY
from crosstrain.records.store.jsonl import write_document
from crosstrain.records.store.schema import EvalRecord
from crosstrain.report.compare.comparison import compare_runs
from crosstrain.report.compare.comparison_tables import default_tables, difference_lines, table_notes
from crosstrain.report.compare.formats import as_text
from crosstrain.report.compare.ratios import aggregate
from crosstrain.report.compare.run_tables import one_run, to_text
from crosstrain.report.compare.runs_list import runs_table
from crosstrain.report.pages.page import render
from crosstrain.report.pages.pictures import pictures
from crosstrain.report.runs.columns import metric_figures, row
from crosstrain.report.runs.query import Condition, fitting, list_runs
from crosstrain.report.runs.run import Run
from crosstrain.report.runs.translation_scores import Searched, measured_on

SCORING = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
METRICS = [("bleu", "BLEU", "higher"), ("chrf", "chrF", "higher"), ("exact", "exact matches", "higher")]
RECORDED = ("metrics", "translation_metrics", "translation_signatures")
SIZES = {"train": 40000, "test": 2000}
OTHERS = [("perplexity", "perplexity", "lower"), ("token_accuracy", "token accuracy", "higher")]


def translating(name="one", *, bleu=51.77, greedy=500, beam=4, listed=True, summary=None, **fields):
    """Return a run that translates; its last evaluation has a BLEU of 27.53, its end `bleu`."""
    end = f"{SCORING}|beam{beam},penalty0.6,+50|sentences:2000"
    figures = {"bleu": 27.53, "chrf": 49.0, "exact": 0.25, "perplexity": 12.5, "token_accuracy": 0.5}
    scores = {"split": "test", "step": 450, "sentences": 2000, "signature": end, "seconds": 3.0, "bleu": bleu, "chrf": 70.0, "exact": 0.5}
    figures_of_run = {
        "eval": {"split": "test", "examples": 2000, "loss": 2.5, **figures},
        "best_eval": {"loss": 2.5, **figures},
        "translated": None if bleu is None else scores,
        **(summary or {}),
    }
    described = {
        "metrics": [dict(zip(("name", "label", "better"), info, strict=True)) for info in (*METRICS, *OTHERS)],
        "translation_signatures": {"training": f"{SCORING}|greedy,+50|sentences:{greedy}", "end": end},
    }
    if listed:
        described["translation_metrics"] = [name for name, _, _ in METRICS]
    return made(name, summary=figures_of_run, described=described, dataset={"sizes": SIZES}, **fields)


def lines(text):
    return {line.rpartition("  ")[0].strip(): line.rpartition("  ")[2].strip() for line in text.splitlines()}


@pytest.mark.parametrize("listed", [True, False], ids=["now", "before job.json listed them"])
def test_table_of_one_run_has_both_scores_with_search(listed):
    run = translating(listed=listed)
    rows_of_table = lines(to_text(one_run(run.summary, run.job)))
    assert rows_of_table["test BLEU (greedy, 500 of 2,000)"] == "27.53"
    assert rows_of_table["BLEU at the end (beam 4, 2,000 sentences)"] == "51.77"
    assert rows_of_table["exact matches at the end (beam 4, 2,000 sentences)"] == "0.5000"
    assert rows_of_table["test perplexity"] == "12.5000"


def test_run_without_final_scores_has_no_rows_of_them():
    for run in (translating(bleu=None), made()):
        assert "at the end" not in to_text(one_run(run.summary, run.job))
        assert "at the end" not in as_text(compare_runs([run, translating("two", bleu=None)]))
        assert not [name for name in row(run.summary) if name.startswith("end_")]


def test_untranslated_run_names_evaluate_command():
    run = translating(bleu=None)
    checkpoints = {"checkpoints": {"saved": 1, "failed": 0}}

    def row_of(summary):
        return lines(to_text(one_run({**run.summary, **summary}, run.job, Path("runs/a b")))).get("test sentences")

    assert row_of(checkpoints) == "not translated: trainer evaluate 'runs/a b'"
    assert row_of({"checkpoints": {"saved": 0, "failed": 1}}) == "not translated"
    assert row_of({**checkpoints, "state": "interrupted"}) is None
    assert "test sentences" not in to_text(one_run(translating().summary, run.job, Path("runs/a")))


def test_comparison_has_column_for_each_score():
    tables = {table.title: table for table in default_tables(compare_runs([translating(), translating("two", bleu=48.0)], fold=False))}
    columns = dict(zip(tables["Learning"].header, zip(*tables["Learning"].rows, strict=True), strict=True))
    assert columns["BLEU (greedy)"] == ("27.53", "27.53")
    assert columns["BLEU at the end"] == ("51.77", "48.00")
    text = as_text(compare_runs([translating(), translating("two", bleu=48.0)], fold=False), layout="columns")
    assert "test BLEU (greedy, 500 of 2,000)" in text
    assert "BLEU at the end (beam 4, 2,000 sentences)" in text
    mixed = as_text(compare_runs([translating(), made("classifier")]), layout="columns")
    assert "51.77" in mixed


def test_labels_omit_differing_searches():
    text = as_text(compare_runs([translating(), translating("two", greedy=100, beam=1)]), layout="columns")
    assert "test BLEU (greedy) " in text
    assert "BLEU at the end (2,000 sentences)" in text


def test_repeats_have_mean_of_final_scores(tmp_path):
    runs = [translating(f"run-r{seed}", bleu=bleu, seed=seed) for seed, bleu in enumerate((50.0, 52.0))]
    (entry,) = compare_runs(runs).entries
    assert (entry.figures["end_bleu"], entry.figures["eval_bleu"]) == (51.0, 27.53)
    assert aggregate([run.summary for run in runs])["figures"]["end_bleu"]["mean"] == 51.0


def test_every_command_shows_end_scores(tmp_path):
    paths = written(tmp_path, translating(), made("classifier"))
    rows = {run["run"]: run for run in list_runs(tmp_path)}
    assert (rows["one"]["end_bleu"], rows["one"]["end_exact"], rows["one"]["eval_bleu"]) == (51.77, 0.5, 27.53)
    assert "end_bleu" not in rows["classifier"]
    metrics = metric_figures(rows.values())
    assert [row["run"] for row in fitting(rows.values(), [Condition.parse("end_bleu>=50", metrics)])] == ["one"]
    assert "bleu at the end" in runs_table(list(rows.values()))[0].splitlines()[0]
    shown = json.loads(CliRunner().invoke(runs_command, ["show", paths[0], "--json"]).stdout)
    assert shown["row"]["end_bleu"] == 51.77
    exported = CliRunner().invoke(runs_command, ["export", *paths, "--what", "summary", "-o", "-"]).stdout.splitlines()
    column = exported[0].split(",").index("end_bleu")
    assert [line.split(",")[column] for line in exported[1:]] == ["51.77", ""]
    compared = CliRunner().invoke(compare, [*paths, "--metric", "end_bleu", "--json"])
    assert [row["figures"].get("end_bleu") for row in json.loads(compared.stdout)["rows"]] == [51.77, None]
    assert "BLEU at the end" in CliRunner().invoke(compare, [*paths, "--metric", "end_bleu"]).stdout
    text = CliRunner().invoke(runs_command, ["show", paths[0]]).stdout
    assert lines(text)["BLEU at the end (beam 4, 2,000 sentences)"] == "51.77"
    page = render([Run(path) for path in paths])
    assert (">BLEU at the end<" in page, ">51.77<" in page) == (True, True)


def test_eval_sentences_confound_only_eval_scores():
    comparison = compare_runs([translating(eval_sentences=500), translating("two", greedy=100, eval_sentences=100)])
    (_, marks) = comparison.comparability.to_json()["not_comparable_with_the_first"]
    assert marks == ["run time", "bleu", "chrf", "exact", "time to target"]  # translation takes time
    (sentence,) = (line for line in difference_lines(comparison) if "how translations" in line)
    assert "): BLEU, chrF and exact matches are not comparable; " in sentence
    text = as_text(comparison, layout="columns")
    marked = [line.partition("  ")[0] for line in text.splitlines() if line.endswith("†")]
    assert marked == [
        "run time (after start-up)",
        "training time",
        "test BLEU (greedy)",
        "test chrF (greedy)",
        "test exact matches (greedy)",
    ]


def test_beam_confounds_only_final_scores():
    comparison = compare_runs([translating(beam=4), translating("two", beam=1)])
    assert comparison.comparability.to_json()["not_comparable_with_the_first"][1] == ["end_bleu", "end_chrf", "end_exact"]
    assert any("BLEU at the end, chrF at the end, exact matches at the end (" in line for line in table_notes(comparison))


def test_difference_of_missing_figures_marks_nothing():
    comparison = compare_runs([translating(bleu=None, beam=4), translating("two", bleu=None, beam=1)])
    assert not any("not comparable with" in line for line in table_notes(comparison))
    (sentence,) = (line for line in difference_lines(comparison) if "at the end" in line)
    assert "not comparable;" not in sentence


WHOLE = "Over the whole test split, every example once."


@pytest.mark.parametrize(
    ("greedy", "sentence"),
    [
        ((500, 500), "Over the first 500 of 2,000 test sentences, decoded greedily."),
        ((500, 100), "Over the first --eval-sentences of 2,000 test sentences, decoded greedily."),
    ],
)
def test_picture_notes_evaluated_sentences(greedy, sentence):
    runs = [translating(f"run{place}", greedy=sentences) for place, sentences in enumerate(greedy)]
    notes = {info.name: measured_on(info, runs) for info in (*runs[0].metrics, LOSS)}
    assert notes == {**dict.fromkeys(("bleu", "chrf", "exact"), sentence), **dict.fromkeys(("perplexity", "token_accuracy", "loss"), WHOLE)}
    assert measured_on(ACCURACY.info, [made()]) == WHOLE


def test_report_notes_decoding_above_bleu(tmp_path):
    run = translating()
    recorded = {name: run.job[name] for name in RECORDED} | {"dataset": {"sizes": SIZES}}
    record = EvalRecord(50, 0.5, 0.5, 0.1, "test", 2000, 2.5, {name: run.summary["eval"][name] for name, _, _ in (*METRICS, *OTHERS)}, 50)
    notes = {picture.name: picture.note for picture in pictures([Run(trained(tmp_path, described=recorded, evaluations=[record]))])}
    assert notes["bleu"].startswith("Over the first 500 of 2,000 test sentences, decoded greedily.")
    assert notes["perplexity"].startswith(WHOLE)
    assert notes["test-loss"].startswith(WHOLE)


def test_evaluate_shows_decoded_sentences_and_search(capsys):
    run = translating()
    figures = {name: run.summary["eval"][name] for name, _, _ in (*METRICS, *OTHERS)} | {"loss": 2.5, "examples": 2000, "seconds": 58.39}
    evaluation = {"model": "m", "step": 450, "trained_by": "torch", "trained_on": "numbers", "backend": "torch", "data": "numbers"}
    more = {"split": "test", "synthetic": False, "precision_used": "fp32", "averaged_checkpoints": None, "weights": "raw"}
    signature = {"translation_signature": f"{SCORING}|beam4,penalty0.6,+50|sentences:2000"}
    print_evaluation({**figures, **evaluation, **more, **signature}, run.metrics, as_json=False)
    printed = dict(re.split(r" {2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert printed["on"] == "2,000 examples of numbers (test), torch, fp32, 58.39 s"
    assert printed["decoded"] == "2,000 sentences of these, beam 4"


@settings(deadline=None, derandomize=True, database=None)
@given(st.integers(1, 64), st.integers(1, 10**9), st.floats(0, 10))
def test_signature_is_parsed_to_search(beam, sentences, penalty):
    from crosstrain.models.decoding import Decoding

    signature = f"{SCORING}|{Decoding(beam, penalty).signature}|sentences:{sentences}"
    assert Searched.from_signatures([signature, None, signature]) == Searched("greedy" if beam == 1 else f"beam {beam}", sentences)


@settings(deadline=None, derandomize=True, database=None)
@given(st.text())
def test_any_text_as_signature_is_one_line(text):
    assert Searched.from_signatures([text]).in_brackets().count("\n") == 0


def test_score_names_equal_metric_names():
    assert tuple(metric.name for metric in language.metrics("13a")) == language.NAMES


@pytest.mark.parametrize("bleu", [51.77, None])
def test_explain_distinguishes_both_scores(tmp_path, bleu):
    run = translating(bleu=bleu)
    recorded = {name: run.job[name] for name in RECORDED} | {"dataset": {"sizes": SIZES}}
    record = EvalRecord(50, 0.5, 0.5, 0.1, "test", 2000, 2.5, {name: run.summary["eval"][name] for name, _, _ in (*METRICS, *OTHERS)}, 50)
    path = trained(tmp_path, described=recorded, evaluations=[record])
    summary = json.loads((path / "summary.json").read_text())
    write_document(path / "summary.json", {**summary, "translated": run.summary["translated"]})
    answer = asked(path)["learning"]
    assert (answer["last_headline"], answer["headline_at_the_end"]) == (27.53, bleu)
    end = ", at the end 51.77 (beam 4, 2,000 sentences)" if bleu is not None else ""
    assert answer["text"].endswith(f"; BLEU 27.53 (greedy, 500 of 2,000){end}")
