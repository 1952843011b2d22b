"""A model with custom metrics: trained on both backends in both modes, and shown everywhere.

A run stops by them.
"""

import json
import math
import re
from functools import cache
from pathlib import Path

import pytest
from own_models import importable

from crosstrain.checkpoint import list_checkpoints, peek_meta
from crosstrain.conformance.runs import run_job, trainer
from crosstrain.metrics.base import MetricInfo
from crosstrain.records.loggers.tensorboard import FOLDER

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]

TESTS = Path(__file__).parent.parent
ENVIRONMENT = importable(TESTS)
JOB = {
    "model": "foreign_metrics.ranked",
    "data": "digits",
    "procs_per_node": 2,
    "eval_every": "10steps",
    "checkpoint_every": "10steps",
    "keep": 1,
    "lr": 0.02,
    "mllog": True,
    "tensorboard": True,
    "calibrate": False,
}
QUICK = [("tf", "sync"), ("torch", "sync"), ("torch", "async")]
COMBINATIONS = [*QUICK, pytest.param("tf", "async", marks=pytest.mark.slow)]
"""Each backend and each mode is among those without a marker."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that makes a run on first use.

    It stops by a metric whose minimum is best, and keeps the best by it.
    """
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(backend, mode):
        target = {"until": "mean_rank<=1.9", "epochs": 20, "keep_best": "mean_rank"}
        return run_job(folder, name=f"{backend}-{mode}", backend=backend, mode=mode, environment=ENVIRONMENT, **JOB, **target)

    return run


@pytest.fixture(scope="module")
def runs(made):
    return {(backend, mode): made(backend, mode) for backend, mode in QUICK}


@pytest.mark.parametrize(("backend", "mode"), COMBINATIONS)
def test_custom_metric_stops_run_at_target(made, backend, mode):
    run = made(backend, mode)
    assert run.summary["target_reached"] is True
    assert run.evals[-1].metrics["mean_rank"] <= 1.9
    assert all(record.metrics["mean_rank"] > 1.9 for record in run.evals[:-1])
    assert run.summary["eval"]["mean_rank"] == run.evals[-1].metrics["mean_rank"]
    assert run.summary["best_eval"]["top5"] == max(record.metrics["top5"] for record in run.evals)


@pytest.mark.parametrize(("backend", "mode"), COMBINATIONS)
def test_custom_metric_direction_selects_best_checkpoint(made, backend, mode):
    run = made(backend, mode)
    kept = {meta.step: meta.metrics["mean_rank"] for meta in map(peek_meta, list_checkpoints(run.path)) if meta.metrics}
    best = min(record.metrics["mean_rank"] for record in run.evals)
    assert best in kept.values()


def test_custom_metric_is_equal_on_both_backends(runs):
    tf_evals, torch_evals = (runs[backend, "sync"].evals for backend in ("tf", "torch"))
    for first, second in zip(tf_evals, torch_evals, strict=True):
        assert first.metrics == pytest.approx(second.metrics, abs=1e-2)
        assert first.loss == pytest.approx(second.loss, abs=1e-4)


def test_run_records_direction_of_metric(runs):
    for run in runs.values():
        assert json.loads((run.path / "job.json").read_text())["metrics"] == [
            {"name": "top5", "label": "top-5 accuracy", "better": "higher"},
            {"name": "mean_rank", "label": "mean rank", "better": "lower"},
        ]


VIEWS = {
    "table": (["compare"], ["test top-5 accuracy", "test mean rank"]),
    "rows": (["compare", "--layout=rows"], ["   top-5 accuracy", "   mean rank"]),
    "csv": (["compare", "--csv"], ["eval_top5", "eval_mean_rank", "best_eval_top5"]),
    "markdown": (["compare", "--markdown"], ["top-5 accuracy", "mean rank"]),
    "latex": (["compare", "--latex"], ["top-5 accuracy", "mean rank"]),
    "chosen figures": (["compare", "--metric", "top5,mean_rank"], ["top-5 accuracy", "mean rank"]),
    "curves": (["compare", "--curves", "mean_rank", "--points", "3"], ["tf-sync"]),
    "notes": (["compare", "--by", "seed"], ["top-5 accuracy"]),
    "json": (["compare", "--json"], ['"eval_mean_rank"']),
}


@pytest.mark.parametrize("view", VIEWS)
def test_custom_metric_is_in_comparisons(runs, view):
    command, texts = VIEWS[view]
    done = trainer(*command, *(str(run.path) for run in runs.values()))
    assert done.returncode == 0, done.stderr
    assert not [text for text in texts if text not in done.stdout], done.stdout
    assert "eval_accuracy" in done.stdout or not re.search("(?<!top-5 )accuracy", done.stdout)


