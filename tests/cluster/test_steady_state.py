"""Long runs must not collect threads or leave files."""

import os
import signal
from pathlib import Path

import pytest
from processes import MarkedRun, wait_until

pytestmark = pytest.mark.cluster


def threads(pid):
    return len(os.listdir(f"/proc/{pid}/task"))


def steps_done(folder):
    """The first step of the last whole record."""
    steps = folder / "run/steps.jsonl"
    lines = steps.read_text().splitlines()[:-1] if steps.exists() else []
    return int(lines[-1].partition('"step":')[2].partition(",")[0]) if lines else 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("backend", ["tf", "torch"])
def test_threads_and_temporary_files_do_not_pile_up(tmp_path, backend, mode):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    arguments = ["run", "--backend", backend, "--mode", mode, "--nodes", "2", "--global-batch-size", "10", "--epochs", "100000"]
    arguments += ["--eval-every", "1000steps", "--out", str(tmp_path), "--name", "run", "--no-tensorboard"]
    with MarkedRun(arguments, tmp_path, {"TMPDIR": str(temporary)}) as run:
        wait_until(lambda: run.process.poll() is not None or steps_done(tmp_path) > 300, 90, "the first steps")
        tasks = run.alive("crosstrain.engine.task")
        before = {pid: threads(pid) for pid in tasks}
        begin = steps_done(tmp_path)
        wait_until(lambda: run.process.poll() is not None or steps_done(tmp_path) > begin + 2000, 90, "2000 more steps")
        after = {pid: threads(pid) for pid in tasks}
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait(20) == 130, run.stderr()
        assert before
        assert all(after[pid] <= before[pid] + 20 for pid in tasks), (before, after)
    assert list(Path(temporary).iterdir()) == []
