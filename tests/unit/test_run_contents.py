"""Answers of `trainer explain` about a run: learning rates, training set, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from questioned_runs import trained
from run_samples import a_job, open_run

from crosstrain.core.job import Job
from crosstrain.core.settings.job_fields import choices
from crosstrain.core.update_rules import schedule_text
from crosstrain.data.base import DataInfo, TextFeatures, split_amounts
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.records.store.schema import StepRecord
from crosstrain.report.analysis.learning import checkpoint_files, learning_rate, training_set
from crosstrain.report.runs.run import Run

# Learning rate --------------------------------------------------------------------------------------------------------


def test_schedules_are_described():
    for schedule in choices("schedule"):
        assert "0.05" in schedule_text(Job(schedule=schedule, warmup_steps=10), 100), schedule


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({}, "constant 0.05"),
        ({"schedule": "cosine"}, "cosine decay (--schedule cosine) from 0.05 to 0 at the planned last update, 1,000"),
        ({"schedule": "step", "schedule_step_epochs": 2}, "step decay (--schedule step) from 0.05, times 0.1 every 2 epochs"),
        ({"warmup_steps": 100}, "linear warm-up over the first 100 updates (--warmup-steps); constant 0.05"),
        ({"scale_lr": "linear", "batch_size": 64}, "constant 0.1 (--lr 0.05 scaled linear from batch 32 to 64)"),
    ],
)
def test_learning_rate_schedule_is_explained(job, words):
    assert schedule_text(Job(**job), 1000) == words


def test_learning_rate_is_as_recorded(tmp_path):
    writer = open_run(a_job(tmp_path, name="run", steps=30, warmup_steps=10, lr=0.1))
    writer.step(StepRecord(10, 10, 0, 0.2, 0.1, 100, (1.0,) * 10, (0.1,)))
    writer.step(StepRecord(0, 10, 0, 0.1, 0.1, 100, (1.0,) * 10, tuple(0.01 * (n + 1) for n in range(10))))
    writer.step(StepRecord(20, 10, 0, 0.3, 0.1, 100, (1.0,) * 10, (0.02,)))
    writer.close()
    run = Run(writer.path)
    answer = learning_rate(run, run.step_series(learning_rates=True))
    figures = answer.figures
    assert (figures["first"], figures["peak"], figures["last"], figures["last_step"]) == (0.01, 0.1, 0.02, 29)
    assert figures["peak_step"] == 9
    assert figures["course"][0] == [0, 0.01]
    assert answer.text.startswith("0.01 at first, peak 0.1 at update 10, 0.02 at update 30: linear warm-up")


# What is in it --------------------------------------------------------------------------------------------------------


class _Text:
    """A dataset of two columns of varying lengths."""

    info = DataInfo(
        "pairs",
        {"train": 2, "test": 1},
        (ColumnSpec("source", "uint16", (None,)), ColumnSpec("target", "uint16", (None,))),
        TextFeatures({"source": 100, "target": 100}),
    )

    def column(self, split, name):
        lengths = {"source": [0, 3, 5], "target": [0, 4, 10]}[name]
        return Column(np.zeros(lengths[-1], np.uint16), np.array(lengths, np.int64))


def test_amount_of_a_text_is_its_tokens():
    assert split_amounts(_Text(), "train") == {"bytes": 2 * 15 + 8 * 6, "elements": {"source": 5, "target": 10}}


def described(tmp_path, **dataset):
    return training_set(Run(trained(tmp_path, described={"dataset": {"name": "pairs", "sizes": {"train": 2000, "test": 7}, **dataset}})))


def test_text_training_set_has_lines_and_tokens(tmp_path):
    stored = {"train": {"bytes": 78_000, "elements": {"source": 50_000, "target": 100_000}}}
    answer = described(tmp_path, vocabulary_sizes={"source": 100, "target": 100}, stored=stored)
    assert answer.text == (
        "2,000 examples (4,000 lines) of pairs, 78.0 kB, 50,000 tokens of source, 100,000 tokens of target, 2 epochs, 7 test examples"
    )
    assert answer.figures["lines"] == 4000


def test_earlier_release_did_not_record_bytes(tmp_path):
    assert "size not recorded by the version that wrote it" in described(tmp_path).text


def test_run_without_data_has_no_training_set(tmp_path):
    assert training_set(Run(trained(tmp_path))) is None


def test_files_of_the_newest_checkpoint_are_described(tmp_path):
    path = trained(tmp_path)
    for step in (100, 200):
        folder = path / "checkpoints" / f"step-{step:09d}"
        folder.mkdir(parents=True)
        for name, size in (("parameters.safetensors", 2000), ("optimizer.safetensors", 4000), ("manifest.json", step)):
            (folder / name).write_bytes(bytes(size))
        (folder / "link").symlink_to("/dev/zero")
    (path / "checkpoints" / ".step-000000300.old-1").mkdir()
    answer = checkpoint_files(Run(path))
    files = "optimizer.safetensors 4.0 kB, parameters.safetensors 2.0 kB, manifest.json 200 B"
    assert answer.text == f"step-000000200 has 6.2 kB: {files}; 2 kept, 12.3 kB in total"
    assert (answer.figures["bytes"], answer.figures["kept"], answer.figures["kept_bytes"]) == (6200, 2, 12_300)
    assert answer.figures["files"][0] == {"name": "manifest.json", "bytes": 200}


def test_run_without_checkpoints_has_no_answer(tmp_path):
    assert checkpoint_files(Run(trained(tmp_path))) is None
