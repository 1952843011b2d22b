"""Notices about a run: sent once, in bounded time, and without effect on its result."""

import json
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from processes import wait_until
from web_server import web_server

from crosstrain.core.errors import InterruptedRunError, RunFailedError, UsageError
from crosstrain.core.job import Job
from crosstrain.core.settings.job_fields import environment_name
from crosstrain.core.settings.personal import PERSONAL_OPTIONS, resolve_personal
from crosstrain.core.settings.sources import NOTIFICATION_VARIABLES
from crosstrain.launch.driver import notify
from crosstrain.launch.driver.notify import NoticeError, Notifier, RunNews, post, run_command
from crosstrain.records.store.jsonl import read_records
from crosstrain.records.store.schema import EventRecord

NEWS = RunNews("failed", "mine", Path("/runs/mine"), "task worker-1 was killed", "worker-1", 1200, 61.23456, 1, 2, host="node0")


@pytest.fixture(autouse=True)
def _directly(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(notify, "RETRY_SECONDS", 0.05)


def failure_of_post(url, body=b"{}"):
    with pytest.raises(NoticeError) as raised:
        post(url, body)
    assert "SECRET" not in str(raised.value)
    return str(raised.value)


def test_notice_has_the_outcome_of_the_run():
    assert json.loads(NEWS.as_json()) == {
        "event": "failed", "name": "mine", "path": "/runs/mine", "host": "node0", "cause": "task worker-1 was killed", "task": "worker-1",
        "steps": 1200, "seconds": 61.235, "exit_code": 1, "restarts": 2,
        "text": "run mine on node0 has failed after 1,200 steps and 61 s: task worker-1 was killed",
    }  # fmt: skip
    assert NEWS.variables().keys() == NOTIFICATION_VARIABLES.keys()
    assert NEWS.variables()["TRAINER_RUN_EXIT_CODE"] == "1"
    assert not NOTIFICATION_VARIABLES.keys() & {environment_name(field) for field in Job.model_fields}


def test_texts_of_other_hosts_are_bounded_and_escaped():
    news = RunNews("failed", None, None, "a\nb\x1b\x00\udc80" + "x" * 10_000, "worker\n1", 0, 0.0, 1, 0)
    document = json.loads(news.as_json())
    assert document["cause"].startswith("a\\x0ab\\x1b\\x00\\udc80xxx")
    assert len(document["cause"]) <= 2000
    assert document["host"] == socket.gethostname()
    assert all(value.isprintable() for value in news.variables().values())
    assert news.variables()["TRAINER_RUN_NAME"] == ""


@pytest.mark.parametrize(
    ("error", "event", "code"),
    [
        (RunFailedError("no\nlog"), "failed", 1),
        (UsageError("no"), "failed", 2),
        (InterruptedRunError("no"), "interrupted", 130),
        (KeyboardInterrupt(), "interrupted", 130),
        (OSError("no"), "failed", 1),
    ],
)
def test_early_failure_is_notified(error, event, code):
    news = RunNews.before_start("mine", error)
    assert (news.event, news.exit_code, news.path) == (event, code, None)
    assert "\n" not in news.cause


def test_post_has_the_document_and_basic_authentication():
    with web_server() as (port, posted):
        post(f"http://me:p%40ss@127.0.0.1:{port}/hook?key=1#fragment", NEWS.as_json())
    ((path, headers, body),) = posted
    assert (path, headers["Content-Type"]) == ("/hook?key=1", "application/json")
    assert headers["Authorization"] == "Basic bWU6cEBzcw=="
    assert json.loads(body) == NEWS.document()


def test_busy_address_is_retried_once():
    answers = iter([503, 204])
    with web_server(lambda handler: handler.send_response(next(answers))) as (port, posted):
        post(f"http://127.0.0.1:{port}/", b"{}")
        assert len(posted) == 2


@pytest.mark.parametrize(("code", "tries"), [(500, 2), (429, 2), (404, 1), (403, 1)])
def test_refusing_address_is_reported(code, tries):
    with web_server(lambda handler: handler.send_response(code)) as (port, posted):
        assert failure_of_post(f"http://127.0.0.1:{port}/SECRET") == f"the answer was {code}{', twice' if tries == 2 else ''}"
        assert len(posted) == tries


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(tmp_path, code):
    (tmp_path / "secret").write_text("x")
    with web_server() as (other_port, requests):
        for place in (f"http://127.0.0.1:{other_port}/", f"file://{tmp_path}/secret", "ftp://127.0.0.1/x"):

            def moved(handler, place=place):
                handler.send_response(code)
                handler.send_header("Location", place)

            with web_server(moved) as (port, posted):
                assert "leads to another address, which is not followed" in failure_of_post(f"http://me:SECRET@127.0.0.1:{port}/")
                assert len(posted) == 1
        assert requests == []


def test_slow_address_times_out_and_is_not_retried(monkeypatch):
    monkeypatch.setattr(notify, "ANSWER_SECONDS", 0.3)
    over = threading.Event()
    with web_server(lambda handler: over.wait(20)) as (port, posted):
        began = time.monotonic()
        assert "no answer within 0.3 s; it may have arrived all the same" in failure_of_post(f"http://127.0.0.1:{port}/")
        assert time.monotonic() - began < 2
        over.set()
        assert len(posted) == 1


def test_endless_answer_times_out(monkeypatch):
    monkeypatch.setattr(notify, "POST_SECONDS", 0.5)

    def drip(handler):
        handler.send_response(200)
        while True:
            handler.wfile.write(b"X-More: x\r\n")
            handler.wfile.flush()
            time.sleep(0.05)

    with web_server(drip) as (port, _):
        began = time.monotonic()
        reason = failure_of_post(f"http://127.0.0.1:{port}/")
        assert time.monotonic() - began < 2
        assert "no answer within 0.5 s" in reason or "ended without an answer" in reason


def test_hang_up_is_not_retried():
    with web_server(lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)) as (port, posted):
        assert "ended without an answer" in failure_of_post(f"http://127.0.0.1:{port}/")
        assert len(posted) == 1


