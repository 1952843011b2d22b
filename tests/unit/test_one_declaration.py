"""A setting, schedule or column is declared in one place and appears everywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import settings_document

from crosstrain.core.job import Job
from crosstrain.core.schedules import SCHEDULES
from crosstrain.core.setting import GROUPS
from crosstrain.core.settings.job_fields import DECLARED, TAKES_EFFECT
from crosstrain.records.store.summary_schema import Summary
from crosstrain.report.analysis.configurations import FIGURES as RANKED
from crosstrain.report.compare.ratios import FIGURES as AVERAGED
from crosstrain.report.runs.columns import COLUMNS, FIGURES, figure_type

ADDED_SETTING = """
    label_smoothing: Fraction = setting(
        Topic.OPTIMISER,
        0.0,
        "Share of the label that is spread over all classes.",
        requires=Requirement("optimizer", ("adam",)),
        compare=trajectory("label smoothing"),
        foreign="smooth by {}",
        mllog="opt_label_smoothing",
    )
"""
ADDED_SCHEDULE = """
    "inverse": Schedule(
        lambda job, updates: job.schedule_gamma / updates.numbers,
        lambda job, base, total_steps: f"inverse decay from {base}",
        ("schedule_gamma",),
    ),
"""
ADDED_COLUMN = """
    Column("data_wait_seconds", "waiting for data", unit="s", group=TIME, header="data wait",
           names=("wait",), line=19, speed=6, listed=(11, 11)),
"""
LOOK_AT_TABLES = """
import json, sys
from pathlib import Path
from comparison_samples import made, written
from crosstrain.report.compare.comparison import compare_runs
from crosstrain.report.compare.formats import as_csv, as_markdown, as_text
from crosstrain.report.compare.run_tables import one_run, to_text
from crosstrain.report.pages.page import render
from crosstrain.report.pages.paper_table import as_latex
from crosstrain.report.runs.columns import column
from crosstrain.report.runs.run import Run, started_runs

made_up = [
    made("one", backend="tf", summary={"data_wait_seconds": 1.25}),
    made("two", summary={"data_wait_seconds": 2.5}),
]
runs = started_runs(map(Run, written(Path(sys.argv[1]), *made_up)))
comparison, asked = compare_runs(runs), [column("wait")]
print(json.dumps({
    "one run": to_text(one_run(runs[1].summary)),
    "side by side": as_text(comparison, layout="columns"),
    "rows": as_text(comparison, layout="rows"),
    "--metric": as_text(comparison, asked),
    "CSV": as_csv(comparison),
    "Markdown": as_markdown(comparison),
    "LaTeX": as_latex(runs, asked),
    "page": render(runs),
}))
"""
LOOK = """
import json, sys
import numpy as np
from crosstrain.core.job import Job
from crosstrain.core.update_rules import schedule_text, learning_rates
from crosstrain.core.settings.sources import resolve
from crosstrain.core.settings.sweeps import as_arguments
from crosstrain.launch.driver.resumption import foreign_settings
from crosstrain.records.loggers.base import settings
from crosstrain.records.loggers.mllog import _declared
from crosstrain.report.compare.factors import CHOSEN
import settings_document

job = resolve({"optimizer": "adam", "backend": "torch"}, {"TRAINER_LABEL_SMOOTHING": "0.25"}, sys.argv[1]).job
idle = resolve({"backend": "torch"}, {"TRAINER_LABEL_SMOOTHING": "0.25"}).idle
inverse = Job(schedule="inverse", schedule_gamma=0.5, lr=2.0)
print(json.dumps({
    "environment": job.label_smoothing,
    "file": job.schedule,
    "idle": idle,
    "arguments": as_arguments({"label_smoothing": 0.25}),
    "comparison": [factor.label for factor in CHOSEN if factor.key == "label_smoothing"],
    "foreign": list(foreign_settings({"label_smoothing": 0.25})),
    "mlflow": settings(job)["label_smoothing"],
    "hparams": settings(job, "operation")["label_smoothing"],
    "mllog": _declared(job)["opt_label_smoothing"],
    "rates": learning_rates(inverse, 0, 3, 1, 3).tolist(),
    "words": schedule_text(inverse, 3),
    "gamma idle": "schedule_gamma" in resolve({"backend": "torch", "schedule": "inverse", "schedule_gamma": "0.5"}, {}).idle,
    "document": settings_document.document(),
}))
"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory, repository):
    """A copy of the project with another setting, schedule and column."""
    folder = tmp_path_factory.mktemp("extended")
    package = folder / "crosstrain"
    package.mkdir()
    packages = {entry.parent.name for entry in repository.glob("*/py.typed")} | {"configs"}
    for name in packages:
        shutil.copytree(repository / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    insert(package / "core" / "job.py", "    ema_decay:", ADDED_SETTING)
    insert(package / "core" / "schedules.py", '    "cosine": Schedule(', ADDED_SCHEDULE)
    insert(package / "report" / "runs" / "columns.py", '    Column("group_size"', ADDED_COLUMN)
    return folder


def insert(path: Path, before: str, lines: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, f"{lines.strip(chr(10))}\n{before}"), encoding="utf-8")


