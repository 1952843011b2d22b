"""`trainer run` as users call it: cadences, stopping rules, output, weights and refusals."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from crosstrain.cli.main import main
from crosstrain.conformance.runs import read_run, run_job, trainer
from crosstrain.records.store.run_directory import RunReader

pytestmark = pytest.mark.cluster

TOY = Path(__file__).parent.parent / "toy"
STEPS_PER_EPOCH = 45
"""1,437 digits in batches of 32."""


@pytest.fixture(autouse=True)
def _toy_installed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])]))


def run(out, **options):
    return run_job(out, backend="toy", tensorboard=False, **options)


def test_run_evaluates_after_every_epoch_and_at_end(tmp_path):
    done = run(tmp_path, epochs=3)
    assert [record.step for record in done.evals] == [45, 90, 135]
    assert [record.epoch for record in done.evals] == [1, 2, 3]
    assert done.summary["steps"] == 135
    assert done.summary["examples"] == 3 * 1437
    assert {record.epoch for record in done.steps} == {0, 1, 2}


@pytest.mark.thorough
def test_task_output_before_assignment_is_in_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    done = trainer("run", "--backend", "toy", "--steps", "1", "--out", str(tmp_path), "--name", "run")
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "run/logs/0/worker-0.log").read_text()
    assert log.count("imported package") == 1
    assert "crosstrain.backends.base" in log
    assert [path.name for path in (tmp_path / "run/logs/0").iterdir()] == ["worker-0.log"]


@pytest.mark.thorough
def test_skipped_data_files_are_counted_and_named(tmp_path):
    for split, label in ((split, label) for split in ("train", "test") for label in ("a", "b")):
        folder = tmp_path / "pictures" / split / label
        folder.mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (10 * number, 20 * number, 30 * number)).save(folder / f"{number}.png")
    (tmp_path / "pictures/train/b/broken.png").write_bytes(b"no picture")
    data = f"image-folder:{tmp_path / 'pictures'}?size=8,skip-damaged=yes"
    done = trainer(
        "run", "--backend", "torch", "--data", data, "--steps", "2", "--batch-size", "4", "--out", str(tmp_path), "--name", "run"
    )
    assert done.returncode == 0, done.stderr
    assert "1 file was no usable picture and skipped in" in done.stderr
    (event,) = [event for event in RunReader(tmp_path / "run").events() if event.event == "files_left_out"]
    assert event.detail["count"] == 1
    assert "broken.png" in event.detail["files"][0]


@pytest.mark.thorough
def test_run_evaluates_every_n_steps_and_at_end(tmp_path):
    done = run(tmp_path, steps=50, eval_every="20steps")
    assert [record.step for record in done.evals] == [20, 40, 50]


@pytest.mark.thorough
def test_run_evaluates_only_at_end(tmp_path):
    assert [record.step for record in run(tmp_path, steps=50, eval_every="end").evals] == [50]


@pytest.mark.thorough
def test_run_evaluates_by_time(tmp_path):
    done = run(tmp_path, epochs=300, eval_every="0.2s")
    assert len(done.evals) >= 2
    assert done.evals[0].time_seconds >= 0.2
    assert len(done.evals) <= done.summary["run_seconds"] / 0.2 + 1


@pytest.mark.thorough
def test_no_plan_crosses_an_epoch_or_an_evaluation(tmp_path):
    done = run(tmp_path, epochs=4, eval_every="70steps")
    borders = {45, 90, 135, 70, 140}
    for record in done.steps:
        assert not any(record.step < border < record.step + record.count for border in borders)


def test_stops_at_the_target(tmp_path):
    done = run(tmp_path, until="accuracy>=0.9", epochs=50)
    assert done.summary["target_reached"] is True
    assert done.summary["eval"]["accuracy"] >= 0.9
    assert done.summary["steps"] < 50 * STEPS_PER_EPOCH
    assert done.summary["steps"] == done.summary["eval"]["step"]
    assert 0 < done.summary["time_to_target_seconds"] <= done.summary["run_seconds"]
    assert all(record.metrics["accuracy"] < 0.9 for record in done.evals[:-1])


@pytest.mark.thorough
def test_missed_target_is_reported(tmp_path):
    done = trainer("run", "--backend", "toy", "--until", "accuracy>=0.999", "--steps", "50", "--out", str(tmp_path))
    assert done.returncode == 0
    assert "accuracy>=0.999 was not reached" in done.stderr
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert (summary["target_reached"], summary["time_to_target_seconds"]) == (False, None)


@pytest.mark.thorough
def test_steps_cross_epochs(tmp_path):
    done = run(tmp_path, steps=STEPS_PER_EPOCH + 7)
    assert done.summary["steps"] == STEPS_PER_EPOCH + 7
    assert done.summary["examples"] == 1437 + 7 * 32


def test_standard_output_is_one_json_document(tmp_path):
    done = trainer("run", "--backend", "toy", "--steps", "20", "--json", "--out", str(tmp_path))
    document = json.loads(done.stdout)
    assert document["state"] == "succeeded"
    assert {key: value for key, value in document.items() if key != "path"} == RunReader(Path(document["path"])).summary()
    assert "evaluated" in done.stderr


def test_the_run_directory_is_private_and_complete(tmp_path):
    done = run(tmp_path, steps=20, nodes=2, name="mine")
    assert done.path == tmp_path / "mine"
    assert stat.S_IMODE(done.path.stat().st_mode) == 0o700
    documents = {f"{name}.json" for name in ("job", "env", "status", "summary")}
    lines = {f"{name}.jsonl" for name in ("steps", "evals", "events", "system")}
    assert {path.name for path in done.path.iterdir()} >= documents | lines | {"logs"}
    job = json.loads((done.path / "job.json").read_text())
    assert "secret" not in json.dumps(job)
    assert job["threads_per_task"] == [1, 1]
    events = [event.event for event in RunReader(done.path).events()]
    in_order = ["tasks_started", "cluster_ready", "run_started", "run_ended", "task_ended"]
    assert sorted(in_order, key=events.index) == in_order
    again = trainer("run", "--backend", "toy", "--steps", "5", "--name", "mine", "--out", str(tmp_path))
    assert again.returncode == 2
    assert "mine" in again.stderr
    assert read_run(done.path).summary == done.summary


@pytest.mark.thorough
def test_weights_are_canonical(tmp_path):
    done = run(tmp_path, steps=5)
    assert {name: (value.shape, value.dtype) for name, value in done.weights.items()} == {
        "dense.weight": ((10, 64), np.float32),
        "dense.bias": ((10,), np.float32),
    }
    assert not run(tmp_path, steps=5, save_final=False).weights


@pytest.mark.thorough
def test_cores_per_node_limit_the_threads_and_the_cpu(tmp_path):
    done = run(tmp_path, nodes=2, epochs=100, cores_per_node="0.5,0.25", eval_every="end")
    assert [node["cores_available"] for node in done.summary["per_node"]] == [0.5, 0.25]
    assert done.summary["per_node"][1]["cpu_cores_used"]["mean"] <= 0.3


@pytest.mark.thorough
def test_host_network_counts_sockets(tmp_path):
    done = trainer("run", "--backend", "toy", "--nodes", "2", "--network", "host", "--epochs", "30", "--json", "--out", str(tmp_path))
    assert "127.0.0.1" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["network_source"] == "sockets"
    first, second = summary["per_node"]
    assert first["network_sent_bytes"] == pytest.approx(second["network_received_bytes"], rel=0.02)
    assert first["network_sent_bytes"] > 30 * 22 * 650 * 4


@pytest.mark.parametrize(
    ("arguments", "key", "hint"),
    [
        (["--batch-size", "0"], "--batch-size", "at least 1"),
        (["--backend", "jax"], "--backend", "torch"),
        (["--model", "alexnett"], "--model", "logreg"),
        (["--mode", "asink"], "--mode", "async"),
        (["--lr", "fast"], "--lr", "number"),
        (["--until", "speed>=1"], "--until", "accuracy"),
        (["--bandwidth", "fast"], "--bandwidth", "mbit"),
        (["--bandwidth", "1mbit", "--network", "host"], "network", "isolated"),
        (["--ps", "2"], "ps", "async"),
        (["--cores-per-node", "1,1,1"], "cores", "one number"),
    ],
)
def test_wrong_requests_end_with_2_and_leave_nothing(tmp_path, monkeypatch, capsys, arguments, key, hint):
    """In this process, since none starts another; the next test uses a process."""
    monkeypatch.syspath_prepend(str(TOY))
    code = main(["run", *(["--backend", "toy"] if "--backend" not in arguments else []), *arguments, "--out", str(tmp_path / "runs")])
    message = capsys.readouterr().err
    assert code == 2
    assert key in message
    assert hint in message
    assert "Traceback" not in message
    assert not list(tmp_path.glob("runs/*"))


def test_wrong_request_exit_code_is_2(tmp_path):
    done = trainer("run", "--backend", "toy", "--batch-size", "0", "--out", str(tmp_path / "runs"))
    assert done.returncode == 2
    assert "--batch-size" in done.stderr
    assert "at least 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*"))


class TestProfiledSpeed:
    @pytest.mark.quick_cases("torch")
    @pytest.mark.parametrize("backend", ["torch", "tf"])
    def test_speed_excludes_traced_steps(self, tmp_path, backend):
        job = ("--backend", backend, "--steps", "2000", "--no-calibrate", "--no-save-final", "--json", "--quiet", "--out", str(tmp_path))
        done = trainer("run", *job, "--profile", "20", "--name", "run")
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
        untraced = [line for line in steps if line["profiled_seconds"] is None]
        assert summary["profiled_updates"] == 20 == 2000 - sum(line["count"] for line in untraced)
        assert 0 < summary["profile_seconds"] == pytest.approx(sum(line["profiled_seconds"] or 0 for line in steps))
        assert 0.5 < sum(line["seconds"] for line in untraced) / summary["train_seconds"] <= 1
        assert summary["examples_per_second"] == pytest.approx(sum(line["examples"] for line in untraced) / summary["train_seconds"])
        whole = summary["train_seconds"] + summary["profile_seconds"] + summary["eval_seconds"] + summary["checkpoint_seconds"]
        assert whole <= summary["run_seconds"]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", "tf"])
def test_traced_async_steps_are_counted_separately(tmp_path, backend):
    done = run_job(tmp_path, backend=backend, mode="async", nodes=2, steps=600, profile=20, calibrate=False)
    profiled = [record for record in done.steps if record.profiled_seconds is not None]
    first_plain = next(index for index, record in enumerate(done.steps) if record.profiled_seconds is None)
    assert profiled == list(done.steps[:first_plain])
    traced = [record for record in profiled if record.worker == 0] if backend == "torch" else profiled
    assert sum(record.count for record in traced) >= 20 + (backend == "torch")
    assert sum(record.count for record in traced[:-1]) < 20 + (backend == "torch")
    assert done.summary["profiled_updates"] == sum(record.count for record in profiled)
    assert done.summary["profile_seconds"] == pytest.approx(sum(record.profiled_seconds for record in profiled))
    assert done.summary["profile_seconds"] + done.summary["train_seconds"] <= done.summary["run_seconds"]


@pytest.mark.thorough
def test_trace_of_all_updates_leaves_speed_unknown(tmp_path):
    done = trainer("run", "--backend", "torch", "--steps", "20", "--profile", "20", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["profiled_updates"], summary["examples_per_second"], summary["steps_per_second"]) == (20, None, None)
    explained = trainer("explain", summary["path"])
    assert (explained.returncode, explained.stderr) == (0, "")
    assert "profiling" in explained.stdout


@pytest.mark.thorough
def test_trace_longer_than_run_is_reported(tmp_path):
    done = trainer("run", "--backend", "torch", "--steps", "3", "--profile", "50", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "nothing was traced: the run ended before the 50 steps of --profile were over" in done.stderr


def test_missing_gpu_is_refused(tmp_path):
    """The task finds out; the user reads one line, not a traceback."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    done = trainer("run", "--backend", "torch", "--device", "gpu", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "gpu" in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
