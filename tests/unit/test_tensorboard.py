"""TensorBoard event files: a real TensorBoard shows the values, and writing them loads no framework."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace

import pytest
from run_samples import EVALUATION, STEP, sample

from crosstrain.metrics.records import StepRecord
from crosstrain.metrics.tensorboard import FOLDER, TensorBoardWriter


def write_a_run(path):
    writer = TensorBoardWriter(path)
    writer.system(sample(0, -0.5, network_sent_bytes=0, network_received_bytes=None))
    for group in range(4):
        writer.step(StepRecord(10 * group, 10, 0, 0.5 * (group + 1), 0.5, 100, (float(4 - group),) * 10, (0.1 / (group + 1),)))
    writer.system(sample(0, 0.5, network_sent_bytes=2000, network_received_bytes=None))
    writer.evaluation(EVALUATION)
    writer.evaluation(replace(EVALUATION, step=40, loss=0.5, accuracy=0.9375))
    writer.close()
    writer.close()


EXPECTED = {
    "train/loss": [(10, 4.0), (20, 3.0), (30, 2.0), (40, 1.0)],
    "train/learning_rate": [(10, 0.1), (20, 0.05), (30, 0.1 / 3), (40, 0.025)],
    "train/steps_per_second": [(10, 20.0), (20, 20.0), (30, 20.0), (40, 20.0)],
    "eval/loss": [(10, 0.75), (40, 0.5)],
    "eval/accuracy": [(10, 0.875), (40, 0.9375)],
    "system/node0/cpu_cores_used": [(500, 1.5)],
    "system/node0/memory_rss_bytes": [(500, 200_000_000)],
    "system/node0/network_sent_bytes_per_second": [(500, 2000.0)],
}


def read_back(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / FOLDER), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_value_can_be_read_back(tmp_path):
    write_a_run(tmp_path)
    found = read_back(tmp_path)
    assert set(found) == set(EXPECTED)
    for tag, points in EXPECTED.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points]
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in points])


def test_a_long_run_has_a_bounded_number_of_points(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for step in range(20_000):  # 2,000 s of run clock: 20,000 points at the first spacing
        writer.step(replace(STEP, step=step, count=1, losses=(1.0,), time_seconds=0.1 * (step + 1), seconds=0.1))
    writer.close()
    points = read_back(tmp_path)["train/loss"]
    assert 3000 < len(points) < 5000
    assert points[-1][0] == 20_000
    assert {value for _, value in points} == {1.0}


def test_a_point_is_the_mean_of_the_updates_since_the_one_before(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for step, loss in enumerate((4.0, 2.0, 9.0)):
        writer.step(replace(STEP, step=step, count=1, losses=(loss,), time_seconds=0.06 * (step + 1), seconds=0.06))
    writer.close()
    assert read_back(tmp_path)["train/loss"] == [(2, 3.0), (3, 9.0)]


ALONE = """
import sys, time
from pathlib import Path
from crosstrain.metrics import records
start = time.process_time()
from crosstrain.metrics.tensorboard import TensorBoardWriter
writer = TensorBoardWriter(Path(sys.argv[1]))
writer.evaluation(records.EvalRecord(1, 1.0, 1.0, 0.1, "test", 10, 0.5, 0.5, 1))
writer.close()
print(time.process_time() - start, sorted({"tensorflow", "torch", "keras"} & set(sys.modules)))
"""


def test_writing_loads_no_framework_and_is_cheap_to_begin(tmp_path):
    result = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, check=True)
    seconds, _, frameworks = result.stdout.strip().partition(" ")
    assert frameworks == "[]"
    assert float(seconds) < 1.0  # measured 0.2 s; with tensorflow it is 5 s and more


# A real server ---------------------------------------------------------------------------------------------------------

SERVE = """
import sys, types
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
from tensorboard.main import run_main
run_main()
"""
"""`python -m tensorboard.main`, save that it does not import tensorflow, which takes seconds and changes nothing here."""


def ask(address, tag):
    query = urllib.parse.urlencode({"run": ".", "tag": tag})
    with urllib.request.urlopen(f"{address}data/plugin/scalars/scalars?{query}", timeout=10) as answer:
        return [(step, value) for _, step, value in json.load(answer)]


def wait_for(address, tag, seconds=30.0):
    end = time.monotonic() + seconds
    while True:
        try:
            return ask(address, tag)
        except urllib.error.HTTPError:  # not loaded yet
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def test_a_real_tensorboard_shows_the_values(tmp_path):
    write_a_run(tmp_path / "run")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        SERVE,
        "--logdir",
        str(tmp_path / "run" / FOLDER),
        "--port",
        "0",
        "--host",
        "127.0.0.1",
        "--load_fast=false",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stderr is not None
            lines = iter(server.stderr.readline, "")
            line = next(line for line in lines if "http://" in line)
            address = "http://" + line.split("http://")[1].split()[0]
            for tag, points in EXPECTED.items():
                found = wait_for(address, tag)
                assert [step for step, _ in found] == [step for step, _ in points]
                assert [value for _, value in found] == pytest.approx([value for _, value in points])
        finally:
            server.terminate()
