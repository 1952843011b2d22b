"""TensorBoard event files: shown by a real TensorBoard, written without a framework."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import replace

import pytest
from processes import wait_until
from run_samples import EVALUATION, RESUMED, STEP, a_job, resumed_run, resumed_samples, sample

from crosstrain.metrics import LOSS
from crosstrain.metrics.base import ACCURACY
from crosstrain.records.loggers.base import TrainingCurve, replay
from crosstrain.records.loggers.tensorboard import FOLDER, TensorBoardWriter
from crosstrain.records.loggers.tensorboard import figures as hparams_figures
from crosstrain.records.store.run_directory import RunReader
from crosstrain.records.store.schema import StepRecord


def write_a_run(path):
    writer = TensorBoardWriter(path)
    writer.system(sample(0, -0.5, network_sent_bytes=0, network_received_bytes=None))
    for group in range(4):
        writer.step(StepRecord(10 * group, 10, 0, 0.5 * (group + 1), 0.5, 100, (float(4 - group),) * 10, (0.1 / (group + 1),)))
    writer.system(sample(0, 0.5, network_sent_bytes=2000, network_received_bytes=None))
    writer.evaluation(EVALUATION)
    writer.evaluation(replace(EVALUATION, step=40, loss=0.5, metrics={"accuracy": 0.9375}))
    writer.close()
    writer.close()


EXPECTED = {
    "train/loss": [(10, 4.0), (20, 3.0), (30, 2.0), (40, 1.0)],
    "train/learning_rate": [(10, 0.1), (20, 0.05), (30, 0.1 / 3), (40, 0.025)],
    "train/steps_per_second": [(10, 20.0), (20, 20.0), (30, 20.0), (40, 20.0)],
    "train/examples_per_second": [(10, 200.0), (20, 200.0), (30, 200.0), (40, 200.0)],
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


def test_values_can_be_read_back(tmp_path):
    write_a_run(tmp_path)
    values_by_tag = read_back(tmp_path)
    assert set(values_by_tag) == set(EXPECTED)
    for tag, points in EXPECTED.items():
        assert [step for step, _ in values_by_tag[tag]] == [step for step, _ in points]
        assert [value for _, value in values_by_tag[tag]] == pytest.approx([value for _, value in points])


def test_points_of_speed_exclude_profiled_updates():
    curve, points = TrainingCurve(1.0), []
    for group, (now, profiled) in enumerate([(6.0, 6.0), (6.5, 0.5), (7.0, None), (9.5, 2.0), (10.0, None), (10.5, None), (11.0, None)]):
        points.append(curve.add(replace(STEP, step=2 * group, time_seconds=now, seconds=0.5, profiled_seconds=profiled)))
    known = [point["train/examples_per_second"] for point in points if point and "train/examples_per_second" in point]
    assert known == pytest.approx([40.0] * len(known))
    assert len(known) >= 2


def test_long_run_has_a_bounded_number_of_points(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for step in range(20_000):  # 2,000 s: 20,000 points at the initial spacing
        writer.step(replace(STEP, step=step, count=1, losses=(1.0,), time_seconds=0.1 * (step + 1), seconds=0.1))
    writer.close()
    points = read_back(tmp_path)["train/loss"]
    assert 3000 < len(points) < 5000
    assert points[-1][0] == 20_000
    assert {value for _, value in points} == {1.0}


def test_point_is_the_mean_of_updates_since_the_last(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for step, loss in enumerate((4.0, 2.0, 9.0)):
        writer.step(replace(STEP, step=step, count=1, losses=(loss,), time_seconds=0.06 * (step + 1), seconds=0.06))
    writer.close()
    assert read_back(tmp_path)["train/loss"] == [(2, 3.0), (3, 9.0)]


def check_resumed(values_by_tag):
    for node, began in ((0, 0), (1, RESUMED)):
        for figure, expected in (("cpu_cores_used", 0.2), ("network_sent_bytes_per_second", 0.2e6)):
            milliseconds, values = zip(*values_by_tag[f"system/node{node}/{figure}"], strict=True)
            assert list(milliseconds) == sorted(set(milliseconds))
            assert milliseconds[0] > 1000 * began
            assert list(values) == pytest.approx([expected] * len(values), rel=0.05)


@pytest.mark.parametrize("marked", [True, False])
def test_replayed_run_has_unique_times(tmp_path, marked):
    """It is resumed once more: all of its samples are in the records."""
    path = resumed_run(tmp_path, marked)
    writer = TensorBoardWriter(path, zero_unix_seconds=1e9)
    replay(RunReader(path), writer)
    writer.close()
    check_resumed(read_back(path))


def test_resumed_run_has_unique_times(tmp_path):
    """Delayed samples of the initialisation arrive after the replayed ones."""
    writer = TensorBoardWriter(tmp_path)
    for record in resumed_samples(marked=True):
        writer.system(record)
    writer.close()
    check_resumed(read_back(tmp_path))


ALONE = """
import sys
from pathlib import Path
from crosstrain.records.store import schema as records
before = len(sys.modules)
from crosstrain.records.loggers.tensorboard import TensorBoardWriter
writer = TensorBoardWriter(Path(sys.argv[1]))
writer.evaluation(records.EvalRecord(1, 1.0, 1.0, 0.1, "test", 10, 0.5, {"accuracy": 0.5}, 1))
writer.close()
print(len(sys.modules) - before, sorted({"tensorflow", "torch", "keras"} & set(sys.modules)))
"""


def test_writing_loads_no_framework_and_starts_fast(tmp_path):
    result = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, check=True)
    modules, _, frameworks = result.stdout.strip().partition(" ")
    assert frameworks == "[]"
    assert int(modules) < 700  # 470 are imported, in 0.2 to 0.5 s; with tensorflow it is thousands, and 5 s


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


@contextmanager
def tensorboard(folder):
    """Start a real server over `folder` on a port of its choice; yield its address."""
    options = ["--logdir", str(folder), "--port", "0", "--host", "127.0.0.1", "--load_fast=false", "--reload_interval", "1"]
    command = [sys.executable, "-W", "ignore", "-c", SERVE, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        try:
            line = next(line for line in iter(server.stderr.readline, "") if "http://" in line)
            yield "http://" + line.split("http://")[1].split()[0]
        finally:
            server.terminate()
            try:
                server.communicate(timeout=20)
            except subprocess.TimeoutExpired:  # seen once: its shutdown hung
                server.kill()


def test_real_tensorboard_shows_the_values(tmp_path):
    write_a_run(tmp_path / "run")
    with tensorboard(tmp_path / "run" / FOLDER) as address:
        for tag, points in EXPECTED.items():
            shown = wait_for(address, tag)
            assert [step for step, _ in shown] == [step for step, _ in points]
            assert [value for _, value in shown] == pytest.approx([value for _, value in points])


# The view that lays runs side by side ----------------------------------------------------------------------------------


def write_a_compared_run(out, name, job, state, summary):
    writer = TensorBoardWriter(out / name, job, metrics=(ACCURACY.info, LOSS))
    writer.step(StepRecord(0, 10, 0, 1.0, 1.0, 100, (0.5,) * 10, (0.1,)))
    metrics = {"accuracy": 0.75} if name == "one" else {"accuracy": 0.875, "bleu": 31.5}  # missing in the first run
    writer.evaluation(replace(EVALUATION, step=10, loss=0.5, metrics=metrics))
    writer.on_end(state, summary)
    writer.close()


def ask_hparams(address, what, request):
    body = json.dumps(request).encode()
    query = urllib.request.Request(f"{address}data/plugin/hparams/{what}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(query, timeout=10) as answer:
        return json.load(answer)


def both_runs(address):
    """Return the two runs, once the server has read them completely."""
    statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
    groups = ask_hparams(address, "session_groups", {"allowedStatuses": statuses, "sliceSize": 10}).get("sessionGroups", [])
    return groups if len(groups) == 2 and all(group["sessions"][0].get("endTimeSecs") for group in groups) else None


def test_real_tensorboard_compares_runs(tmp_path):
    first = a_job(tmp_path, nodes=3, global_batch_size=40, lr=0.25)
    two = a_job(tmp_path, backend="torch", mode="async", optimizer="adam", seed=7, cores_per_node="0.5")
    write_a_compared_run(
        tmp_path,
        "one",
        first,
        "succeeded",
        {"examples_per_second": 1234.5, "time_to_target_seconds": 2.5, "run_seconds": 3, "final_train_loss": 0.25},
    )
    write_a_compared_run(tmp_path, "two", two, "failed", {"examples_per_second": 99.0, "time_to_target_seconds": None, "run_seconds": 4})
    with tensorboard(tmp_path) as address:
        groups = wait_until(lambda: both_runs(address), 30, "both runs")
        experiment = ask_hparams(address, "experiment", {})
    kinds = {info["name"]: info["type"] for info in experiment["hparamInfos"]}
    assert {kinds["backend"], kinds["mode"]} == {"DATA_TYPE_STRING"}
    assert {kinds[name] for name in ("nodes", "workers", "batch_size", "global_batch_size", "lr", "seed")} == {"DATA_TYPE_FLOAT64"}
    assert kinds["deterministic"] == "DATA_TYPE_BOOL"
    modes = next(info for info in experiment["hparamInfos"] if info["name"] == "mode")
    assert modes["domainDiscrete"] == ["sync", "async"]
    assert {"out", "name", "mlflow"}.isdisjoint(kinds)
    assert [info["name"]["tag"] for info in experiment["metricInfos"]] == list(hparams_figures((ACCURACY.info, LOSS)))

    sessions = {group["sessions"][0]["name"].split("/")[0]: group for group in groups}
    settings = {name: group["hparams"] for name, group in sessions.items()}
    for job, name in ((first, "one"), (two, "two")):
        for field in ("backend", "mode", "model", "data", "nodes", "lr", "optimizer", "precision", "seed", "deterministic"):
            assert settings[name][field] == getattr(job, field), (name, field)
    assert {field: settings["one"][field] for field in ("workers", "batch_size", "global_batch_size")} == {
        "workers": 3,
        "batch_size": 14,
        "global_batch_size": 40,
    }
    assert settings["two"]["cores_per_node"] == "0.5"
    assert settings["one"].get("cores_per_node") is None
    figures = {name: {value["name"]["tag"]: value["value"] for value in group["metricValues"]} for name, group in sessions.items()}
    assert figures["one"] == {
        "eval/accuracy": 0.75,
        "eval/loss": 0.5,
        "summary/examples_per_second": 1234.5,
        "summary/time_to_target_seconds": 2.5,
        "summary/run_seconds": 3,
        "summary/final_train_loss": 0.25,
    }
    assert (figures["two"]["eval/accuracy"], figures["two"]["eval/bleu"]) == (0.875, 31.5)
    assert "summary/time_to_target_seconds" not in figures["two"]
    assert {name: group["sessions"][0]["status"] for name, group in sessions.items()} == {"one": "STATUS_SUCCESS", "two": "STATUS_FAILURE"}
