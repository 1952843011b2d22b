"""A run as reports read it: on demand, and once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from crosstrain.core.errors import UsageError
from crosstrain.report.runs.run import Run, finished_run, labelled, started_runs
from tests.report_runs import make_run

COUNTED = """
import json, os, sys
opened = []
def heard(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        opened.append(os.fsdecode(args[0]))
sys.addaudithook(heard)
from crosstrain.cli.group import invoke
code = invoke(sys.argv[2:])
json.dump({"code": code, "opened": opened}, open(sys.argv[1], "w"))
"""
"""Runs a command and writes down which files it opened."""


def files_opened(tmp_path, *command):
    """Return how often a command opened each file of the folder ``runs``."""
    report = tmp_path / "opened.json"
    arguments = [sys.executable, "-P", "-c", COUNTED, str(report), *map(str, command)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    opened = json.loads(report.read_text())
    assert opened["code"] == 0, done.stderr
    prefix = f"{tmp_path / 'runs'}/"
    records = [path for path in opened["opened"] if path.startswith(prefix) and path.endswith((".json", ".jsonl"))]
    return Counter(path.removeprefix(prefix) for path in records)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "twice"),
    [
        ("compare {runs}", ("steps.jsonl",)),  # counted before it is used
        ("explain {runs}/one", ("steps.jsonl",)),
        ("runs show one --out {runs}", ()),
        ("report {runs} -o {page}", ("steps.jsonl",)),  # checked to its end before it is drawn
    ],
)
def test_command_opens_each_file_of_a_run_once(tmp_path, command, twice):
    for name in ("one", "two"):
        make_run(tmp_path / "runs", name, steps=8, calibrated=True)
    counts = files_opened(tmp_path, *command.format(runs=tmp_path / "runs", page=tmp_path / "page.html").split())
    assert counts["one/summary.json"] == 1
    assert {path: count for path, count in counts.items() if count > 1 and not path.endswith(twice or "-")} == {}


def test_unused_document_is_not_read(tmp_path):
    run = Run(make_run(tmp_path, "one", steps=8))
    (run.path / "env.json").write_text("{")
    (run.path / "events.jsonl").write_text("{}\n{}\n")
    assert run.summary["steps"] == 8
    assert run.job["backend"]


def test_read_documents_stay_cached_under_another_name(tmp_path):
    run = Run(make_run(tmp_path, "one", steps=8))
    before = run.summary
    (run.path / "summary.json").unlink()
    (named,) = labelled([run])
    assert named.summary is before
    assert (named.name, run.label) == ("one", None)
    assert run.called("other", 3).number == 3


def test_missing_summary_gives_a_reason_on_access(tmp_path):
    run = Run(make_run(tmp_path, "one", steps=8, state="failed", summary=False))
    assert not run.has_summary
    with pytest.raises(UsageError, match=r"has no summary\.json; it failed"):
        _ = run.summary
    with pytest.raises(UsageError, match=r"has no summary\.json; it failed"):
        finished_run(run.path)
    assert [started.name for started in started_runs([run])] == ["one"]
