"""MLPerf's event log: its lines, their order and their values."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from dataclasses import replace

import pytest
from run_samples import a_job

from crosstrain.records.loggers.mllog import FILE, MLLogWriter
from crosstrain.records.store.run_directory import RunReader, RunWriter
from crosstrain.records.store.schema import EvalRecord, EventRecord, StepRecord

BEGAN, ZERO = 1_700_000_000.0, 1_700_000_003.0
RECORDS = (
    EventRecord("tasks_started", -1.0),
    EventRecord("run_started", 0.0),
    StepRecord(0, 5, 0, 0.5, 0.4, 50, (1.0,) * 5, (0.1,)),
    EvalRecord(5, 0.5, 0.75, 0.2, "test", 20, 0.9, {"accuracy": 0.5}, 5),
    StepRecord(5, 5, 0, 1.25, 0.4, 50, (0.5,) * 5, (0.1,)),
    EventRecord("epoch_ended", 1.25, {"epoch": 1}),
    EvalRecord(10, 1.0, 1.5, 0.2, "test", 20, 0.6, {"accuracy": 0.9}, 10),
    StepRecord(10, 2, 1, 1.75, 0.2, 20, (0.4, 0.4), (0.1,)),
    EventRecord("run_ended", 2.0),
)
KEYS = [
    *("init_stop", "run_start", "epoch_start", "block_start"),
    *("block_stop", "eval_start", "eval_accuracy", "eval_loss", "eval_stop", "block_start", "epoch_stop"),
    *("block_stop", "eval_start", "eval_accuracy", "eval_loss", "eval_stop", "epoch_start", "block_start"),
    *("block_stop", "run_stop"),
]


def take(writer, record):
    {StepRecord: writer.step, EvalRecord: writer.evaluation, EventRecord: writer.event}[type(record)](record)


def write(path, records=RECORDS, **fields):
    writer = MLLogWriter(path, a_job(path, **fields), {"train": 100, "test": 20}, BEGAN, ZERO)
    for record in records:
        take(writer, record)
    writer.close()
    writer.close()
    return read(path)


def read(path):
    texts = (path / FILE).read_text().splitlines()
    assert all(text.startswith(":::MLLOG {") for text in texts)
    return [json.loads(text.removeprefix(":::MLLOG ")) for text in texts]


def entries(lines, key):
    return [(line["time_ms"] - round(ZERO * 1000), line["value"], line["metadata"]) for line in lines if line["key"] == key]


def test_log_lines_are_in_order_of_events(tmp_path):
    lines = write(tmp_path)
    keys = [line["key"] for line in lines]
    assert keys[keys.index("init_stop") :] == KEYS
    assert keys[:2] == ["cache_clear", "init_start"]
    assert entries(lines, "init_start") == [(-3000, None, {})]
    assert entries(lines, "run_start") == [(0, None, {})]
    assert entries(lines, "epoch_start") == [
        (100, None, {"epoch_num": 1, "samples_count": 0}),
        (1550, None, {"epoch_num": 2, "samples_count": 100}),
    ]
    assert entries(lines, "epoch_stop") == [(1250, None, {"epoch_num": 1, "samples_count": 100})]
    assert entries(lines, "eval_start") == [
        (550, None, {"epoch_num": 0.5, "samples_count": 50}),
        (1300, None, {"epoch_num": 1.0, "samples_count": 100}),
    ]
    assert [value for _, value, _ in entries(lines, "eval_accuracy")] == [0.5, 0.9]
    assert entries(lines, "run_stop") == [(2000, None, {"status": "success", "samples_count": 120})]
    assert {line["event_type"] for line in lines if line["key"].endswith("_stop")} == {"INTERVAL_END"}
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_times_never_go_back(tmp_path):
    late = StepRecord(0, 5, 0, 0.5, 0.9, 50, (1.0,) * 5, (0.1,))  # by its clock it began before the run
    times = [line["time_ms"] for line in write(tmp_path, [RECORDS[1], late, *RECORDS[3:]])]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("until", "last", "expected"),
    [
        (None, None, "success"),
        ("accuracy>=0.9", None, "success"),
        ("loss<=0.55", EvalRecord(12, 1.2, 1.9, 0.1, "test", 20, 0.5, {"accuracy": 0.8}, 12), "success"),
        ("accuracy>=0.95", None, "aborted"),
        (None, EventRecord("run_interrupted", 2.5, {"cause": "interrupted by the user"}), "aborted"),
        (None, EventRecord("run_failed", 2.5, {"cause": "worker-1 was killed"}), "aborted"),
    ],
)
def test_status_is_success_where_the_goal_was_met(tmp_path, until, last, expected):
    lines = write(tmp_path, [*RECORDS, *([last] if last else [])], until=until)
    ((time_ms, _, metadata),) = entries(lines, "run_stop")
    assert (time_ms, metadata["status"]) == (2000, expected)


def test_run_that_never_started_has_no_end(tmp_path):
    keys = {line["key"] for line in write(tmp_path, [EventRecord("run_failed", -1.0)])}
    assert "init_start" in keys
    assert not keys & {"init_stop", "run_start", "run_stop"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"lr": 0.1, "momentum": 0.9},
            {"opt_name": "sgd", "opt_base_learning_rate": 0.1, "sgd_opt_momentum": 0.9, "opt_weight_decay": 0.0},
        ),
        (
            {"optimizer": "adam", "beta1": 0.8},
            {"opt_name": "adam", "opt_adam_beta_1": 0.8, "opt_adam_beta_2": 0.999, "opt_adam_epsilon": 1e-8},
        ),
        ({"optimizer": "adamw", "weight_decay": 0.01}, {"opt_name": "adamw", "opt_adamw_weight_decay": 0.01}),
        ({"clip_norm": 0.5}, {"opt_gradient_clip_norm": 0.5}),
        ({"schedule": "step", "schedule_gamma": 0.5}, {"opt_learning_rate_decay_schedule": "step", "opt_learning_rate_decay_factor": 0.5}),
        ({"nodes": 3, "batch_size": 16, "seed": 7}, {"global_batch_size": 48, "seed": 7}),
        ({"nodes": 3, "batch_size": 16, "mode": "async"}, {"global_batch_size": 16}),
    ],
)
def test_settings_have_mlperf_keys(tmp_path, fields, expected):
    values = {line["key"]: line["value"] for line in write(tmp_path, **fields)}
    assert {key: values[key] for key in expected} == expected


def test_resumed_run_logs_its_beginning_again(tmp_path):
    job = a_job(tmp_path, name="run")
    store = RunWriter.create(job)
    store.write_job(job.model_dump(mode="json"))
    for record in RECORDS[:-1]:
        {StepRecord: store.step, EvalRecord: store.evaluation, EventRecord: store.event}[type(record)](record)
    store.close()
    writer = MLLogWriter(store.path, job, {"train": 100, "test": 20}, BEGAN, ZERO)
    writer.replay(RunReader(store.path))
    writer.event(RECORDS[-1])
    writer.close()
    assert read(store.path) == write(tmp_path)


def accepted(log):
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--ruleset", "4.0.0", "--werror"]
    done = subprocess.run(
        [*command, "--log_output", str(log.with_name("checker.log")), str(log)], capture_output=True, text=True, timeout=60
    )
    return done.returncode == 0


@pytest.mark.parametrize("metrics", [{"bleu": 31.5, "chrf": 55.0}, {"top5": 0.5, "mean_rank": 3.0}])
def test_checker_accepts_a_log_without_accuracy(tmp_path, metrics):
    records = [replace(record, metrics=metrics) if isinstance(record, EvalRecord) else record for record in RECORDS]
    write(tmp_path, records)
    assert accepted(tmp_path / FILE)
    name, value = next(iter(metrics.items()))
    entries = [line for line in read(tmp_path) if line["key"] == "eval_accuracy"]
    assert {(line["value"], line["metadata"]["metric"]) for line in entries} == {(0.315 if name == "bleu" else value, name)}
    assert [line["value"] for line in read(tmp_path) if line["key"] == f"eval_{name}"] == [value] * len(entries)


def test_checker_accepts_a_log_only_with_its_end(tmp_path):
    write(tmp_path)
    log = tmp_path / FILE
    assert accepted(log)
    torn = tmp_path / "torn.txt"
    torn.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if '"run_stop"' not in line))
    assert not accepted(torn)