def test_unreachable_address_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert failure_of_post(f"http://127.0.0.1:{port}/SECRET") == "no connection: Connection refused, twice"


def test_untrusted_certificate_is_refused(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("makes a certificate by openssl, which is not installed")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    made = subprocess.run(
        [*command, "-subj", "/CN=127.0.0.1", "-keyout", tmp_path / "key", "-out", tmp_path / "certificate"],
        capture_output=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    (tmp_path / "both").write_text((tmp_path / "certificate").read_text() + (tmp_path / "key").read_text())
    with web_server(certificate=tmp_path / "both") as (port, posted):
        assert "the certificate is not sound" in failure_of_post(f"https://127.0.0.1:{port}/")
        assert posted == []


def test_command_gets_input_and_variables_only(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_NOTIFY", "http://x")
    monkeypatch.setenv("TRAINER_SECRET", "x")
    news = RunNews("failed", "mine", None, f"$(touch {tmp_path}/obeyed); `touch {tmp_path}/obeyed`", None, 0, 0.0, 1, 0)
    run_command(f"cat > {tmp_path}/input; env > {tmp_path}/environment; echo told", news.as_json(), news.variables())
    assert json.loads((tmp_path / "input").read_text()) == news.document()
    environment = (tmp_path / "environment").read_text().splitlines()
    assert f"TRAINER_RUN_CAUSE={news.cause}" in environment
    assert not any(line.startswith(("TRAINER_NOTIFY=", "TRAINER_SECRET=")) for line in environment)
    assert not (tmp_path / "obeyed").exists()


def test_output_of_the_command_goes_to_standard_error(capfd):
    run_command("echo told; echo more >&2", b"", {})
    assert capfd.readouterr() == ("", "told\nmore\n")


@pytest.mark.parametrize(
    ("command", "why"), [("exit 3", "has ended with 3"), ("kill -9 $$", "was killed by signal 9"), ("no-such-x", "127")]
)
def test_failing_command_is_reported(command, why):
    with pytest.raises(NoticeError, match=why):
        run_command(command, b"x" * 100_000, {})


def test_slow_command_is_ended_with_its_children(tmp_path):
    began = time.monotonic()
    with pytest.raises(NoticeError, match="ended, as it has taken longer than 1 s"):
        run_command(f"sleep 60 & echo $! > {tmp_path}/child; trap '' TERM; wait; sleep 60", b"", {}, seconds=1.0)
    assert time.monotonic() - began < 5
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text(), 5, "the end of the child")


class EndingNotifier(Notifier):
    """A notifier whose thread ends at a `Goodbye`, so that it does not outlive the test."""

    def _post_waiting(self):
        with suppress(SystemExit):
            super()._post_waiting()


class Goodbye:
    """Queued in place of a notice."""

    def as_json(self):
        raise SystemExit


class NotifiedRun:
    """A run's notices, and their results."""

    def __init__(self, tmp_path, **options):
        self.warnings, self.events = [], []
        personal_options = resolve_personal(PERSONAL_OPTIONS, options, {"XDG_CONFIG_HOME": "/no/such/folder"})
        self.notifier = EndingNotifier(personal_options, self.warnings.append)
        self.run = self.notifier
        self.run.begin("mine", lambda: (7, 1.5))
        self.path = tmp_path / "mine"
        self.path.mkdir()
        (self.path / "events.jsonl").touch()
        self.run.has_directory(self.path, lambda event, **detail: self.events.append((event, detail)))

    def end(self):
        """End the posting thread, if any; queued notices are dropped."""
        if (posting := self.notifier._posting) is not None:
            with suppress(queue.Empty):
                while True:
                    self.notifier._waiting.get_nowait()
            self.notifier._waiting.put(Goodbye(), timeout=30)
            posting.join(30)
            assert not posting.is_alive()


@pytest.fixture
def make_run(tmp_path):
    """Return a function that makes the notices of a run; their threads end with the test."""
    with ExitStack() as ends:

        def make(**options):
            run = NotifiedRun(tmp_path, **options)
            ends.callback(run.end)
            return run

        yield make


def test_restarts_and_the_end_are_notified_in_order(make_run):
    with web_server() as (port, posted):
        notified = make_run(notify=f"http://127.0.0.1:{port}/")
        for number in range(3):
            notified.run.restarted(f"cause {number}", "worker-1")
        for _ in range(2):
            notified.run.ended("succeeded", None, None, 0)
        notified.notifier.send_end(RunNews.before_start("mine", RunFailedError("again")))
    documents = [json.loads(body) for _, _, body in posted]
    assert [(document["event"], document["restarts"], document["cause"], document["exit_code"]) for document in documents] == [
        ("restarted", 1, "cause 0", None),
        ("restarted", 2, "cause 1", None),
        ("restarted", 3, "cause 2", None),
        ("finished", 3, None, 0),
    ]
    assert {(document["path"], document["name"], document["steps"], document["seconds"]) for document in documents} == {
        (str(notified.path), "mine", 7, 1.5)
    }
    assert (notified.warnings, notified.events) == ([], [])


def test_notification_does_not_delay_training(make_run, monkeypatch):
    monkeypatch.setattr(notify, "ANSWER_SECONDS", 0.5)
    over = threading.Event()
    with web_server(lambda handler: over.wait(20)) as (port, _):
        notified = make_run(notify=f"http://127.0.0.1:{port}/SECRET")
        began = time.monotonic()
        for _ in range(200):
            notified.run.restarted("cause", None)
        assert time.monotonic() - began < 0.4
        assert "too many notices" in notified.warnings[0]
        wait_until(lambda: any("no answer" in warning for warning in notified.warnings), 5, "the first notice to time out")
        over.set()
    assert not any("SECRET" in warning for warning in notified.warnings)
    assert {(event, detail["how"], detail["told"]) for event, detail in notified.events} == {("notice_failed", "notify", "restarted")}


def test_failed_end_notice_is_reported_and_recorded(make_run):
    with web_server(lambda handler: handler.send_response(404)) as (port, _):
        notified = make_run(notify=f"http://me:SECRET@127.0.0.1:{port}/SECRET", on_failure="exit 4")
        notified.run.ended("failed", "cause", "worker-0", 1)
    assert notified.warnings == [
        f"trainer: --notify (http://127.0.0.1:{port}/...): could not notify that the run failed: the answer was 404",
        "trainer: --on-failure: could not notify that the run failed: it has ended with 4",
    ]
    recorded = list(read_records(notified.path / "events.jsonl", EventRecord))
    assert [(record.event, record.detail["how"], record.detail["why"]) for record in recorded] == [
        ("notice_failed", "notify", "the answer was 404"),
        ("notice_failed", "on_failure", "it has ended with 4"),
    ]


@pytest.mark.parametrize("state", ["succeeded", "interrupted"])
def test_command_runs_after_failures_only(make_run, tmp_path, state):
    notified = make_run(on_failure=f"touch {tmp_path}/ran")
    notified.run.restarted("cause", None)
    notified.run.ended(state, None, None, 0)
    assert not (tmp_path / "ran").exists()


def test_run_without_directory_is_notified(make_run):
    with web_server(lambda handler: handler.send_response(404)) as (port, posted):
        notified = make_run(notify=f"http://127.0.0.1:{port}/")
        shutil.rmtree(notified.path)
        notified.run.ended("failed", "hosts cannot take part", None, 2)
    assert json.loads(posted[0][2])["path"] is None
    assert len(notified.warnings) == 1
    assert not notified.path.exists()


def test_unused_notices_load_nothing():
    script = "import sys, crosstrain.cli.commands.run; print('urllib.request' in sys.modules, 'http.client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "False"], done.stderr
