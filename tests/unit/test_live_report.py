"""`trainer report --live`: its runs, when it renders again, and how it starts and ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from growing_runs import GrowingRun
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import wait_until
from report_runs import make_run
from strangers import listens

from crosstrain.cli.group import invoke
from crosstrain.core.errors import UsageError
from crosstrain.report.pages import followed_runs as module
from crosstrain.report.pages.followed_runs import RECORDS, FollowedRuns, Refresher, render_readable, split_scripts
from crosstrain.report.pages.page import render
from crosstrain.report.runs.locate import find_places
from crosstrain.report.runs.run import Run, started_runs

SECONDS = 60


class Followed:
    """A refresher of some places that refreshes on request, and its reports."""

    def __init__(self, *places):
        self.reports = []
        self.refresher = Refresher(FollowedRuns(places), self.reports.append)
        self.refresher.refresh()

    @property
    def published(self):
        return self.refresher.published

    @property
    def page(self):
        return self.published.content.document.decode()

    def refresh_until(self, condition, what):
        """Refresh until a condition holds; each rendering is followed by a pause."""

        def looked():
            self.refresher.refresh()
            return condition(self.published)

        wait_until(looked, SECONDS, what)

    def next_version(self):
        before = self.published.version
        self.refresh_until(lambda published: published.version > before, "a new page")


def without_page(path):
    """Return the note about a run that has no page."""
    rendered = render_readable([path])
    assert rendered.page is None
    assert rendered.problem is None
    return rendered.skipped[path]


@pytest.mark.thorough
def test_run_is_followed_from_start_to_end(tmp_path):
    followed = Followed(tmp_path)
    assert (followed.published.version, followed.published.runs) == (0, 0)
    assert followed.published.notes == (f"{tmp_path}: there is no run in it yet",)
    run = GrowingRun(tmp_path, "one")
    followed.refresher.refresh()
    assert followed.published.notes == (f"{tmp_path}: there is no run in it yet",)  # an empty directory may become a run or a folder
    run.writer.write_status("starting")
    followed.refresher.refresh()
    assert followed.published.notes == ("one: it has only begun, and nothing is known about it (there is no job.json)",)
    run.describe()
    followed.next_version()
    assert (followed.published.version, followed.published.notes, followed.published.at_work) == (1, (), 1)
    assert "Run one" in followed.page
    run.train(40).evaluate()
    followed.next_version()
    assert 'id="plot-loss-0"' in followed.page
    run.end()
    followed.next_version()
    assert followed.published.at_work == 0
    assert ">succeeded<" in followed.page
    assert followed.reports == [
        f"{tmp_path}: there is no run in it yet",
        "one: it has only begun, and nothing is known about it (there is no job.json)",
    ]


def test_live_page_equals_the_report_without_scripts(tmp_path):
    paths = [make_run(tmp_path, name, steps=40) for name in ("one", "two")]
    followed = Followed(tmp_path)
    page = render(started_runs(map(Run, paths)))
    scripts = [match[1] for match in re.finditer(r"<script>(.*?)</script>", page, re.DOTALL)]
    assert followed.published.content.scripts == tuple(script.encode() for script in scripts)
    assert "".join(re.split(r"<script>.*?</script>", page, flags=re.DOTALL)) == followed.page


def test_unchanged_runs_are_not_rendered(tmp_path):
    run = GrowingRun(tmp_path, "one").describe().train(8)
    followed = Followed(run.path)
    for _ in range(3):
        before = followed.published
        os.utime(run.path / "heartbeat")
        followed.refresher._next_at = 0.0  # the pause is over
        followed.refresher.refresh()
        assert followed.published.content is before.content
        assert followed.published.read_at_unix_seconds >= before.read_at_unix_seconds
    run.close()


def test_change_during_the_pause_is_deferred(tmp_path):
    run = GrowingRun(tmp_path, "one").describe().train(8)
    followed = Followed(run.path)
    before = followed.published
    run.train(8)
    followed.refresher._next_at = float("inf")
    followed.refresher.refresh()
    assert (followed.published.version, followed.published.read_at_unix_seconds) == (1, before.read_at_unix_seconds)
    followed.refresher._next_at = 0.0
    followed.refresher.refresh()
    assert followed.published.version == 2
    run.close()


def test_unwatched_page_is_not_rendered(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ASKED_SECONDS", 0.0)
    monkeypatch.setattr(module, "MIN_PAUSE_SECONDS", 0.0)
    run = GrowingRun(tmp_path, "one").describe().train(8)
    refresher = Refresher(FollowedRuns([run.path]), lambda text: None)
    looks, over = [], threading.Event()

    class OverError(Exception):
        pass

    def check():
        looks.append(None)
        if over.is_set():
            raise OverError

    def follow():
        with pytest.raises(OverError):
            refresher.follow(check)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        wait_until(lambda: refresher.published.version == 1, SECONDS, "the first page")
        run.train(8)
        assert not over.wait(1.0)
        assert (refresher.published.version, len(looks)) == (1, 1)
        wait_until(lambda: refresher.ask() or refresher.published.version == 2, SECONDS, "the page that was asked for")
    finally:
        over.set()
        wait_until(
            lambda: refresher.ask() or not thread.is_alive(), SECONDS, "the end of the refresher"
        )  # a request during a rendering is lost
    run.close()


def test_killed_run_is_no_longer_in_progress(tmp_path):
    run = GrowingRun(tmp_path, "one").describe().train(8)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as driver:
        run.writer.write_status("running", pid=driver.pid)
        followed = Followed(run.path)
        assert followed.published.at_work == 1
        driver.kill()
    run.close()
    followed.next_version()
    assert followed.published.at_work == 0
    assert ">died<" in followed.page


def test_damaged_run_is_named_and_others_are_shown(tmp_path):
    paths = [make_run(tmp_path, f"run-{number}", steps=8) for number in range(5)]
    good = (paths[3] / "evals.jsonl").read_bytes()
    followed = Followed(tmp_path)
    assert "5 runs compared" in followed.page
    (paths[3] / "evals.jsonl").write_text('{"schema":1}\n{"schema":1}\n')
    (paths[1] / "status.json").write_text("{")
    followed.next_version()
    assert "3 runs compared" in followed.page
    first, second = followed.published.notes
    assert first.startswith("run-1: ")
    assert "status.json" in first
    assert re.match(r"run-3 is skipped: .*evals\.jsonl, line 1: not an EvalRecord", second)
    assert followed.reports == [first, second]
    version = followed.published.version
    followed.refresher._next_at = 0.0
    followed.refresher.refresh()
    assert followed.published.version == version  # an unreadable run is retried after a change only
    (paths[3] / "evals.jsonl").write_bytes(good)
    followed.next_version()
    assert "4 runs compared" in followed.page
    assert followed.published.notes == (first,)


@pytest.mark.thorough
def test_removed_run_leaves_the_page_unless_it_is_the_last(tmp_path):
    paths = [make_run(tmp_path / "runs", name, steps=8) for name in ("one", "two")]
    followed = Followed(tmp_path / "runs")
    shutil.rmtree(paths[0])
    followed.next_version()
    assert "Run two" in followed.page
    assert followed.published.notes == ("no longer there: one",)
    shutil.rmtree(tmp_path / "runs")
    followed.refresh_until(lambda published: published.runs == 0, "the last run to be gone")
    assert followed.published.notes == (f"{tmp_path / 'runs'}: the folder is no longer there", "no longer there: one, two")
    assert "Run two" in followed.page
    make_run(tmp_path / "runs", "two", steps=40)
    followed.next_version()
    assert followed.published.notes == ("no longer there: one",)


def test_run_that_failed_early_is_shown_as_failed(tmp_path):
    run = GrowingRun(tmp_path, "one")
    run.writer.write_status("failed", cause="no such data", exit_code=2)
    run.close()
    followed = Followed(tmp_path)
    assert followed.published.notes == ("one: it is failed, and nothing is known about it (there is no job.json)",)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any folder")
def test_unreadable_folder_is_named(tmp_path):
    folder = tmp_path / "runs"
    make_run(folder, "one", steps=8)
    followed = Followed(folder)
    folder.chmod(0)
    try:
        followed.refresh_until(lambda published: published.runs == 0, "the folder to be closed")
        assert "cannot be read" in followed.published.notes[0]
    finally:
        folder.chmod(0o700)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return [make_run(out, name, steps=8, calibrated=name == "one") for name in ("one", "two")]


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damaged_files_give_a_page_or_a_reason(whole, tmp_path_factory, data):
    """A file is cut, partly overwritten or removed, as during a write or a deletion."""
    out = tmp_path_factory.mktemp("damaged")
    paths = [Path(shutil.copytree(path, out / path.name)) for path in whole]
    target = paths[0] / data.draw(st.sampled_from([name for name in RECORDS if (paths[0] / name).exists()]))
    content = target.read_bytes()
    at = data.draw(st.integers(0, len(content)))
    match data.draw(st.sampled_from(["cut", "overwrite", "remove"])):
        case "cut":
            target.write_bytes(content[:at])
        case "overwrite":
            target.write_bytes(content[:at] + data.draw(st.binary(min_size=1, max_size=20)) + content[at + 10 :])
        case "remove":
            target.unlink()
    followed = Followed(out)
    assert followed.published.version == 1
    assert "two" in followed.page
    if "Run two" in followed.page:
        assert any(note.startswith("one") for note in followed.published.notes)
    shutil.rmtree(out)


def test_vanished_run_has_a_reason(tmp_path):
    path = make_run(tmp_path, "one", steps=8)
    shutil.rmtree(path)
    assert "is not a run directory" in without_page(path)


@given(
    st.lists(
        st.tuples(
            st.text("ab<> \n", max_size=5).map(lambda text: text.replace("<", "&lt;")),
            st.sampled_from(["json", "script"]),
            st.text("a<&; ", max_size=9),
        )
    )
)
def test_page_is_split_at_its_scripts(parts):
    tags = {"json": '<script type="application/json" id="x">', "script": "<script>"}
    page = "".join(f"{text}{tags[kind]}{inside}</script>" for text, kind, inside in parts) + "end"
    content = split_scripts(page)
    assert content.scripts == tuple(inside.encode() for _, kind, inside in parts if kind == "script")
    kept = "".join(text + (f"{tags[kind]}{inside}</script>" if kind == "json" else "") for text, kind, inside in parts) + "end"
    assert content.document == kept.encode()


def test_place_is_a_run_or_a_folder(tmp_path):
    out = tmp_path / "runs"
    run, point = make_run(out, "one", steps=8), make_run(out / "sweep", "point-1", steps=8)
    (out / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert find_places(["one", str(run), "point-1", "sweep", "empty"], out) == [run, point, out / "sweep", out / "empty"]
    for text in ("none", "", str(tmp_path / "file")):
        with pytest.raises(UsageError, match="run: "):
            find_places([text], out)


# The command -----------------------------------------------------------------------------------------------------------


@contextmanager
def live(folder, *arguments):
    """Run the command with separate folders for its output; stop it at the end."""
    for name in ("cwd", "tmp", "home"):
        (folder / name).mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "crosstrain.cli.main", "report", *map(str, arguments), "--live"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder / "cwd", env=environment
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def written(folder):
    return [path for name in ("cwd", "tmp", "home") for path in (folder / name).rglob("*")]


def get(address, path="/"):
    base, _, token = address.partition("/?token=")
    with urllib.request.urlopen(f"{base}{path}?token={token}", timeout=SECONDS) as answer:
        return answer.read()


def state(address):
    return json.loads(get(address, "/state"))


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_command_serves_until_a_signal_and_cleans_up(tmp_path, number):
    run = GrowingRun(tmp_path / "runs", "one").describe().train(8)
    before = {path.relative_to(run.path) for path in run.path.rglob("*")}
    with live(tmp_path, run.path) as process:
        address = process.stdout.readline().removesuffix("\n")
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", address)
        port = int(address.split(":")[2].split("/")[0])
        assert b"/live.js?token=" in get(address)
        wait_until(lambda: state(address)["version"] == 1, SECONDS, "the first page")
        with ThreadPoolExecutor(8) as clients:
            assert len(set(clients.map(lambda _: get(address, "/page"), range(16)))) == 1
        run.train(8)
        wait_until(lambda: state(address)["version"] == 2, SECONDS, "the next page")
        process.send_signal(number)
        output, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, output) == (-9 if number == signal.SIGKILL else 130, "")
    assert errors.splitlines() == [
        "the page at this address is refreshed as records come; Ctrl-C ends it",
        *([] if number == signal.SIGKILL else ["the page is no longer served; what a browser still shows of it stays as it is"]),
    ]
    assert not listens(port)
    assert written(tmp_path) == []
    assert {path.relative_to(run.path) for path in run.path.rglob("*")} == before
    run.close()


@pytest.mark.thorough
def test_interrupt_ends_the_command_while_rendering(tmp_path):
    path = make_run(tmp_path / "runs", "long", steps=40_000)
    with live(tmp_path, path) as process:
        address = process.stdout.readline().strip()
        assert address
        process.send_signal(signal.SIGINT)  # the page of so many updates takes a while
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.thorough
def test_empty_folder_is_followed_and_new_runs_are_named(tmp_path):
    folder = tmp_path / "runs" / "sweep"
    folder.mkdir(parents=True)
    with live(tmp_path, "sweep", "--out", tmp_path / "runs") as process:
        address = process.stdout.readline().strip()
        wait_until(lambda: state(address)["notes"] == [f"{folder}: there is no run in it yet"], SECONDS, "the note")
        make_run(folder, "point-1", steps=8)
        wait_until(lambda: state(address)["runs"] == 1 and state(address)["version"] == 1, SECONDS, "the first run")
        assert b"Run point-1" in get(address, "/page")
        process.send_signal(signal.SIGINT)
        assert "there is no run in it yet" in process.communicate(timeout=SECONDS)[1]


def test_ineffective_options_are_refused(tmp_path, capsys, monkeypatch):
    path = make_run(tmp_path, "one", steps=8)
    monkeypatch.chdir(tmp_path)
    assert invoke(["report", str(path), "--live", "-o", "report.html"]) == 2
    assert capsys.readouterr().err == "error: --output: --live writes no file; leave one of the two out.\n"
    assert invoke(["report", "onne", "--live", "--out", str(tmp_path)]) == 2
    assert "Did you mean 'one'?" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]
