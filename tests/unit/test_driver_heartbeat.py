"""A driver's heartbeat in its run directory, with real processes.

Others see whether the driver is alive, and a driver that lost its run stops.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from crosstrain.core.errors import DiskError, UsageError
from crosstrain.core.job import Job
from crosstrain.launch.driver.resumption import refuse_at_work
from crosstrain.records.store.heartbeat import HEARTBEAT, Heartbeat, is_silent
from crosstrain.records.store.run_directory import RunReader, RunWriter
from crosstrain.records.store.schema import EventRecord

WATCH_SECONDS = 5.0
"""More than two beats."""

WRITER = """
import sys, time
from pathlib import Path
from crosstrain.core.job import Job
from crosstrain.core.process import die_with_parent
from crosstrain.records.store.schema import EventRecord
from crosstrain.records.store.run_directory import RunWriter
die_with_parent(int(sys.argv[2]))
writer = RunWriter.create(Job(out=Path(sys.argv[1]), name="run"))
writer.write_job({"nodes": 1})
writer.write_status("running")
print("there", flush=True)
while True:
    time.sleep(0.1)
    writer.event(EventRecord("something", 0.0, {}))
"""

ELSEWHERE = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh"]


@contextmanager
def driver(folder, before=()):
    """Start a process that writes a run as a driver does; it ends with this one."""
    command = [*before, sys.executable, "-c", WRITER, str(folder), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "there\n", process.stderr.read()
            yield process
        finally:
            process.kill()


@pytest.mark.thorough
def test_heartbeat_lasts_as_long_as_its_process(tmp_path):
    run = tmp_path / "run"
    assert is_silent(tmp_path, 0.0) is None
    with driver(tmp_path) as process:
        assert is_silent(run, WATCH_SECONDS) is False
        process.send_signal(signal.SIGSTOP)
        assert is_silent(run, WATCH_SECONDS) is True
        process.send_signal(signal.SIGCONT)
        assert is_silent(run, WATCH_SECONDS) is False
        process.kill()
        process.wait()
        assert is_silent(run, WATCH_SECONDS) is True


def test_ended_run_has_no_heartbeat(tmp_path):
    writer = RunWriter.create(Job(out=tmp_path, name="run"))
    assert (writer.path / HEARTBEAT).exists()
    writer.close()
    assert not (writer.path / HEARTBEAT).exists()


@pytest.mark.thorough
def test_stopped_driver_writes_nothing_after_takeover(tmp_path):
    run = tmp_path / "run"
    with driver(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        heartbeat = Heartbeat(run)  # as if the file system had no locks between machines
        os.replace(_copy(run / "events.jsonl"), run / "events.jsonl")  # as truncating the records does
        before = (run / "events.jsonl").read_bytes()
        process.send_signal(signal.SIGCONT)
        assert process.wait(10) == 1
        assert "another process has gone on with this run" in process.stderr.read()
        assert (run / "events.jsonl").read_bytes() == before
        heartbeat.check()
        heartbeat.close()


def _copy(path):
    copied = path.with_suffix(".copy")
    copied.write_bytes(path.read_bytes())
    return copied


def test_writer_that_lost_the_run_writes_nothing(tmp_path):
    writer = RunWriter.create(Job(out=tmp_path, name="run"))
    writer.write_status("running")
    before = (writer.path / "status.json").read_bytes()
    heartbeat = Heartbeat(writer.path)
    with pytest.raises(UsageError, match="another process has just gone on"):
        writer._heartbeat.settle()
    with pytest.raises(DiskError, match="another process has gone on with this run"):
        writer.event(EventRecord("late", 0.0, {}))
    with pytest.raises(DiskError, match="another process has gone on with this run"):
        writer.check()
    writer.close()
    with pytest.raises(DiskError, match="another process has gone on with this run"):
        writer.write_status("failed")
    assert (writer.path / "status.json").read_bytes() == before
    assert (writer.path / "events.jsonl").read_bytes() == b""
    assert (writer.path / HEARTBEAT).exists()
    heartbeat.close()


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="another host's name is given by root")
def test_remote_driver_blocks_resume_while_alive(tmp_path, capsys):
    with driver(tmp_path, ELSEWHERE) as process:
        reader = RunReader(tmp_path / "run")
        with pytest.raises(UsageError, match=r"the run run is still at work \(process \d+ on elsewhere\)$"):
            refuse_at_work(reader, watch_seconds=WATCH_SECONDS)
        process.kill()
        process.wait()
        refuse_at_work(reader, watch_seconds=WATCH_SECONDS)
        assert "the driver on elsewhere has given no sign of life for 5 s and is taken for gone" in capsys.readouterr().err
        (reader.path / HEARTBEAT).unlink()
        with pytest.raises(UsageError, match=r"on elsewhere\), or it ended without recording its status; use --force to resume it"):
            refuse_at_work(reader, watch_seconds=WATCH_SECONDS)
        refuse_at_work(reader, force=True)
