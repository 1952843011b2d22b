"""Token-based batches: advice is usable, and mean batch sizes are not taken for settings."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from comparison_samples import made, written
from explained_runs import explained_run
from hypothesis import given, settings
from hypothesis import strategies as st
from predict_samples import calibrated_run, write

from crosstrain.cli.commands.predict import predict
from crosstrain.core.job import Job
from crosstrain.report.analysis.advice import advise
from crosstrain.report.analysis.diagnosis import diagnose
from crosstrain.report.compare.comparison import compare_runs
from crosstrain.report.compare.formats import as_text
from crosstrain.report.compare.run_tables import one_run, to_text
from crosstrain.report.compare.runs_list import runs_table
from crosstrain.report.runs.query import list_runs
from crosstrain.report.runs.run import Run

STEP = {"compute": 0.002, "communicate": 0.008}


def filled(name="one", worker=71, workers=2, tokens=1024, **job):
    """Return a run whose workers had so many sentences on average."""
    mean = {"batch_size": worker, "global_batch_size": worker * workers, "batch_tokens": tokens}
    return made(name, nodes=workers, batch_tokens=tokens, summary=mean, **job)


def make_token_based(path, tokens, mean):
    """Convert a run directory to batches by tokens."""
    described, summary = (json.loads((path / file).read_text()) for file in ("job.json", "summary.json"))
    write(path, "job.json", {**described, "batch_size": None, "global_batch_size": None, "batch_tokens": tokens})
    write(path, "summary.json", {**summary, "batch_size": mean, "global_batch_size": 2 * mean, "batch_tokens": tokens})
    return path


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_advice_doubles_tokens_and_is_valid(tmp_path, mode, accumulate):
    path = explained_run(tmp_path, [STEP] * 2, mode=mode, half_fraction=0.6, figures={"updates_by_worker": [100, 100]})
    before = {entry.option: entry for entry in advise(diagnose(Run(path)))}["--batch-size 64"]
    described = json.loads((path / "job.json").read_text())
    write(path, "job.json", {**described, "accumulate": accumulate})
    advice = {entry.option: entry for entry in advise(diagnose(Run(make_token_based(path, 1024, 71))))}
    assert not [option for option in advice if option.startswith(("--batch-size", "--global-batch-size"))]
    entry = advice["--batch-tokens 2048"]
    assert (entry.speedup, entry.bound) == (before.speedup, "about")
    assert (entry.now, entry.reason) == ("now 1024", "halves the communication per token")
    assert "--scale-lr" in before.caution
    assert "--scale-lr" not in entry.caution
    Job(batch_tokens=2048, accumulate=accumulate)
    with pytest.raises(ValueError, match="scale_lr"):
        Job(batch_tokens=2048, scale_lr="linear")


@settings(deadline=None, derandomize=True, database=None, max_examples=6)
@given(st.integers(2, 5000), st.integers(1, 4), st.integers(1, 10**6))
def test_tables_show_mean_batch_size(worker, workers, tokens):
    run, whole = filled(worker=worker, workers=workers, tokens=tokens), f"about {worker * workers:,} sentences"
    assert f"global batch                {whole}\n" in to_text(one_run(run.summary, run.job))
    second = filled("two", worker=worker + 1, workers=workers, tokens=tokens)
    for layout in ("columns", "rows"):
        assert whole in as_text(compare_runs([run, second], fold=False), layout=layout)


def test_scaling_by_tokens_shows_mean_batch():
    text = as_text(compare_runs([filled("one", workers=1), filled("two")], by=["nodes"]))
    assert "weak, batch per worker about 71 sentences" in text


def test_example_batches_stay_numbers():
    comparison = compare_runs([filled(), made("two", nodes=2, batch_size=71)])
    (difference,) = (factor for factor in comparison.comparability.independent if factor.key == "global_batch_size")
    assert difference.values == ("about 142 sentences", "142")
    plain = compare_runs([made("small"), made("large", batch_size=64)], by=["global_batch_size"])
    assert [row["global batch"] for row in plain.settings] == ["32", "64"]


def test_list_of_runs_shows_mean_batch(tmp_path):
    written(tmp_path, filled(), made("two"))
    rows = {row["run"]: row for row in list_runs(tmp_path)}
    assert (rows["one"]["batch_tokens"], rows["two"]["batch_tokens"]) == (1024, None)
    first, second = (line for line in runs_table(list(rows.values()))[0].splitlines() if line.startswith(("one", "two")))
    assert "about 142 sentences" in first
    assert "sentences" not in second


def test_prediction_shows_mean_batch(tmp_path):
    path = str(make_token_based(calibrated_run(tmp_path), 1024, 71))
    done = CliRunner().invoke(predict, [path, "--nodes", "1,2", "--scaling", "both"])
    assert "Batch of a worker stays about 32 sentences (weak scaling)" in done.stdout, done.output  # of the calibration
    assert "Global batch stays about 142 sentences (strong scaling)" in done.stdout
