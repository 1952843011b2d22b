"""The lock for making a store: exclusive, and its file is removed with refused names."""

import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

from crosstrain.cli.commands.data import data
from crosstrain.core.errors import UsageError
from crosstrain.data.store.location import is_locked, locked


def test_refused_names_leave_no_lock_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))
    for name in ("empty", "blank"):
        for language in ("en", "de"):
            (tmp_path / f"{name}.{language}").write_text("\n" * (name == "blank"))
            (tmp_path / f"{name}.test.{language}").write_text("a\n")
        with pytest.raises(UsageError):
            CliRunner().invoke(data, ["prepare", f"parallel-text:{tmp_path / name}:en-de"], catch_exceptions=False)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("left", ["made", ".made.work"])
def test_lock_file_stays_if_something_was_made(tmp_path, left):
    with locked(tmp_path, "made"):
        (tmp_path / left).mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([left, ".made.lock"])


def test_waiting_process_locks_the_replaced_file(tmp_path):
    """Every holder removes the file that others wait for; no two ever hold it."""
    inside, most, done = [], [], []

    def work():
        for _ in range(200):
            with locked(tmp_path, "made"):
                inside.append(1)
                most.append(len(inside))
                done.append(is_locked(tmp_path, "made"))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 1200
    assert all(done)
    assert max(most) == 1
    assert not list(tmp_path.iterdir())


COUNT = """
import pathlib, sys
from crosstrain.data.store.location import locked

folder = pathlib.Path(sys.argv[1])
count = folder / "count"
for _ in range(300):
    with locked(folder, "made"):
        count.write_text(str(int(count.read_text()) + 1))
"""


def test_concurrent_counters_lose_nothing(tmp_path):
    (tmp_path / "count").write_text("0")
    children = [subprocess.Popen([sys.executable, "-c", COUNT, tmp_path]) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "900"


def test_busy_lock_is_refused_without_waiting(tmp_path):
    with locked(tmp_path, "made"), pytest.raises(BlockingIOError), locked(tmp_path, "made", wait=False):
        pass
    assert not is_locked(tmp_path, "made")
