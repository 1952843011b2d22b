"""Runs logged to a real MLflow server, read back through its REST interface."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import pytest
from own_models import importable
from processes import MarkedRun, free_ports, wait_until

from crosstrain.conformance.runs import read_run, trainer
from crosstrain.core.job import Job
from crosstrain.records.store.run_directory import RunReader

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]

TOY = Path(__file__).parent.parent / "toy"


@pytest.fixture(autouse=True)
def _toy_installed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])]))


class Server:
    """REST requests of the tests to an MLflow server."""

    def __init__(self, port):
        self.port = port
        self.address = f"http://127.0.0.1:{port}"

    def ask(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def runs(self, experiment):
        """The runs of an experiment, the newest first."""
        answer = json.loads(self.ask(f"/api/2.0/mlflow/experiments/get-by-name?experiment_name={experiment}"))["experiment"]
        body = {"experiment_ids": [answer["experiment_id"]], "order_by": ["attributes.start_time DESC"]}
        return json.loads(self.ask("/api/2.0/mlflow/runs/search", body))["runs"]

    def history(self, run, key):
        """Every point of a metric: (step, value)."""
        query = f"/api/2.0/mlflow/metrics/get-history?run_id={run['info']['run_id']}&metric_key={key}"
        return [(point["step"], point["value"]) for point in json.loads(self.ask(query))["metrics"]]


def pairs(run, kind):
    return {item["key"]: item["value"] for item in run["data"][kind]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlflow")
    server = Server(free_ports(1))
    where = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts")]
    command = [sys.executable, "-m", "mlflow", "server", *where, "--host", "127.0.0.1", "--port", str(server.port), "--workers", "1"]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True)
    try:
        wait_until(lambda: answers(server, process), 120, "the MLflow server")
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it has started others, in its own session
        process.wait()


def answers(server, process):
    assert process.poll() is None, "the MLflow server has ended"
    with suppress(urllib.error.URLError, ConnectionError):
        return server.ask("/health") == b"OK"
    return False


class Forwarder:
    """A port before the server's that can be cut off, with `cut_at` after these bytes."""

    def __init__(self, target, cut_at=None):
        self.port = free_ports(1)
        self.address = f"http://127.0.0.1:{self.port}"
        self._target = target
        self._cut_at = cut_at
        self._sockets = []
        self.restore()

    def restore(self):
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self):
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self, listener):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # cut off
                return
            upstream = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, upstream]
            for source, sink in ((client, upstream), (upstream, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source, sink):
        with suppress(OSError):
            while data := source.recv(65536):
                if self._cut_at is not None and self._cut_at in data:
                    self.cut()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def forwarding(*arguments):
    forwarder = Forwarder(*arguments)
    try:
        yield forwarder
    finally:
        forwarder.cut()


def all_of(history, values):
    """Whether each point is one of the values, and there are points."""
    return bool(history) and all(any(value == pytest.approx(known) for known in values) for _, value in history)


@pytest.mark.slow
def test_mlflow_metrics_of_custom_model(tmp_path, server):
    model = ["--backend", "torch", "--model", "foreign_metrics.ranked", "--data", "digits", "--lr", "0.02", "--no-calibrate"]
    options = [*model, "--epochs", "5", "--eval-every", "10steps", "--until", "mean_rank<=2", "--mlflow", server.address]
    done = trainer(
        *("run", *options, "--mlflow-experiment", "ranked", "--out", str(tmp_path), "--name", "ranked"), environment=importable(TOY.parent)
    )
    assert done.returncode == 0, done.stderr
    run, record = server.runs("ranked")[0], read_run(tmp_path / "ranked")
    for name in ("top5", "mean_rank"):
        assert server.history(run, f"eval/{name}") == [
            (evaluation.step, pytest.approx(evaluation.metrics[name])) for evaluation in record.evals
        ]
    assert pairs(run, "metrics")["eval/mean_rank"] <= 2
    assert not [name for name in pairs(run, "metrics") if "accuracy" in name]
    assert (pairs(run, "params")["until"], pairs(run, "params")["model"]) == ("mean_rank<=2", "foreign_metrics.ranked")


def test_mlflow_has_run_and_its_continuation(tmp_path, server):
    options = ["--backend", "toy", "--nodes", "2", "--epochs", "300", "--eval-every", "150epoch", "--sample-interval", "0.1"]
    mlflow_options = ["--mlflow", server.address.replace("http://", "http://someone:secret@"), "--mlflow-experiment", "one"]
    done = trainer("run", *options, *mlflow_options, "--until", "accuracy>=0.9", "--out", str(tmp_path), "--name", "first", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    run, record = server.runs("one")[0], read_run(tmp_path / "first")

    assert (run["info"]["run_name"], run["info"]["status"]) == ("first", "FINISHED")
    status = RunReader(tmp_path / "first").status()
    created, changed = (1000 * datetime.fromisoformat(status[moment]).timestamp() for moment in ("created_at", "changed_at"))
    assert run["info"]["start_time"] <= created < run["info"]["end_time"]
    assert changed - run["info"]["start_time"] == pytest.approx(1000 * record.summary["total_seconds"], abs=2000)
    assert pairs(run, "tags")["crosstrain.run_directory"] == str(tmp_path / "first")
    assert "--until 'accuracy>=0.9'" in pairs(run, "tags")["mlflow.source.name"]
    params, job = pairs(run, "params"), RunReader(tmp_path / "first").job()
    assert {"out", "name", "mlflow", "mlflow_experiment"}.isdisjoint(params)
    resolved = {"batch_size": 32, "global_batch_size": 64, "ps": None}
    expected = {name: {**job, **resolved}[name] for name in Job.model_fields if name in params}
    assert {name: value for name, value in params.items() if name != "workers"} == {name: str(value) for name, value in expected.items()}
    assert params["workers"] == "2"

    assert server.history(run, "eval/accuracy") == [
        (evaluation.step, pytest.approx(evaluation.metrics["accuracy"])) for evaluation in record.evals
    ]
    assert server.history(run, "eval/loss") == [(evaluation.step, pytest.approx(evaluation.loss)) for evaluation in record.evals]
    assert server.history(run, "train/loss")[-1][0] == summary["steps"]
    assert server.history(run, "train/learning_rate")[-1][1] == 0.05
    last = pairs(run, "metrics")
    for figure in ("examples_per_second", "time_to_target_seconds", "final_train_loss"):
        assert last[f"summary/{figure}"] == pytest.approx(summary[figure])
    samples = list(RunReader(tmp_path / "first").system())
    for node in (0, 1):
        samples_of_node = [sample for sample in samples if sample.node == node and sample.time_seconds >= 0]
        name = f"system/node_{node}/"
        sizes = [sample.memory_rss_bytes / 1e6 for sample in samples_of_node if sample.memory_rss_bytes is not None]
        assert all_of(server.history(run, f"{name}system_memory_usage_megabytes"), sizes)
        fractions = [100 * sample.cpu_fraction for sample in samples_of_node if sample.cpu_fraction is not None]
        assert all_of(server.history(run, f"{name}cpu_utilization_percentage"), fractions)
        sent = [(sample.network_sent_bytes - samples_of_node[0].network_sent_bytes) / 1e6 for sample in samples_of_node]
        history = server.history(run, f"{name}network_transmit_megabytes")
        assert [step for step, _ in history] == list(range(len(history)))
        assert history[0][1] == 0
        assert all_of(history, sent)

    assert job["mlflow"] == server.address
    assert [file.name for file in (tmp_path / "first").rglob("*") if file.is_file() and b"secret" in file.read_bytes()] == []

    again = trainer("run", "--resume", str(tmp_path / "first"), "--trust-run", "--epochs", "+10", "--json")
    assert again.returncode == 0, again.stderr
    later, earlier = server.runs("one")
    assert (earlier["info"]["run_id"], later["info"]["run_name"]) == (run["info"]["run_id"], "first")
    record = read_run(tmp_path / "first")
    assert server.history(later, "eval/accuracy") == [
        (evaluation.step, pytest.approx(evaluation.metrics["accuracy"])) for evaluation in record.evals
    ]
    sent, before = (server.history(logged, "system/node_0/network_transmit_megabytes") for logged in (later, earlier))
    samples = [sample for sample in RunReader(tmp_path / "first").system() if sample.node == 0 and sample.time_seconds >= 0]
    kept = [sample.network_sent_bytes for sample in samples if sample.part_began_seconds == 0]  # before the checkpoint
    stays = [point for point in before if point[1] < (kept[-1] - kept[0]) / 1e6]
    assert stays
    assert sent[: len(stays)] == stays
    assert sent == sorted(sent)
    steps = [step for step, _ in server.history(later, "train/loss")]
    assert steps == sorted(set(steps))
    assert steps[-1] == json.loads(again.stdout)["steps"] == RunReader(tmp_path / "first").job()["total_steps"] > summary["steps"]


def events(path):
    return {event.event: event.detail for event in RunReader(path).events() if event.event.startswith("mlflow")}


@pytest.mark.slow
def test_mlflow_server_restart_loses_no_metric(tmp_path, server):
    with forwarding(server.port) as forwarder:
        mlflow_options = ["--mlflow", forwarder.address, "--mlflow-experiment", "two"]
        job = ["--backend", "toy", "--steps", "100000000", "--eval-every", "0.5s", "--out", str(tmp_path), "--name", "run"]
        with MarkedRun(["run", *job, *mlflow_options], tmp_path) as run:
            wait_until(lambda: (tmp_path / "run/status.json").exists() and "mlflow_started" in events(tmp_path / "run"), 60, "the run")
            forwarder.cut()
            wait_until(lambda: "mlflow_lost" in events(tmp_path / "run"), 30, "its loss")
            forwarder.restore()
            wait_until(lambda: "mlflow_back" in events(tmp_path / "run"), 30, "its return")
            run.process.send_signal(signal.SIGINT)
            assert run.wait(60) in (75, 130)
            assert run.alive() == []
            assert "mlflow lost: cause " in run.stderr()
    (logged,) = server.runs("two")
    assert logged["info"]["status"] == "KILLED"
    assert pairs(logged, "tags")["crosstrain.cause"] == RunReader(tmp_path / "run").status()["cause"]
    assert server.history(logged, "eval/loss") == [
        (evaluation.step, pytest.approx(evaluation.loss)) for evaluation in RunReader(tmp_path / "run").evals()
    ]
    assert events(tmp_path / "run")["mlflow_back"] == {"points_lost": 0}
    assert "mlflow_incomplete" not in events(tmp_path / "run")


@pytest.mark.slow
def test_mlflow_server_down_does_not_fail_run(tmp_path, server):
    with forwarding(server.port, b"runs/log-batch") as forwarder:
        mlflow_options = ["--mlflow", forwarder.address, "--mlflow-experiment", "three"]
        done = trainer("run", "--backend", "toy", "--epochs", "30", "--out", str(tmp_path), "--name", "run", *mlflow_options)
    assert done.returncode == 0, done.stderr
    logged = events(tmp_path / "run")
    assert {"mlflow_started", "mlflow_lost", "mlflow_incomplete"} <= set(logged)
    assert logged["mlflow_incomplete"]["points"] >= 2 * 30
    assert "mlflow incomplete: points" in done.stderr
    assert server.runs("three")[0]["info"]["status"] == "RUNNING"


@pytest.mark.slow
def test_mlflow_database_without_server(tmp_path):
    uri = f"sqlite:///{tmp_path}/tracking.db"
    done = trainer("run", "--backend", "toy", "--steps", "20", "--out", str(tmp_path), "--name", "run", "--mlflow", uri, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "succeeded"
    script = (
        "import sys, mlflow.tracking\n"
        "client = mlflow.tracking.MlflowClient(sys.argv[1])\n"
        "(run,) = client.search_runs([client.get_experiment_by_name('crosstrain').experiment_id])\n"
        "print(run.info.run_name, run.info.status, run.data.metrics['eval/accuracy'])\n"
    )
    read = subprocess.run([sys.executable, "-W", "ignore", "-c", script, uri], capture_output=True, text=True, check=True)
    accuracy = read_run(tmp_path / "run").evals[-1].metrics["accuracy"]
    assert read.stdout.split()[:2] == ["run", "FINISHED"]
    assert float(read.stdout.split()[2]) == pytest.approx(accuracy)


def test_mlflow_unreachable_address_is_refused(tmp_path):
    port = free_ports(1)
    done = trainer("run", "--backend", "toy", "--mlflow", f"http://someone:secret@127.0.0.1:{port}", "--out", str(tmp_path / "runs"))
    assert done.returncode == 2
    assert f"'http://127.0.0.1:{port}'" in done.stderr
    assert "secret" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_mlflow_refused_address_leaves_resumable_run_unchanged(tmp_path):
    options = ["--backend", "toy", "--steps", "30", "--checkpoint-every", "20steps", "--out", str(tmp_path), "--name", "run"]
    assert trainer("run", *options).returncode == 0
    names = ("job.json", "steps.jsonl", "evals.jsonl", "summary.json")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in names}
    older = str(tmp_path / "run" / "checkpoints" / "step-000000020")
    done = trainer("run", "--resume", older, "--mlflow", "unheard-of://someone:secret@host/x")
    assert done.returncode == 2
    assert "unheard-of" in done.stderr
    assert "secret" not in done.stderr
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before
    assert RunReader(tmp_path / "run").status()["state"] == "succeeded"


@pytest.mark.parametrize("uri", ["mlruns", "./here", "5000"])
def test_mlflow_invalid_tracking_uri_is_refused(tmp_path, uri):
    done = trainer("run", "--backend", "toy", "--mlflow", uri, "--out", str(tmp_path / "runs"))
    assert done.returncode == 2
    assert "--mlflow" in done.stderr
    assert "sqlite:///" in done.stderr


def test_mlflow_is_imported_only_if_requested(tmp_path, make_environment):
    python = make_environment(tmp_path / "env", ["mlflow"])
    command = [str(python), "-m", "crosstrain.cli.main", "run", "--backend", "toy", "--steps", "5", "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refused = subprocess.run([*command, "--mlflow", "http://127.0.0.1:5000"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "pip install 'crosstrain[mlflow]'" in refused.stderr
