"""Metrics are named as the run declares them; no code assumes an accuracy."""

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
from comparison_samples import made, written
from run_folders import STARTED, documents, variant, write_run
from run_samples import sync_run

from crosstrain.cli.group import invoke
from crosstrain.records.store.run_directory import RunReader
from crosstrain.report.compare.comparison import compare_runs
from crosstrain.report.compare.comparison_tables import difference_lines, table_notes
from crosstrain.report.compare.formats import as_csv, as_markdown
from crosstrain.report.compare.ratios import aggregate
from crosstrain.report.compare.runs_list import runs_table
from crosstrain.report.runs.columns import row as flat_row
from crosstrain.report.runs.columns import run_columns
from crosstrain.report.runs.query import FIGURES

METRICS = [
    {"name": "top3", "label": "top-3 accuracy", "better": "higher"},
    {"name": "mean_rank", "label": "mean rank", "better": "lower"},
]


def ranked(name, rank=2.0, **fields):
    """Make a run with a share and a rank, of which less is better."""
    evaluation = {"split": "test", "examples": 360, "loss": 0.5, "top3": 0.875, "mean_rank": rank}
    changes = {"eval": evaluation, "best_eval": {"top3": 0.875, "mean_rank": rank}}
    return made(name, summary={**changes, **fields.pop("summary", {})}, described={"metrics": METRICS}, **fields)


# Comparisons ---------------------------------------------------------------------------------------------------------


def test_notes_name_the_metrics_of_the_runs():
    comparison = compare_runs([ranked("one"), ranked("two", seed=1)], fold=False)
    text = "\n".join([*difference_lines(comparison), *table_notes(comparison)])
    assert "seed (one: 0; two: 1): loss, top-3 accuracy, mean rank and time to target are not comparable" in text
    assert "loss, top-3 accuracy, mean rank, time to target (seed)" in text
    assert "metrics" not in text
    assert as_csv(comparison).splitlines()[2].split(",")[2] == "loss; top-3 accuracy; mean rank; time to target"
    comparability = comparison.to_json()["comparability"]
    assert comparability["differences"][0]["makes_not_comparable"] == ["loss", "top3", "mean_rank", "time to target"]
    assert comparability["not_comparable_with_the_first"] == [[], ["loss", "top3", "mean_rank", "time to target"]]


def test_metrics_of_different_models_are_named_once():
    comparison = compare_runs([ranked("one"), made("two", until="accuracy>=0.8"), made("three", seed=1)], fold=False)
    assert "loss, top-3 accuracy, mean rank, accuracy and time to target are not comparable" in "\n".join(difference_lines(comparison))


def test_runs_with_an_accuracy_name_it():
    comparison = compare_runs([made("one"), made("two", seed=1)], fold=False)
    assert "loss, accuracy and time to target are not comparable" in "\n".join(difference_lines(comparison))
    assert comparison.to_json()["comparability"]["differences"][0]["makes_not_comparable"] == ["loss", "accuracy", "time to target"]


def test_curves_are_requested_like_other_figures(tmp_path, capsys):
    paths = written(tmp_path, ranked("one"))
    assert invoke(["compare", "--curves", "nothing", *paths]) == 2
    assert "loss, top3, mean_rank" in capsys.readouterr().err
    assert invoke(["compare", "--curves", "Mean-Rank", *paths]) == 2  # of which the sample has no records
    assert "got 'mean_rank', of which none of these runs has anything recorded" in capsys.readouterr().err


def test_repeats_average_existing_metrics():
    figures = aggregate([ranked("one", 1.0).summary, ranked("two", 3.0).summary])["figures"]
    assert figures["mean_rank"]["mean"] == 2.0
    assert "accuracy" not in figures
    assert list(figures)[:4] == ["time_to_target_seconds", "top3", "mean_rank", "loss"]


CUSTOM_NAMES = {"accuracy": "hits", "error": "mean error"}


def custom_run(name, *metrics):
    """Make a run of a custom model, two of whose metrics have names of built-in ones."""
    evaluation = {"split": "test", "examples": 360, "loss": 0.5, **dict.fromkeys(metrics, 0.25)}
    described = [{"name": metric, "label": CUSTOM_NAMES[metric], "better": "higher"} for metric in metrics]
    figures = {"eval": evaluation, "best_eval": dict.fromkeys(metrics, 0.5)}
    return made(name, summary=figures, described={"metrics": described})


@pytest.mark.parametrize("metrics", [("accuracy",), ("error",), ("accuracy", "error")])
def test_metric_named_like_a_builtin_keeps_its_label(metrics):
    for comparison in (
        compare_runs([custom_run("one", *metrics)], fold=False),
        compare_runs([custom_run("one", *metrics), ranked("two")], fold=False),
    ):
        columns = {column.key: column.label for column in run_columns(comparison.runs)}
        shown = {key: label for key, label in columns.items() if key in ("eval_accuracy", "eval_error")}
        assert shown == {f"eval_{metric}": f"test {CUSTOM_NAMES[metric]}" for metric in metrics}
        text = as_markdown(comparison)
        assert all(CUSTOM_NAMES[metric] in text for metric in metrics)


