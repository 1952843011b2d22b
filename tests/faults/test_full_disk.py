"""Runs on a full or read-only disk: one message, a recorded end, no lost data."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading

import pytest
from processes import MarkedRun, wait_until

from crosstrain.checkpoint import list_checkpoints
from crosstrain.conformance.runs import trainer
from crosstrain.core.errors import DiskError
from crosstrain.core.settings.sources import resolve
from crosstrain.engine.progress import make_progress
from crosstrain.launch.driver.recorder import RunRecorder
from crosstrain.records.store.run_directory import RunReader

FULL = "No space left on device"

pytestmark = [pytest.mark.faults, pytest.mark.cluster]


def fill(folder):
    """Leave no byte free on the disk of a folder."""
    with open(folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 1024)


def run(folder, *options):
    return trainer("run", "--backend", "toy", "--no-tensorboard", "--quiet", "--name", "run", "--out", str(folder), *options)


def assert_a_sentence(done, cause):
    assert done.returncode == 1
    assert cause in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_run_does_not_start_on_a_full_disk(disk):
    fill(disk)
    assert_a_sentence(run(disk, "--steps", "10"), FULL)
    assert [path.name for path in disk.iterdir()] == ["filler"]


@pytest.mark.thorough
@pytest.mark.parametrize("more", [(), ("--mllog",), ("--tensorboard",), ("--checkpoint-every", "1steps")])
def test_full_disk_ends_run_and_status_reports_it(disk, more):
    """The failing record is the loop's or the saving thread's; most checkpoints fail too."""
    done = run(disk, "--steps", "100000000", "--eval-every", "50steps", "--json", *more)
    assert_a_sentence(done, FULL)
    status = RunReader(disk / "run").status()
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert FULL in status["cause"]
    assert next(RunReader(disk / "run").steps()).step == 0


def test_write_error_of_thread_is_raised_in_all_threads(disk):
    """No run continues without records because its saving thread was the first to fail."""
    job = resolve({"backend": "torch", "out": disk, "name": "run", "tensorboard": False}, {}).job
    recording = RunRecorder(job, make_progress(sys.stderr, True))
    try:
        recording.start_clock()
        fill(disk)
        saver = threading.Thread(target=fill_up, args=(recording,))
        saver.start()
        saver.join()
        with pytest.raises(DiskError, match=FULL):
            recording.event("one_more")
        recording.ending()
        recording.event("and_one_more")
        assert FULL in str(recording.refused)
    finally:
        recording.close()


def fill_up(recording):
    """Record events until the disk refuses one."""
    with contextlib.suppress(DiskError):
        while True:
            recording.event("a_record")


@pytest.mark.thorough
@pytest.mark.parametrize("disk", ["100k"], indirect=True)
def test_trace_on_full_disk_fails_run_and_summary_remains(disk):
    job = ("--backend", "torch", "--steps", "30", "--eval-every", "end", "--profile", "20", "--no-monitor", "--no-save-final")
    assert_a_sentence(run(disk, *job, "--no-calibrate"), FULL)
    reader = RunReader(disk / "run")
    assert (reader.status()["state"], reader.status()["exit_code"]) == ("failed", 1)
    assert (reader.summary()["state"], reader.summary()["steps"]) == ("failed", 30)
    assert not [path for path in (disk / "run/profile").rglob("*") if path.is_file()]


@pytest.mark.thorough
@pytest.mark.parametrize("disk", ["16m"], indirect=True)
def test_failed_resume_leaves_run_unchanged(disk):
    assert run(disk, "--steps", "10").returncode == 0
    fill(disk)
    before = {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
    assert_a_sentence(trainer("run", "--resume", str(disk / "run"), "--steps", "+10", "--quiet"), FULL)
    assert {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()} == before
    (disk / "filler").unlink()
    done = trainer("run", "--resume", str(disk / "run"), "--steps", "+10", "--quiet", "--json")
    assert json.loads(done.stdout)["steps"] == 20


STEPS_PER_EPOCH = 45
"""Of the built-in digits, in batches of 32."""

LARGE = ("--data", "synthetic-images:size=64,classes=100,train=60,test=10", "--batch-size", "5")
"""A model of 4.9 MB."""


@pytest.mark.thorough
@pytest.mark.parametrize("disk", ["4m"], indirect=True)
@pytest.mark.parametrize("more", [(), ("--checkpoint-every", "10steps", "--no-save-final")])
def test_last_save_on_full_disk_fails_run_also_quietly(disk, more):
    done = run(disk, *LARGE, "--steps", "20", "--json", *more)
    assert_a_sentence(done, "the last checkpoint, after step 20 (No space left on device")
    assert "bytes are free, 4,915,600 are needed), could not be saved" in done.stderr
    assert "no checkpoint was saved" in done.stderr
    reader = RunReader(disk / "run")
    assert (reader.status()["state"], reader.status()["exit_code"]) == ("failed", 1)
    assert "after step 20" in reader.status()["cause"]
    assert (reader.summary()["state"], reader.summary()["steps"]) == ("failed", 20)
    assert json.loads(done.stdout)["checkpoints"]["saved"] == 0


def refusals(folder):
    """The steps whose checkpoints were refused, and why."""
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return {event["detail"]["step"]: event["detail"]["cause"] for event in events if event["event"] == "checkpoint_failed"}


@pytest.mark.thorough
@pytest.mark.parametrize("disk", ["6m"], indirect=True)
@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ((), []),
        (("--checkpoint-every", "1000steps"), [1000, 2000]),
        (("--checkpoint-every", "1000steps", "--no-save-final"), [1000, 2000]),
        (("--checkpoint-every", "500steps", "--eval-every", "1500steps", "--until", "accuracy>=0.1", "--save-final"), [500, 1000]),
    ],
)
def test_last_save_uses_reserved_space(disk, more, refused):
    done = run(disk, "--steps", "3000", *more)
    assert done.returncode == 0, done.stderr
    causes = refusals(disk)
    assert [step for step in causes if step != 1500] == refused  # that of 1,500 is under way when its evaluation ends the run
    pattern = (
        r"No space left on device: [\d,]+ bytes are free, 2,600 are needed, and 8,388,608 are kept in reserve for the run's other records"
    )
    assert all(re.fullmatch(pattern, cause) for cause in causes.values())
    steps = RunReader(disk / "run").summary()["steps"]
    assert [path.name for path in list_checkpoints(disk / "run")] == [f"step-{steps:09}"]
    assert steps == (1500 if "--until" in more else 3000)


@pytest.mark.thorough
@pytest.mark.parametrize("disk", ["6m"], indirect=True)
def test_interrupted_save_uses_reserved_space_after_refusal(disk):
    """Plans end at each hundredth update and at epochs.

    Their states have been refused by then, or are being saved.
    """
    options = ["--backend", "toy", "--no-tensorboard", "--quiet", "--name", "run", "--out", str(disk), "--eval-every", "end"]
    with MarkedRun(["run", *options, "--steps", "100000000", "--checkpoint-every", "100steps"], disk) as process:
        events = disk / "run" / "events.jsonl"
        wait_until(lambda: events.exists() and "checkpoint_failed" in events.read_text(), 60, "a failure")
        process.process.send_signal(signal.SIGINT)
        assert process.wait(60) == 75, process.stderr()
    (checkpoint,) = list_checkpoints(disk / "run")
    steps = RunReader(disk / "run").summary()["steps"]
    assert checkpoint.name == f"step-{steps:09}"
    assert steps % 100 == 0 or steps % STEPS_PER_EPOCH == 0


@pytest.mark.thorough
@pytest.mark.parametrize("disk", ["16m"], indirect=True)
def test_run_with_successful_last_save_has_not_failed(disk):
    """Failed saves before it do not matter."""
    filler = disk / "filler"
    filler.write_bytes(bytes(9 << 20))  # the rest has room for records, but not for a checkpoint
    path = disk / "run"
    options = ["--backend", "toy", "--no-tensorboard", "--quiet", "--name", "run", "--out", str(disk), "--eval-every", "end"]
    with MarkedRun(["run", *options, "--steps", "20000", "--checkpoint-every", "2000steps"], disk) as process:
        wait_until(lambda: (path / "events.jsonl").exists() and "checkpoint_failed" in (path / "events.jsonl").read_text(), 60, "a failure")
        filler.unlink()
        assert process.wait(60) == 0, process.stderr()
    assert RunReader(path).status()["state"] == "succeeded"
    assert RunReader(path).summary()["checkpoints"]["failed"] > 0
    assert list_checkpoints(path)[0].name == "step-000020000"


@pytest.mark.slow  # without the marker the test above resumes on a full disk
@pytest.mark.parametrize("disk", ["16m"], indirect=True)
def test_resume_on_read_only_disk_leaves_run_unchanged(disk):
    assert run(disk, "--steps", "10").returncode == 0
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert_a_sentence(trainer("run", "--resume", str(disk / "run"), "--steps", "+10", "--quiet"), "Read-only file system")
    assert RunReader(disk / "run").status()["state"] == "succeeded"


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["16m"], indirect=True)
def test_outputs_of_run_need_disk_space(disk, tmp_path):
    assert trainer("run", "--backend", "toy", "--no-tensorboard", "--quiet", "--name", "run", "--out", str(disk)).returncode == 0
    fill(disk)
    before = sorted(disk.rglob("*"))
    for format_name in ("safetensors", "torch"):
        done = trainer("export", str(disk / "run"), "--format", format_name)
        assert_a_sentence(done, "has room for 0 B; the weights alone are 2.6 kB")
        assert done.stderr.count("\n") == 1
    done = trainer("evaluate", str(disk / "run"), "--predictions", str(disk / "logits.npz"), "--json")
    assert_a_sentence(done, FULL)
    assert json.loads(done.stdout)["accuracy"] > 0.8
    assert sorted(disk.rglob("*")) == before
    done = trainer("export", str(disk / "run"), "--format", "safetensors", "--output", str(tmp_path / "elsewhere"))
    assert done.returncode == 0, done.stderr
