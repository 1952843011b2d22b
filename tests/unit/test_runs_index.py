"""The list of runs always equals the run directories, whatever else changes or is there."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from run_folders import documents, many_runs, variant, write_run
from run_samples import a_job, open_run, sync_run

from crosstrain.records.store.run_directory import RunReader
from crosstrain.report.runs.columns import row
from crosstrain.report.runs.locate import find_readable_runs
from crosstrain.report.runs.query import DAMAGED, FIGURES, list_runs

LIST = """
import json, sys
from pathlib import Path
from crosstrain.report.runs.query import list_runs
print(json.dumps(list_runs(Path(sys.argv[1]))))
"""

BE_A_RUN = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from run_samples import a_job, open_run
open_run(a_job(Path(sys.argv[1]), name="live"))
print("running", flush=True)
time.sleep(60)
"""


@pytest.fixture
def out(tmp_path):
    return tmp_path / "runs"


def by_name(out):
    return {Path(entry["path"]).relative_to(out).as_posix(): entry for entry in list_runs(out)}


def expected(out, made):
    """Return the expected list, from the documents alone."""
    return {
        name: {
            "path": str(out / name),
            "folder": name.rpartition("/")[0] or None,
            "created_at": run_documents["status.json"]["created_at"],
            "problem": None,
            **row(run_documents["summary.json"]),
        }
        for name, run_documents in made.items()
    }


@pytest.fixture
def start():
    """Return a function that lists runs in another process, which ends with the test."""
    started = []

    def listing(out):
        started.append(subprocess.Popen([sys.executable, "-c", LIST, str(out)], stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield listing
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


# Its content --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_2000_runs_are_listed_as_documented(out):
    made = many_runs(out, 2000)
    assert by_name(out) == expected(out, made)
    assert all(tuple(entry) == FIGURES for entry in list_runs(out))


def test_list_follows_changes_of_runs(out):
    made = many_runs(out, 40)
    list_runs(out)
    template = documents(out / "run-00001")
    for number in range(100, 103):
        made[f"run-{number:05}"] = variant(template, number, name=f"run-{number:05}", seed=number)
        write_run(out / f"run-{number:05}", made[f"run-{number:05}"])
    changed = made["run-00003"]["summary.json"]
    changed["examples_per_second"] = 54321.0
    (out / "run-00003" / "summary.json").write_text(json.dumps(changed))
    for name in ("run-00005", "sweep-0/run-00020"):
        shutil.rmtree(out / name)
        del made[name]
    (out / "run-00007" / "summary.json").unlink()
    status = {**made.pop("run-00007")["status.json"], "state": "interrupted"}
    (out / "run-00007" / "status.json").write_text(json.dumps(status))
    entries = by_name(out)
    resumed = entries.pop("run-00007")
    assert (resumed["state"], resumed["eval_accuracy"], resumed["steps"]) == ("interrupted", None, None)
    assert entries == expected(out, made)


def test_change_with_equal_time_and_size_is_listed(out):
    many_runs(out, 5)
    path = out / "run-00001" / "summary.json"
    times = path.stat()
    with path.open("r+") as file:
        text = file.read()
        file.seek(0)
        file.write(text.replace('"optimizer": "sgd"', '"optimizer": "xxx"'))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert by_name(out)["run-00001"]["optimizer"] == "xxx"


def test_run_without_summary_has_its_job_s_settings(out):
    writer = open_run(a_job(out, name="live", mode="async", backend="torch", nodes=3, batch_size=7, until="loss<=0.5"))
    entry = by_name(out)["live"]
    shown = {name: entry[name] for name in ("state", "backend", "mode", "workers", "batch_size", "global_batch_size", "target", "steps")}
    assert shown == {
        "state": "running",
        "backend": "torch",
        "mode": "async",
        "workers": 3,
        "batch_size": 7,
        "global_batch_size": 21,
        "target": "loss<=0.5",
        "steps": None,
    }
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    writer.write_status("running", pid=gone.pid)
    assert by_name(out)["live"]["state"] == "died"
    writer.write_status("failed", cause="worker-1 died", exit_code=1)
    writer.close()
    assert by_name(out)["live"]["state"] == "failed"


def test_run_with_vanished_process_is_dead(out):
    """Its files are unchanged: only the process shows it."""
    with subprocess.Popen([sys.executable, "-c", BE_A_RUN, str(out), str(Path(__file__).parent)], stdout=subprocess.PIPE) as run:
        run.stdout.readline()
        assert by_name(out)["live"]["state"] == "running"
        run.kill()
        run.wait()
    assert by_name(out)["live"]["state"] == "died"


@pytest.mark.parametrize(
    ("document", "text", "message"),
    [
        ("status.json", '{"state": "succ', "status.json: not a whole JSON document"),
        ("status.json", "[]", "status.json: holds list, not a JSON object"),
        ("status.json", "{}", "status.json: has schema None"),
        ("status.json", '{"schema": 1, "state": 3}', "status.json: state: input should be a valid string"),
        ("status.json", None, "status.json: missing"),
        ("summary.json", "\0" * 100, "summary.json: not a whole JSON document"),
        ("summary.json", "{}", "summary.json: has schema None"),
        ("summary.json", '{"schema": 7}', "summary.json: has schema 7; this release reads 1"),
        ("summary.json", '{"schema": 1}', "summary.json: state: field required"),
    ],
)
def test_damaged_run_is_listed_as_damaged(out, document, text, message):
    made = many_runs(out, 3)
    list_runs(out)
    run_documents = {**made.pop("run-00001"), document: text}
    shutil.rmtree(out / "run-00001")
    write_run(out / "run-00001", run_documents)
    for _ in range(2):
        listed = by_name(out)
        damaged = listed.pop("run-00001")
        assert listed == expected(out, made)
        assert (damaged["state"], damaged["run"], damaged["backend"]) == (DAMAGED, "run-00001", None)
        assert message in damaged["problem"]
        assert tuple(damaged) == FIGURES


def test_non_finite_figure_is_listed(out):
    run_documents = documents(sync_run(out))
    run_documents["summary.json"]["final_train_loss"] = "NaN"
    write_run(out / "diverged", run_documents)
    assert by_name(out)["diverged"]["final_train_loss"] == "NaN"


# Foreign files with the runs ----------------------------------------------------------------------------------------


def _an_endless_view(path):
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"CREATE VIEW runs AS SELECT x AS name, x AS row FROM ({ENDLESS})")


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
LEFT_OVER = {
    "nothing": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(os.urandom(10_000)),
    "a view without an end": _an_endless_view,
    "a link": lambda path: path.symlink_to(path.parent.parent / "elsewhere"),
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
}


@pytest.mark.parametrize("what", LEFT_OVER)
def test_index_of_an_older_release_is_ignored(out, start, what):
    """Older releases stored an index with the runs, which may come from anybody."""
    made = many_runs(out, 3)
    LEFT_OVER[what](out / ".index.sqlite")
    before = os.lstat(out / ".index.sqlite")
    answer, _ = start(out).communicate(timeout=60)
    assert {entry["path"] for entry in json.loads(answer)} == {str(out / name) for name in made}
    after = os.lstat(out / ".index.sqlite")
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)