def test_error_follows_accuracy():
    for runs in ([made("one")], [made("one"), ranked("two")]):
        keys = [column.key for column in run_columns(compare_runs(runs, fold=False).runs)]
        assert keys[keys.index("eval_accuracy") + 1] == "eval_error"


def test_best_value_of_a_metric_can_be_requested(tmp_path, capsys):
    paths = written(tmp_path, ranked("one"), custom_run("two", "error"))
    for name, label in (("best_eval_mean_rank", "best mean rank"), ("best-top3", "best top-3 accuracy"), ("best_error", "best mean error")):
        assert invoke(["compare", "--metric", name, *paths]) == 0
        assert label in capsys.readouterr().out
    assert invoke(["compare", "--metric", "best_mean_ran", *paths]) == 2
    assert "best_mean_rank" in capsys.readouterr().err


# Lists of runs -------------------------------------------------------------------------------------------------------


def row(name, **figures):
    return {**dict.fromkeys(FIGURES), "created_at": STARTED.isoformat(), "run": name, "path": f"runs/{name}", **figures}


def test_list_names_a_metric_equally_if_requested():
    table = [row("a", eval_top3=0.5, best_eval_top3=0.75), row("b", eval_top3=0.25, best_eval_top3=0.5)]
    plain, requested = (runs_table(table, None, names)[0].splitlines()[0] for names in ([], ["eval_top3"]))
    assert plain == requested
    assert plain.split().count("top3") == 1
    assert runs_table(table, None, ["best_eval_top3"])[0].splitlines()[0].endswith("  best top3")
    assert "accuracy" in runs_table(table, None, ["eval_accuracy"])[0].splitlines()[0]


def test_list_shows_an_error_metric():
    assert "error" in runs_table([row("a", eval_error=0.5)], None)[0].splitlines()[0].split()
    assert "error" not in runs_table([row("a", eval_error=0.5, eval_accuracy=0.5)], None)[0].splitlines()[0].split()


def test_narrow_list_drops_further_metrics_first():
    table = [row("a" * 40, state="succeeded", eval_top3=0.5, eval_mean_rank=2.0, examples_per_second=10.0)]
    for width in range(40, 200):
        text, left_out = runs_table(table, width)
        assert len(text.splitlines()[0]) <= max(width, 51)
        assert "top3" not in left_out or "mean rank" in left_out


def test_order_by_metric_is_known_without_matches(tmp_path, capsys):
    run_documents = documents(sync_run(tmp_path / "other"))
    metrics = {"eval": {"step": 10, "epoch": 1.0, "loss": 0.5, "mean_rank": 2.0}}
    write_run(tmp_path / "out" / "one", variant(run_documents, 0, name="one", **metrics))
    arguments = ["runs", "list", "--out", str(tmp_path / "out"), "--where", "mean-rank<1", "--sort", "mean-rank", "--json"]
    assert invoke(arguments) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}


def test_summary_has_only_its_run_s_metrics(tmp_path):
    """Also a summary of an earlier release, whose only metric was accuracy."""
    runs = [RunReader(Path(path)).summary() for path in written(tmp_path, ranked("one"), made("two"))]
    assert [name for name in runs[0]["eval"] if name in ("accuracy", "top3", "mean_rank")] == ["top3", "mean_rank"]
    assert isinstance(runs[1]["eval"]["accuracy"], float)
    assert flat_row(runs[0])["eval_accuracy"] is None  # of every flat row


# Sources -------------------------------------------------------------------------------------------------------------

ALLOWED = {
    "records/store/jsonl.py": "lines of earlier releases have an accuracy beside the loss",
    "report/runs/columns.py": "eval_accuracy and eval_error, which every flat row has had since the first release",
    "report/runs/query.py": "a short name for eval_accuracy, and an example of a condition",
    "report/compare/runs_list.py": "the column of eval_accuracy, where a run has one",
    "records/loggers/mllog.py": "eval_accuracy is MLPerf's key",
    "records/loggers/tensorboard.py": "the metrics of all models, of which HParams needs a list",
    "core/job.py": "examples of values in help texts",
    "core/units.py": "an example of a value in a message",
    "core/suggestions.py": "what other tools call --until",
    "cli/commands/compare.py": "examples of figures in help texts and a message",
    "cli/commands/runs.py": "examples of figures in help texts",
    "backends/arrays/model.py": "the sum that classifiers have, as backends of arrays count it",
    "backends/tf/model.py": "the sum that classifiers have, as the backend counts it",
    "backends/torch/model.py": "the sum that classifiers have, as the backend counts it",
    "conformance/suite.py": "the suite's own job trains a classifier",
}
"""Where a file outside metrics and models may name this metric or its sum, and why."""

NAMES_IT = re.compile(r"accurac|\bcorrect\b|(?<![a-z])correct_|_correct\b", re.IGNORECASE)


def test_no_other_file_names_the_accuracy(repository):
    files = set()
    for package in tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]:
        folder = package.split(".")[1:]
        for path in repository.joinpath(*folder).glob("*.py"):
            name = path.relative_to(repository).as_posix()
            if not name.startswith(("metrics/", "models/")) and any(map(NAMES_IT.search, names_and_texts(ast.parse(path.read_text())))):
                files.add(name)
    assert files == set(ALLOWED)


def names_and_texts(tree):
    """Yield names and texts of a module, without docstrings."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