def run_in(folder, repository, *arguments):
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, repository / "tests", repository / "tests/unit")))}
    return subprocess.run([sys.executable, "-P", *arguments], capture_output=True, text=True, check=True, env=variables).stdout


def test_setting_and_schedule_are_added_in_20_lines(extended, repository, tmp_path):
    assert len((ADDED_SETTING.strip() + "\n" + ADDED_SCHEDULE.strip()).splitlines()) <= 20
    config = tmp_path / "job.toml"
    config.write_text('schedule = "inverse"\n')
    output = json.loads(run_in(extended, repository, "-c", LOOK, str(config)))
    assert output.pop("idle")["label_smoothing"].endswith("it belongs to --optimizer adam.")
    document = output.pop("document")
    assert "| `--label-smoothing` | `0` |" in document
    names = list(SCHEDULES)
    names.insert(names.index("cosine"), "inverse")
    assert ", ".join(names) in document
    assert output == {
        "environment": 0.25,
        "file": "inverse",
        "arguments": ["--label-smoothing", "0.25"],
        "comparison": ["label smoothing"],
        "foreign": ["label_smoothing"],
        "mlflow": 0.25,
        "hparams": 0.25,
        "mllog": 0.25,
        "rates": [1.0, 0.5, 1 / 3],
        "words": "inverse decay from 2",
        "gamma idle": False,
    }
    text = run_in(extended, repository, "-m", "crosstrain.cli.main", "run", "--help")
    assert "--label-smoothing" in text
    assert "|".join(names) in "".join(text.split())


def test_column_is_added_to_every_table_by_one_row(extended, repository, tmp_path):
    tables = json.loads(run_in(extended, repository, "-c", LOOK_AT_TABLES, str(tmp_path)))
    header, *lines = tables.pop("CSV").splitlines()
    place = header.split(",").index("data_wait_seconds")
    assert [line.split(",")[place] for line in lines] == ["1.25", "2.5"]
    for name, text in tables.items():
        assert "2.50" in text, name
        assert ("waiting for data" if name in ("one run", "side by side") else "data wait") in text, name
    arguments = ("runs", "--out", str(tmp_path), "--wide", "--where", "data_wait_seconds>2")
    listed = run_in(extended, repository, "-m", "crosstrain.cli.main", *arguments)
    assert "wait" in listed.splitlines()[0].split()
    assert "2.50 s" in listed
    assert "1.25 s" not in listed


def test_columns_are_figures_of_the_summary():
    for spec in COLUMNS:
        assert figure_type(spec.key) is not None
        assert spec.of_node or spec.path[0] in Summary.model_fields
        assert spec.group in (None, *GROUPS)
    assert len(set(FIGURES)) == len(COLUMNS)
    names = [name for spec in COLUMNS for name in spec.names]
    assert len(set(names)) == len(names)
    declared = {spec.key: (spec.group, spec.better) for spec in COLUMNS}
    assert [(figure.group, figure.better) for figure in RANKED] == [declared[figure.key] for figure in RANKED]
    assert set(AVERAGED.values()) <= {spec.path for spec in COLUMNS}


def test_settings_are_declared_and_refer_to_existing_ones():
    assert list(DECLARED) == list(Job.model_fields)
    assert {needed.field for needed in TAKES_EFFECT.values()} <= set(Job.model_fields)
    for schedule in SCHEDULES.values():
        assert set(schedule.settings) <= set(Job.model_fields)


def test_settings_document_is_up_to_date(repository):
    assert repository / "docs" / "settings.md" == settings_document.DOCUMENT
    assert settings_document.DOCUMENT.read_text(encoding="utf-8") == settings_document.document(), "run: python tests/settings_document.py"