def test_custom_metric_is_in_lists_and_conditions(runs):
    out = str(runs["tf", "sync"].path.parent)
    assert "mean rank" in trainer("runs", "list", "--out", out).stdout
    rows = json.loads(trainer("runs", "list", "--out", out, "--where", "mean_rank<=1.9", "--sort", "mean_rank", "--json").stdout)["runs"]
    assert len(rows) == len(runs)
    assert [row["eval_mean_rank"] for row in rows] == sorted(row["eval_mean_rank"] for row in rows)
    assert json.loads(trainer("runs", "list", "--out", out, "--where", "mean_rank>1.9", "--json").stdout)["runs"] == []
    wrong = trainer("runs", "list", "--out", out, "--where", "mean_rnk>1")
    assert (wrong.returncode, "mean_rank" in wrong.stderr) == (2, True)


def test_custom_metric_is_shown_for_one_run(runs):
    path = str(runs["torch", "async"].path)
    assert "test mean rank" in trainer("runs", "show", path).stdout
    assert "test mean rank" in trainer("watch", path).stdout


def test_custom_metric_is_in_exported_tables(runs, tmp_path):
    paths = [str(run.path) for run in runs.values()]
    for what, names in (("evals", ["loss", "top5", "mean_rank"]), ("summary", ["eval_top5", "best_eval_mean_rank"])):
        file = tmp_path / f"{what}.csv"
        done = trainer("runs", "export", *paths, "--what", what, "--output", str(file))
        assert done.returncode == 0, done.stderr
        header = file.read_text().splitlines()[0].split(",")
        assert set(names) <= set(header)


@pytest.mark.slow
def test_custom_metric_is_in_plots_and_pages(runs, tmp_path):
    paths = [str(run.path) for run in runs.values()]
    assert trainer("plot", *paths, "--output", str(tmp_path / "plots")).returncode == 0
    names = {path.stem.split(".")[0] for path in (tmp_path / "plots").iterdir()}
    assert any("top5" in name for name in names), names
    assert any("mean_rank" in name for name in names), names
    page = tmp_path / "report.html"
    assert trainer("report", *paths, "--output", str(page)).returncode == 0
    text = page.read_text()
    assert "Test top-5 accuracy" in text
    assert "Test mean rank" in text


def test_loggers_receive_metric(runs):
    from crosstrain.records.loggers.tensorboard import _without_tensorflow

    _without_tensorflow()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for run in runs.values():
        log = (run.path / "mllog.txt").read_text()
        assert '"eval_top5"' in log
        assert '"eval_mean_rank"' in log
        events = b"".join(path.read_bytes() for path in (run.path / FOLDER).rglob("*tfevents*"))
        assert b"eval/mean_rank" in events
        assert b"eval mean rank" in events
        assert b"eval top-5 accuracy" in events
        accumulator = EventAccumulator(str(run.path / FOLDER))
        accumulator.Reload()
        scalars = accumulator.Tags()["scalars"]  # the list of all runs' metrics, for HParams, has an accuracy; this run has none
        assert "eval/mean_rank" in scalars
        assert "eval/accuracy" not in scalars


def test_unknown_metric_is_refused(tmp_path):
    for option, value in (
        ("--until", "accuracy>=0.9"),
        ("--until", "top5>=1.5"),
        ("--until", "top5<=0.5"),
        ("--keep-best", "accuracy"),
    ):
        done = trainer(
            *("run", "--backend", "torch", "--model", JOB["model"], "--data", "digits", "--out", str(tmp_path / "out"), option, value),
            environment=ENVIRONMENT,
        )
        assert done.returncode == 2, done.stdout
        assert option in done.stderr
        assert "top5" in done.stderr
    assert not (tmp_path / "out").exists()


def test_custom_metric_evaluates_checkpoint(runs):
    run = runs["torch", "sync"]
    done = trainer("evaluate", str(run.path), "--trust-run", "--json", environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    evaluation = json.loads(done.stdout)
    assert evaluation["mean_rank"] == run.evals[-1].metrics["mean_rank"]
    assert evaluation["model"] == run.summary["model"] == JOB["model"]


def test_improvement_has_a_direction_and_no_nan():
    higher, lower = MetricInfo("a", "a", "higher"), MetricInfo("b", "b", "lower")
    assert higher.improves(2, 1)
    assert not higher.improves(1, 2)
    assert not higher.improves(1, 1)
    assert lower.improves(1, 2)
    assert not lower.improves(2, 1)
    for info in (higher, lower):
        assert info.improves(1, None)
        assert info.improves(1, math.nan)
        assert not info.improves(math.nan, None)
        assert info.best([math.nan, 3, 1, 2]) == (3 if info is higher else 1)
        assert info.best([math.nan]) is None