def test_listing_writes_nothing(out, tmp_path, monkeypatch, capfd):
    made = many_runs(out, 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = {path: path.stat().st_mtime_ns for path in (out, *out.rglob("*"))}
    out.chmod(0o500)
    try:
        assert by_name(out) == expected(out, made)
    finally:
        out.chmod(0o700)
    assert {path: path.stat().st_mtime_ns for path in (out, *out.rglob("*"))} == before
    assert not (tmp_path / "cache").exists()
    assert capfd.readouterr().err == ""


def test_listing_opens_two_small_files_of_a_run(out, monkeypatch):
    """Listing thousands of runs stays quick: docs/runs.md has the times."""
    many_runs(out, 20)
    opened = []
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda path, *arguments, **options: opened.append(path) or open_file(path, *arguments, **options))
    assert len(list_runs(out)) == 20
    assert sorted(Path(path).name for path in opened) == ["status.json"] * 20 + ["summary.json"] * 20


# Concurrent processes ---------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_concurrent_commands_agree(out, start):
    made = many_runs(out, 300)
    processes = [start(out) for _ in range(3)]
    outputs = [json.loads(process.communicate(timeout=100)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert outputs == [list(expected(out, dict(sorted(made.items()))).values())] * 3


def test_intermittent_run_is_listed_or_not(out):
    made = {Path(name).name for name in many_runs(out, 3)}
    away = out.with_name("away")
    sync_run(out, name="brief")
    over = threading.Event()

    def move_to_and_fro():
        while not over.is_set():
            os.rename(out / "brief", away)
            os.rename(away, out / "brief")

    mover = threading.Thread(target=move_to_and_fro)
    mover.start()
    try:
        for _ in range(200):
            assert {entry["run"] for entry in list_runs(out)} - {"brief"} == made
            readable, left_out = find_readable_runs([str(out)], out)
            assert {run.path.name for run in (*readable, *left_out)} - {"brief"} == made
    finally:
        over.set()
        mover.join()


def test_intermittent_run_directory_disturbs_no_listing(out, start):
    made = many_runs(out, 20)
    listing = [start(out) for _ in range(2)]
    for number in range(50):
        sync_run(out, name=f"brief-{number}")
        shutil.rmtree(out / f"brief-{number}")
    for process in listing:
        listed = json.loads(process.communicate(timeout=100)[0])
        assert {entry["run"] for entry in listed if not entry["run"].startswith("brief")} == {Path(name).name for name in made}
    assert by_name(out) == expected(out, made)
    assert RunReader(out / "run-00001").state() == "succeeded"
