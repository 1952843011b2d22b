"""Run directories that vanish or become read-only: open files hide it, yet the run must end."""

import shutil
import subprocess
import time

import pytest
from processes import MarkedRun, wait_until

from crosstrain.core.errors import DiskError
from crosstrain.core.job import Job
from crosstrain.records.store.run_directory import RunWriter

pytestmark = [pytest.mark.faults, pytest.mark.cluster]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out/run"


def make_read_only(path):
    """Lay the directory over itself, read-only, which files that are open do not hinder.

    It is made read-only elsewhere first: laid over the directory and made read-only there, it could be refused as busy, where the run
    has opened a file through it in between.
    """
    aside = path.parent / "read-only"
    aside.mkdir()
    bound = subprocess.run(["mount", "--bind", path, aside], capture_output=True, text=True, check=False)
    if bound.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {bound.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", aside], check=True)
        subprocess.run(["mount", "--bind", aside, path], check=True)
    finally:
        subprocess.run(["umount", aside], check=True)
        aside.rmdir()


CHANGES = {
    "renamed": (lambda path: path.rename(path.with_name("elsewhere")), "is no longer there", ["--no-monitor"]),
    "removed": (shutil.rmtree, "is no longer there", ["--checkpoint-every", "60s"]),
    "replaced": (lambda path: (path.rename(path.with_name("elsewhere")), path.mkdir()), "is no longer there", []),
    "read-only": (make_read_only, "Read-only file system", ["--checkpoint-every", "500steps"]),
}


@pytest.fixture(params=CHANGES)
def change(request, path):
    yield CHANGES[request.param]
    subprocess.run(["umount", "--lazy", path], capture_output=True, check=False)


def test_removed_directory_is_noticed_despite_open_files(path, change):
    make, problem, _ = change
    writer = RunWriter.create(Job(backend="toy", out=path.parent, name=path.name))
    try:
        writer.check()
        assert writer.there
        make(path)
        for write in (writer.check, lambda: writer.write_status("failed"), lambda: writer.write_summary({})):
            with pytest.raises(DiskError, match=problem):
                write()
        if path.exists():
            assert not [file for file in path.iterdir() if file.suffix == ".json"]
    finally:
        writer.close()


@pytest.mark.quick_cases("read-only")
def test_vanished_directory_ends_run_and_is_reported(path, change):
    """Within ten seconds, or at the next checkpoint; the directory is not made again."""
    make, problem, more = change
    options = ["--backend", "toy", "--epochs", "1000000", "--eval-every", "end", "--json", *more]
    with MarkedRun(["run", *options, "--out", str(path.parent), "--name", path.name], path.parent.parent) as run:
        wait_until(lambda: (path / "steps.jsonl").exists() and (path / "steps.jsonl").stat().st_size, 60, "the first step")
        make(path)
        changed = time.monotonic()
        assert run.wait(20) == 1
        assert time.monotonic() - changed < 10
        *_, unwritten, error = run.stderr().splitlines()
        assert "the status (failed, exit code 1) could not be written" in unwritten
        assert error.startswith("error: ")
        assert problem in error
        assert run.alive() == []
    if problem != "Read-only file system":
        assert not path.exists() or not list(path.iterdir())
