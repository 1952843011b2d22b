"""A node's temporary folder is removed with its agent, or by the next one after a kill."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from crosstrain.launch.node.scratch import make_scratch, remove_scratch, sweep

HOLDER = """
import sys
from crosstrain.launch.node.scratch import make_scratch
folder = make_scratch()
(folder / "file").write_text("left")
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def holder():
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def end(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_folder_is_private_and_can_be_removed_twice(temporary):
    folder = make_scratch()
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o777 == 0o700
    for _ in range(2):
        remove_scratch(folder)
    assert list(temporary.iterdir()) == []


def test_folder_of_a_killed_process_is_removed_by_the_next():
    process, folder = holder()
    assert sweep() == []
    assert (folder / "file").read_text() == "left"
    os.kill(process.pid, signal.SIGKILL)
    end(process)
    scratch = make_scratch()
    assert not folder.exists()
    assert scratch.is_dir()


def test_foreign_folder_is_kept(temporary):
    process, folder = holder()
    end(process)
    namespace, pid, start, rest = re.fullmatch(r"crosstrain-(\d+)-(\d+)-(\d+)-(\w+)", folder.name).groups()
    kept = [
        temporary / f"crosstrain-{int(namespace) + 1}-{pid}-{start}-{rest}",
        temporary / "crosstrain-mine",
        temporary / f"x{folder.name}",
    ]
    for path in kept:
        path.mkdir()
    link = temporary / f"crosstrain-{namespace}-{pid}-{start}-link"
    link.symlink_to(kept[0])
    assert sweep() == [folder]
    assert all(path.is_dir() for path in [*kept, link])
