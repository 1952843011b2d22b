"""Calibration of real runs over a slow link, which bounds the exchange from below."""

import json
import signal

import pytest
from processes import MarkedRun, wait_until

from crosstrain.conformance.runs import run_job
from crosstrain.records.store.run_directory import RunReader

pytestmark = pytest.mark.cluster

BYTES_PER_SECOND = 5e6 / 8
SLOW = {"bandwidth": "5mbit", "nodes": 2, "data": "glyphs28", "batch_size": 10, "steps": 8, "eval_every": "end", "calibrate": True}


@pytest.mark.thorough
def test_interrupt_during_calibration_leaves_complete_run(tmp_path):
    """The slow link makes the calibration take some seconds, after the end of the training."""
    options = ["--backend", "torch", "--nodes", "2", "--bandwidth", "64kbit", "--steps", "4", "--calibrate", "--no-tensorboard"]
    with MarkedRun(["run", "--quiet", "--out", str(tmp_path), "--name", "run", *options], tmp_path) as run:
        events = tmp_path / "run" / "events.jsonl"
        wait_until(lambda: events.exists() and '"run_ended"' in events.read_text(), 60, "the end of the run")
        run.process.send_signal(signal.SIGINT)
        assert run.wait(60) == 0
        assert not run.alive()
    reader = RunReader(tmp_path / "run")
    causes = [record.detail["cause"] for record in reader.events() if record.event == "calibration_failed"]
    assert causes == ["interrupted by the user"]
    assert (reader.status()["state"], reader.calibration(), reader.summary()["time_shares"]) == ("succeeded", None, None)
    assert reader.summary()["steps"] == 4


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("torch", "sync"),
        pytest.param("torch", "async", marks=pytest.mark.slow),
        pytest.param("tf", "sync", marks=pytest.mark.slow),
        pytest.param("tf", "async", marks=pytest.mark.slow),
    ],
)
def test_calibration_slow_link_changes_only_exchange(tmp_path, backend, mode):
    run = run_job(tmp_path, backend=backend, mode=mode, network="isolated", tensorboard=False, **SLOW)
    calibration = json.loads((run.path / "calibration.json").read_text())
    assert calibration["payload_bytes"] == 4 * (784 * 10 + 10)
    # A ring of two passes each byte on once in each direction. The second worker is on another node than the parameter server,
    # to which all of it goes, and comes back.
    least = calibration["payload_bytes"] * (1 if mode == "sync" else 2) / BYTES_PER_SECOND
    far = calibration["workers"][1]
    assert far["communicate_seconds"] >= 0.8 * least
    assert far["message_seconds"] < far["communicate_seconds"] / 4
    for worker in calibration["workers"]:
        assert worker["data_seconds"] + worker["compute_seconds"] < least / 4
    shares = run.summary["time_shares"]
    assert shares["workers"][1]["communicate_seconds"] > 0.6 * shares["workers"][1]["step_seconds"]
    if backend == "torch" and mode == "async":
        assert 0 < shares["native"]["ps_busy_fraction"] < 0.5
