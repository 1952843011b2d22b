"""Cut or missing records are reported by every command; a complete run has no warning."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import make_run

from crosstrain.cli.group import invoke
from crosstrain.report.runs.run import Run, lost_updates

STEPS = 40
COMMANDS = [
    "compare {run}",
    "compare {run} --json",
    "compare {run} --curves loss",
    "report {run} -o {folder}/report.html",
    "explain {run}",
    "watch {run}",
    "runs show {run}",
    "runs export {run} --what steps -o -",
]


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path, "one", steps=STEPS, calibrated=True)


def output_of(capsys, command, run):
    capsys.readouterr()
    code = invoke(command.format(run=run, folder=run.parent).split())
    captured = capsys.readouterr()
    assert code == 0, captured
    return captured.out + captured.err


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_a_line(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[4:]))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", [cut, without_a_line])
def test_lost_updates_are_reported_by_every_command(run, capsys, command, damage):
    assert "steps.jsonl" not in output_of(capsys, command, run).replace("steps.jsonl (", "")
    damage(run / "steps.jsonl")
    assert f"{run / 'steps.jsonl'} holds " in output_of(capsys, command, run)


@pytest.mark.parametrize("command", [command for command in COMMANDS if "curves" not in command])
def test_missing_records_are_reported_by_every_command(run, capsys, command):
    (run / "steps.jsonl").unlink()
    assert f"{run / 'steps.jsonl'} is missing, with the {STEPS} updates that the run made" in output_of(capsys, command, run)


def test_report_shows_lost_updates(run, capsys):
    cut(run / "steps.jsonl")
    output_of(capsys, "report {run} -o {folder}/report.html", run)
    assert f'<p class="warn">{run / "steps.jsonl"} holds ' in (run.parent / "report.html").read_text()


def test_failed_run_has_no_expected_updates(tmp_path):
    run = make_run(tmp_path, "one", steps=STEPS, state="failed")
    cut(run / "steps.jsonl")
    assert lost_updates(Run(run)) is None


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1))
def test_any_lost_update_is_noticed(whole_run, share):
    run, content = whole_run
    kept = content[: round(share * len(content))]
    (run / "steps.jsonl").write_bytes(kept)
    left = sum(json.loads(line)["count"] for line in kept.splitlines() if line.endswith(b"}"))
    assert (lost_updates(Run(run)) is None) == (left == STEPS)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("whole"), "one", steps=STEPS)
    return run, (run / "steps.jsonl").read_bytes()
