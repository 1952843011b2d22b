"""Notifications of real runs about ends and restarts, to a web server and a command."""

import json
import os
import signal

import pytest
from processes import MarkedRun, wait_until
from restart_runs import kill_when, train, trains
from test_restart import TOY, RestartsOnce
from web_server import web_server

from crosstrain.core.settings.personal import PERSONAL_OPTIONS, resolve_personal
from crosstrain.launch.driver.notify import Notifier
from crosstrain.records.store.run_directory import RunReader

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

SECRET = "SECRET-of-the-test"


@pytest.fixture(autouse=True)
def _directly(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.syspath_prepend(str(TOY))


def documents(posted):
    return [json.loads(body) for _, _, body in posted]


def command(out, port, *more):
    job = ["run", "--backend", "toy", "--nodes", "2", "--network", "host", "--epochs", "1000000", "--eval-every", "end", "--quiet"]
    return [*job, "--out", str(out), "--name", "run", "--notify", f"http://me:{SECRET}@127.0.0.1:{port}/{SECRET}", *more]


def test_failed_run_is_notified_and_address_not_recorded(tmp_path):
    options = ["--on-failure", f"cat > {tmp_path}/notice; exit 5"]
    with web_server() as (port, posted), MarkedRun(command(tmp_path, port, *options), tmp_path) as run:
        path = tmp_path / "run"
        kill_when(path, trains).join()
        assert run.wait(20) == 1  # regardless of the exit code of the command
        (document,) = documents(posted)
        assert run.alive() == []
    status = json.loads((path / "status.json").read_text())
    assert (document["event"], document["task"], document["exit_code"], document["restarts"]) == ("failed", "worker-1", 1, 0)
    assert (document["cause"], document["path"], document["name"]) == (status["cause"], str(path), "run")
    assert document["steps"] > 0
    assert document["seconds"] > 0
    assert json.loads((tmp_path / "notice").read_text()) == document
    assert "--on-failure: could not notify that the run failed: it has ended with 5" in run.stderr()
    last = list(RunReader(path).events())[-1]
    assert (last.event, last.detail["how"]) == ("notice_failed", "on_failure")
    written = [file.read_text() for file in path.rglob("*") if file.is_file()]
    assert not any(SECRET in text for text in (*written, run.stderr()))
    typed = json.loads((path / "job.json").read_text())["command"]
    assert [typed[typed.index(flag) + 1] for flag in ("--notify", "--on-failure")] == [f"http://127.0.0.1:{port}/...", "..."]


def test_interrupted_run_is_notified_despite_refusing_server(tmp_path):
    with web_server(lambda handler: handler.send_response(404)) as (port, posted):
        with MarkedRun(command(tmp_path, port, "--checkpoint-every", "500steps"), tmp_path) as run:
            wait_until(lambda: run.process.poll() is not None or trains(tmp_path / "run"), 60, "the first step")
            os.kill(run.process.pid, signal.SIGTERM)
            assert run.wait(20) == 75
        ((event, code),) = [(document["event"], document["exit_code"]) for document in documents(posted)]
    assert (event, code) == ("interrupted", 75)
    assert "the answer was 404" in run.stderr()
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "interrupted"


def test_failed_start_of_nodes_is_notified(tmp_path):
    with web_server() as (port, posted):
        with MarkedRun(command(tmp_path, port, "--start-timeout", "0.01"), tmp_path) as run:
            assert run.wait(30) == 1
        (document,) = documents(posted)
    assert (document["event"], document["steps"], document["exit_code"]) == ("failed", 0, 1)
    assert "--start-timeout" in document["cause"]


@pytest.mark.thorough
def test_restarted_run_notifies_restart_and_end(tmp_path):
    warnings = []
    with web_server() as (port, posted):
        options = resolve_personal(PERSONAL_OPTIONS, {"notify": f"http://127.0.0.1:{port}/"}, {"XDG_CONFIG_HOME": "/no/such/folder"})
        kill_when(tmp_path / "run", trains)
        train(tmp_path, "run", RestartsOnce(), Notifier(options, warnings.append), tensorboard=False)
        again, end = documents(posted)
    assert (again["event"], again["task"], again["restarts"], again["exit_code"]) == ("restarted", "worker-1", 1, None)
    assert "was killed by SIGKILL" in again["cause"]
    assert (end["event"], end["cause"], end["restarts"], end["steps"], end["exit_code"]) == ("finished", None, 1, 3000, 0)
    assert warnings == []
