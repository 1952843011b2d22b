"""MLPerf's event log of real runs, read by MLPerf's own checker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from processes import MarkedRun, wait_until

from crosstrain.conformance.runs import trainer

pytestmark = pytest.mark.cluster

ON_EITHER = [pytest.param("tf", marks=pytest.mark.slow), "torch"]
PREFIX = ":::MLLOG "


def check(log):
    """Run the checker of training 4.0.0 with its common, open and image classification rules."""
    command = ["-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "4.0.0", "--werror"]
    return subprocess.run(
        [sys.executable, *command, "--log_output", str(log.with_name("checker.log")), str(log)], capture_output=True, text=True, timeout=60
    )


def lines(log):
    return [json.loads(line.removeprefix(PREFIX)) for line in log.read_text().splitlines()]


def status(log):
    (last,) = (line for line in lines(log) if line["key"] == "run_stop")
    return last["metadata"]["status"]


def evaluations(run):
    path = run / "evals.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ON_EITHER)
@pytest.mark.parametrize(("until", "expected"), [("accuracy>=0.5", "success"), ("accuracy>=1", "aborted")])
def test_mllog_checker_accepts_reached_and_missed_targets(tmp_path, backend, until, expected):
    arguments = ["--backend", backend, "--mllog", "--until", until, "--epochs", "2", "--out", str(tmp_path), "--name", "run"]
    done = trainer("run", *arguments)
    assert done.returncode == 0, done.stderr
    log = tmp_path / "run/mllog.txt"
    checked = check(log)
    assert checked.returncode == 0, checked.stderr
    assert status(log) == expected
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    logged = {line["key"]: line for line in lines(log)}
    assert logged["eval_accuracy"]["value"] == summary["eval"]["accuracy"]
    assert (logged["train_samples"]["value"], logged["eval_samples"]["value"]) == (1437, 360)
    assert logged["run_stop"]["metadata"]["samples_count"] == summary["examples"]
    seconds = (logged["run_stop"]["time_ms"] - logged["run_start"]["time_ms"]) / 1000
    assert seconds == pytest.approx(summary["run_seconds"], abs=0.1)
    assert (logged["run_start"]["time_ms"] - logged["init_start"]["time_ms"]) / 1000 == pytest.approx(summary["init_seconds"], abs=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ON_EITHER)
def test_mllog_checker_accepts_resumed_run(tmp_path, backend):
    run = tmp_path / "run"
    arguments = ["--backend", backend, "--mllog", "--epochs", "20000", "--checkpoint-every", "1000s", "--out", str(tmp_path)]
    with MarkedRun(["run", *arguments, "--name", "run", "--json"], tmp_path) as started:
        wait_until(lambda: evaluations(run) > 2 or started.process.poll() is not None, 90, "evaluations")
        assert started.process.poll() is None, started.stderr()
        started.process.send_signal(signal.SIGINT)
        assert started.wait(60) == 75, started.stderr()
        document = json.loads(started.stdout())
    assert (document.pop("path"), document["state"]) == (str(run), "interrupted")
    recorded = json.loads((run / "status.json").read_text())
    ended = {name: document.pop(name) for name in ("cause", "task", "exit_code")}
    assert ended == {name: recorded[name] for name in ended}
    assert (ended["cause"], ended["exit_code"]) != (None, 0)
    assert document == json.loads((run / "summary.json").read_text())
    log = run / "mllog.txt"
    checked = check(log)
    assert checked.returncode == 0, checked.stderr
    assert status(log) == "aborted"
    before = [line for line in lines(log) if line["key"] == "eval_accuracy"]

    done = trainer("run", "--resume", str(run), "--epochs", "+1")
    assert done.returncode == 0, done.stderr
    checked = check(log)
    assert checked.returncode == 0, checked.stderr
    assert status(log) == "success"
    after = [line for line in lines(log) if line["key"] == "eval_accuracy"]
    assert len(after) > len(before)
    assert [(line["value"], line["metadata"]) for line in after[: len(before)]] == [(line["value"], line["metadata"]) for line in before]


@pytest.mark.slow
def test_mllog_checker_accepts_async_run(tmp_path):
    arguments = ["--backend", "torch", "--mode", "async", "--nodes", "3", "--steps", "300", "--eval-every", "40steps", "--mllog"]
    done = trainer("run", *arguments, "--out", str(tmp_path), "--name", "run")
    assert done.returncode == 0, done.stderr
    checked = check(tmp_path / "run/mllog.txt")
    assert checked.returncode == 0, checked.stderr
    times = [line["time_ms"] for line in lines(tmp_path / "run/mllog.txt")]
    assert times == sorted(times)
