"""The index of runs: always what the run directories say, however it was left, whoever else uses it."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from processes import wait_until
from run_folders import documents, many_runs, variant, write_run
from run_samples import a_job, open_run, sync_run

from crosstrain.records.store.run_directory import RunReader
from crosstrain.report.runs.index import DAMAGED, FIGURES, list_runs
from crosstrain.report.runs.locate import find_readable_runs
from crosstrain.report.runs.summary_rows import row

LIST = """
import json, sys
from pathlib import Path
from crosstrain.report.runs.index import list_runs
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
    return {Path(found["path"]).relative_to(out).as_posix(): found for found in list_runs(out)}


def expected(out, made):
    """What the index has to say, from the documents alone."""
    return {
        name: {
            "path": str(out / name),
            "folder": name.rpartition("/")[0] or None,
            "created_at": found["status.json"]["created_at"],
            "problem": None,
            **row(found["summary.json"]),
        }
        for name, found in made.items()
    }


@pytest.fixture
def start():
    """Return a function that lists the runs of a folder in a process of its own; none outlives the test."""
    started = []

    def listing(out):
        started.append(subprocess.Popen([sys.executable, "-c", LIST, str(out)], stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield listing
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


# What it says --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_two_thousand_runs_are_as_their_documents_say(out):
    made = many_runs(out, 2000)
    assert by_name(out) == expected(out, made)
    assert by_name(out) == expected(out, made)  # this time from the index
    assert all(tuple(found) == FIGURES for found in list_runs(out))


def test_the_index_follows_what_is_added_changed_resumed_and_removed(out):
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
    found = by_name(out)
    resumed = found.pop("run-00007")
    assert (resumed["state"], resumed["eval_accuracy"], resumed["steps"]) == ("interrupted", None, None)
    assert found == expected(out, made)


def test_what_has_not_changed_is_not_read_again(out):
    """A summary whose figures change behind the back of its time, size and inode is still shown as it was."""
    many_runs(out, 5)
    before = by_name(out)
    path = out / "run-00001" / "summary.json"
    times = path.stat()
    with path.open("r+") as file:
        text = file.read()
        file.seek(0)
        file.write(text.replace('"optimizer": "sgd"', '"optimizer": "xxx"'))
    assert documents(out / "run-00001")["summary.json"]["optimizer"] == "xxx"
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert by_name(out) == before
    os.utime(path)
    assert by_name(out)["run-00001"]["optimizer"] == "xxx"


def test_runs_without_a_summary_say_what_their_job_says(out):
    writer = open_run(a_job(out, name="live", mode="async", backend="torch", nodes=3, batch_size=7, until="loss<=0.5"))
    found = by_name(out)["live"]
    shown = {name: found[name] for name in ("state", "backend", "mode", "workers", "batch_size", "global_batch_size", "target", "steps")}
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


def test_a_run_whose_process_goes_without_a_word_has_died(out):
    """Its files are as they were: only the process tells."""
    with subprocess.Popen([sys.executable, "-c", BE_A_RUN, str(out), str(Path(__file__).parent)], stdout=subprocess.PIPE) as run:
        run.stdout.readline()
        assert by_name(out)["live"]["state"] == "running"
        run.kill()
        run.wait()
    assert by_name(out)["live"]["state"] == "died"


@pytest.mark.parametrize(
    ("document", "text", "said"),
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
def test_a_damaged_run_is_listed_as_damaged_beside_the_others(out, document, text, said):
    made = many_runs(out, 3)
    list_runs(out)
    found = {**made.pop("run-00001"), document: text}
    shutil.rmtree(out / "run-00001")
    write_run(out / "run-00001", found)
    for _ in range(2):
        listed = by_name(out)
        damaged = listed.pop("run-00001")
        assert listed == expected(out, made)
        assert (damaged["state"], damaged["run"], damaged["backend"]) == (DAMAGED, "run-00001", None)
        assert said in damaged["problem"]
        assert tuple(damaged) == FIGURES


def test_a_figure_that_is_no_number_comes_through(out):
    found = documents(sync_run(out))
    found["summary.json"]["final_train_loss"] = "NaN"
    write_run(out / "diverged", found)
    assert by_name(out)["diverged"]["final_train_loss"] == "NaN"


# What may happen to the file -----------------------------------------------------------------------------------------


def _flip(path):
    data = bytearray(path.read_bytes())
    place = data.index(b'"seed":2')
    data[place + 7] ^= 1  # now it says 3, which is JSON as well as before
    path.write_bytes(data)


def _changed_by(statement):
    def change(path):
        with closing(sqlite3.connect(path)) as database:
            database.executescript(statement)

    return change


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(os.urandom(10_000)),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "zeros within": lambda path: path.write_bytes(path.read_bytes()[:4096] + bytes(8192) + path.read_bytes()[12288:]),
    "one bit": _flip,
    "another release's": _changed_by("PRAGMA user_version = 7"),
    "no table": _changed_by("ALTER TABLE runs RENAME TO run"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_index_that_is_damaged_is_made_again(out, damage):
    made = many_runs(out, 30)
    list_runs(out)
    index = out / ".index.sqlite"
    before = index.read_bytes()
    DAMAGES[damage](index)
    assert not index.exists() or index.read_bytes() != before
    assert by_name(out) == expected(out, made)
    with closing(sqlite3.connect(index)) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (30,)
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert not (out / ".index.sqlite-wal").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1, 40])
def test_whatever_bytes_of_the_index_are_changed_the_listing_is_right_and_the_index_is_used_again(
    out, tmp_path, monkeypatch, seed, width, capfd
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chance = random.Random(seed)
    made = many_runs(out, 30)
    list_runs(out)
    index = out / ".index.sqlite"
    whole = index.read_bytes()
    for case in range(120):
        changed = bytearray(whole)
        place = chance.choice([chance.randrange(100), chance.randrange(len(whole) - width)])  # the first hundred describe the rest
        changed[place : place + width] = chance.randbytes(width)
        for path in out.glob(".index.sqlite*"):
            path.unlink()
        index.write_bytes(changed)
        if case % 2:
            os.utime(out / "run-00003" / "summary.json")  # so that a row is written
        for _ in range(2):
            assert by_name(out) == expected(out, made), f"--seed {seed}, case {case}"
        assert not (tmp_path / "cache").exists(), f"--seed {seed}, case {case}: {capfd.readouterr().err}"
    assert capfd.readouterr().err == ""


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
BROUGHT_ALONG = {
    "a view without an end": f"CREATE VIEW runs AS SELECT x AS name, x AS stamp, x AS state, x AS row, x AS digest FROM ({ENDLESS})",
    "a trigger without an end": "CREATE TRIGGER more AFTER INSERT ON runs BEGIN "
    f"INSERT OR REPLACE INTO runs SELECT x, x, x, x, x FROM ({ENDLESS}); END",
    "a column that is computed": "CREATE TABLE runs (name BLOB PRIMARY KEY, row AS (name || zeroblob(900000000)))",
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", BROUGHT_ALONG)
def test_an_index_from_elsewhere_has_nothing_carried_out(out, start, what):
    made = many_runs(out, 3)
    list_runs(out)
    with closing(sqlite3.connect(out / ".index.sqlite")) as database:
        if "TRIGGER" not in BROUGHT_ALONG[what]:
            database.execute("DROP TABLE runs")
        database.execute(BROUGHT_ALONG[what])
        database.commit()
    made["new"] = variant(documents(out / "run-00001"), 77, name="new")
    write_run(out / "new", made["new"])
    answer, _ = start(out).communicate(timeout=60)
    assert {row["path"] for row in json.loads(answer)} == {str(out / name) for name in made}
    with closing(sqlite3.connect(out / ".index.sqlite")) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (len(made),)
        assert [kind for (kind,) in database.execute("SELECT type FROM sqlite_master")] == ["table", "index"]


@pytest.mark.quick_cases("link-")
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_of_the_index_is_neither_followed_nor_waited_for(out, tmp_path, start, suffix, kind):
    many_runs(out, 3)
    other = tmp_path / "elsewhere" / "runs"
    many_runs(other, 2)
    list_runs(out)
    list_runs(other)
    target, place = other / ".index.sqlite", out / f".index.sqlite{suffix}"
    before = target.read_bytes()
    place.unlink(missing_ok=True)
    if kind == "link":
        place.symlink_to(target)
    else:
        os.mkfifo(place)
    answer, _ = start(out).communicate(timeout=60)
    assert len(json.loads(answer)) == 3
    assert target.read_bytes() == before
    assert not place.is_symlink()
    assert not place.is_fifo()


def test_a_lock_that_is_a_link_makes_no_file_elsewhere(out, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    many_runs(out, 3)
    (out / ".index.lock").symlink_to(tmp_path / "made")
    assert len(list_runs(out)) == 3
    assert not (tmp_path / "made").exists()


def test_the_index_is_as_private_as_the_runs(out):
    many_runs(out, 3)
    list_runs(out)
    assert {path.stat().st_mode & 0o777 for path in out.glob(".index.*")} == {0o600}


def test_the_index_lies_in_the_cache_where_the_folder_cannot_have_it(out, tmp_path, monkeypatch, capfd):
    made = many_runs(out, 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (out / ".index.lock").mkdir()  # also for root, whom no permission stops
    for _ in range(2):
        assert by_name(out) == expected(out, made)
        assert len(list((tmp_path / "cache/crosstrain/runs").glob("*.sqlite"))) == 1
    assert not (out / ".index.sqlite").exists()
    assert capfd.readouterr().err == ""
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file")
    assert by_name(out) == expected(out, made)
    assert "the index cannot be kept" in capfd.readouterr().err


# Others at the same time ---------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_commands_that_make_the_index_at_the_same_time_agree(out, start):
    made = many_runs(out, 300)
    processes = [start(out) for _ in range(3)]
    outputs = [json.loads(process.communicate(timeout=100)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert outputs == [list(expected(out, dict(sorted(made.items()))).values())] * 3


@pytest.mark.thorough
def test_an_index_that_is_killed_in_the_making_is_made_by_the_next(out, start):
    """The first command is killed in the middle: the file is there, its rows are not, as they are written when all runs have been read."""
    made = many_runs(out, 600)
    process = start(out)
    assert wait_until(lambda: _rows(out / ".index.sqlite"), 60, "the index to be begun") == (0,)
    process.kill()
    process.wait()
    assert _rows(out / ".index.sqlite") == (0,)
    assert by_name(out) == expected(out, made)


def _rows(index):
    """How many rows the index has, None where it is not there yet."""
    if not index.exists():
        return None
    try:
        with closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as database:
            return database.execute("SELECT count(*) FROM runs").fetchone()
    except sqlite3.OperationalError:
        return None


@pytest.mark.thorough
def test_killed_at_any_moment_it_is_right_the_next_time(out, start):
    made = many_runs(out, 300)
    for moment in range(4):
        for path in out.glob(".index.*"):
            path.unlink()
        process = start(out)
        wait_until((out / ".index.sqlite").exists, 60, "the index to be begun")
        try:
            process.wait(0.03 * moment)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert by_name(out) == expected(out, made)


def test_a_run_that_is_there_now_and_then_is_listed_or_not(out):
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
            assert {found["run"] for found in list_runs(out)} - {"brief"} == made
            readable, left_out = find_readable_runs([str(out)], out)
            assert {run.path.name for run in (*readable, *left_out)} - {"brief"} == made
    finally:
        over.set()
        mover.join()


def test_a_run_directory_that_comes_and_goes_disturbs_nobody(out, start):
    made = many_runs(out, 20)
    listing = [start(out) for _ in range(2)]
    for number in range(50):
        sync_run(out, name=f"brief-{number}")
        shutil.rmtree(out / f"brief-{number}")
    for process in listing:
        listed = json.loads(process.communicate(timeout=100)[0])
        assert {found["run"] for found in listed if not found["run"].startswith("brief")} == {Path(name).name for name in made}
    assert by_name(out) == expected(out, made)
    assert RunReader(out / "run-00001").state() == "succeeded"
