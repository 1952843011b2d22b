"""`trainer watch` over run directories: running, resumed, ended, dead."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from processes import wait_until
from run_samples import CLOCK, EVALUATION, a_job, open_run, sample, summary_of, sync_run

from crosstrain.cli.commands.watch import _is_no_run
from crosstrain.metrics import MetricInfo
from crosstrain.records.store.run_directory import RunReader, RunWriter
from crosstrain.records.store.schema import EventRecord, StepRecord
from crosstrain.records.summary import summarise
from crosstrain.report.analysis.duration import Block
from crosstrain.report.pages.watched_run import WatchedRun, _Training, figures_line, news_line, node_lines

WATCH = [sys.executable, "-m", "crosstrain.cli.main", "watch"]


def begin(out, **fields):
    job = a_job(out, **{"name": "live", "nodes": 2, "batch_size": 5, "epochs": 4, **fields})
    writer = RunWriter.create(job)
    describe(writer, job)
    writer.write_status("running")
    return writer


def describe(writer, job, total_steps=40):
    writer.write_job({**job.model_dump(mode="json"), "total_steps": total_steps})


def group(number, seconds=0.5):
    """Updates 5·number to 5·number + 4, 0.5 s per group: 10 updates and 100 examples a second."""
    loss = 1 / (number + 1)
    return StepRecord(5 * number, 5, number // 2, seconds * (number + 1), seconds, 50, (loss,) * 5, (0.05,))


def end(writer, state="succeeded", **status):
    writer.write_summary(summarise(writer.path, CLOCK, state=state, updates_scheduled=40, updates_applied=40))
    writer.write_status(state, **status)
    writer.close()


def watching(*arguments, **options):
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*WATCH, *map(str, arguments)], text=True, **pipes, **options)


class Lines:
    """Lines of a process's stream, as they arrive."""

    def __init__(self, stream):
        self.lines = []
        self._thread = threading.Thread(target=lambda: self.lines.extend(iter(stream.readline, "")), daemon=True)
        self._stream = stream
        self._thread.start()

    def wait(self, pattern):
        find_line = lambda: next((line for line in list(self.lines) if re.search(pattern, line)), None)  # noqa: E731
        return wait_until(find_line, 20, f"a line with {pattern!r}; there are: {self.lines}")


@pytest.fixture
def started():
    """Return a function that starts a watch, which ends with the test."""
    processes = []

    def start(*arguments, **options):
        processes.append(watching(*arguments, **options))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


# Runs that have ended --------------------------------------------------------------------------------------------------


def test_ended_run_is_shown_once(tmp_path):
    path = sync_run(tmp_path)
    done = watching(path)
    output, errors = done.communicate(timeout=30)
    assert done.returncode == 0
    assert errors.splitlines()[:2] == ["one: logreg on digits, tf sync, 2 nodes, 2 workers", "succeeded"]
    assert re.search(r"^examples/s +62\.5$", output, re.MULTILINE)
    assert output.endswith(f"run directory: {path}\n")


def test_json_is_one_line_with_the_summary(tmp_path):
    path = sync_run(tmp_path)
    done = watching("one", "--out", tmp_path, "--json")
    output, errors = done.communicate(timeout=30)
    (line,) = output.splitlines()
    assert errors == ""
    document = json.loads(line)
    assert document["summary"] == summary_of(path)
    assert (document["state"], document["step"], document["evaluation"]["accuracy"]) == ("succeeded", 10, 0.9)


@pytest.mark.parametrize(
    ("state", "cause"), [("failed", "task worker-1 was killed by SIGKILL"), ("interrupted", "interrupted by the user")]
)
def test_unsuccessful_run_shows_its_cause(tmp_path, state, cause):
    writer = begin(tmp_path)
    writer.step(group(0))
    end(writer, state, cause=cause, exit_code=1)
    done = watching(writer.path)
    output, errors = done.communicate(timeout=30)
    assert done.returncode == 1
    assert f"{state}: {cause}\n" in errors
    assert re.search(rf"^state +{state}$", output, re.MULTILINE)


def test_run_without_process_is_dead(tmp_path, started):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as driver:
        writer = begin(tmp_path)
        writer.write_status("running", pid=driver.pid)
        writer.step(group(0))
        writer.close()
        done = started(writer.path, "--interval", "0.2")
        errors = Lines(done.stderr)
        errors.wait(r"^running$")
        driver.kill()
    assert done.wait(30) == 1
    assert re.search(rf"died: its driver process {driver.pid} on \S+ is gone", errors.wait("died"))
    assert done.stdout.read() == ""


# Runs at work ----------------------------------------------------------------------------------------------------------


def test_watch_lasts_from_before_the_start_to_the_end(tmp_path, started):
    done = started("live", "--out", tmp_path, "--interval", "0.2")
    errors = Lines(done.stderr)
    errors.wait("no run 'live' yet")
    writer = begin(tmp_path)
    errors.wait(r"^live: logreg on digits, tf sync, 2 nodes, 2 workers$")
    for tick in range(3):
        for node in range(2):
            writer.system(sample(node, 0.5 * tick, network_sent_bytes=50_000 * tick, network_received_bytes=None))
    for number in range(4):
        writer.step(group(number))
    errors.wait(r"^step 20/40 \(50%\)  epoch 2  loss 0\.5208  10 steps/s  100 examples/s  2\.00 s left$")
    errors.wait(r"^node 1  CPU 1\.50 of 2 cores  memory 200 MB  sent 100 kB/s  received -  over 0\.50 s$")
    writer.evaluation(replace(EVALUATION, step=20, epoch=2.0))
    errors.wait(r"^1\.50 s  evaluated after step 20  epoch 2  test loss 0\.7500  accuracy 0\.8750$")
    writer.event(EventRecord("checkpoint_saved", 2.5, {"path": "checkpoints/step-20", "step": 20, "bytes": 31_400, "stall_seconds": 0.015}))
    errors.wait(r"^2\.50 s  checkpoint saved: path checkpoints/step-20, step 20, 31\.4 kB, stall 0\.01 s$")
    for number in range(4, 8):
        writer.step(group(number))
    end(writer, exit_code=0)
    assert done.wait(30) == 0
    errors.wait(r"^succeeded$")
    assert len([line for line in errors.lines if "evaluated" in line]) == 1
    assert re.search(r"^steps +40$", done.stdout.read(), re.MULTILINE)


def test_traffic_after_the_clock_is_not_training(tmp_path):
    writer = begin(tmp_path)
    for seconds, sent in ((0.0, 0), (1.0, 10**6), (2.0, 10**9)):
        writer.system(sample(0, seconds, network_sent_bytes=sent, network_received_bytes=sent))
    writer.event(EventRecord("run_ended", 1.5, {}))
    writer.close()
    run = WatchedRun(RunReader(writer.path))
    run.poll()
    run.close()
    assert node_lines(run) == ["node 0  CPU 1.50 of 2 cores  memory 200 MB  sent 1.0 MB/s  received 1.0 MB/s  over 1.00 s"]
    assert [node["network_sent_bytes_per_second"] for node in run.snapshot([])["nodes"]] == [1e6]


def test_json_has_a_line_per_change(tmp_path, started):
    writer = begin(tmp_path)
    writer.evaluation(EVALUATION)
    writer.step(group(0))
    done = started(writer.path, "--interval", "0.1", "--json")
    output = Lines(done.stdout)
    first = json.loads(output.wait("running"))
    assert (first["step"], first["loss"], first["evaluations"]) == (5, 1.0, [])
    assert first["evaluation"]["accuracy"] == EVALUATION.metrics["accuracy"]
    assert (first["steps_per_second"], first["examples_per_second"]) == (10, 100)
    assert (first["total_steps"], first["progress"], first["time_left_seconds"]) == (40, 0.125, 4.0)
    writer.event(EventRecord("epoch_ended", 0.5, {"epoch": 1}))
    writer.event(EventRecord("target_reached", 0.6, {"target": "accuracy>=0.8", "step": 5}))
    output.wait("target_reached")
    end(writer, exit_code=0)
    assert done.wait(30) == 0
    documents = [json.loads(line) for line in output.lines]
    assert [event["event"] for document in documents for event in document["events"]] == ["target_reached"]
    assert [document["state"] for document in documents if "summary" in document] == ["succeeded"]
    assert documents[-1]["summary"] == summary_of(writer.path)
    assert documents[-1]["time_left_seconds"] is None


def test_ctrl_c_ends_only_the_watch(tmp_path, started):
    writer = begin(tmp_path)
    done = started(writer.path)
    errors = Lines(done.stderr)
    errors.wait(r"^running$")
    done.send_signal(signal.SIGINT)
    assert done.wait(30) == 130
    errors.wait("no longer watching live, which is running")
    assert RunReader(writer.path).state() == "running"
    writer.close()


def test_terminal_is_drawn_on(tmp_path, started):
    writer = begin(tmp_path)
    for number in range(4):
        writer.step(group(number))
    writer.system(sample(0, 1.0))
    master, slave = pty.openpty()
    environment = {**{name: value for name, value in os.environ.items() if name != "NO_COLOR"}, "TERM": "xterm", "COLUMNS": "80"}
    command = [*WATCH, str(writer.path), "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, env=environment, text=True) as done:
        os.close(slave)
        seen = b""
        while b"examples/s" not in seen:
            seen += os.read(master, 65536)
        writer.step(group(4))
        end(writer, exit_code=0)
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the other end was closed
                break
            seen += chunk
        assert done.wait(30) == 0
        assert re.search(r"^state +succeeded$", done.stdout.read(), re.MULTILINE)
    os.close(master)
    assert b"\x1b[" in seen
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    figures = re.search(r"\nstep 20/40 \(50%\)  epoch 2  loss [\d.]+  [\d.,]+ steps/s  [\d.,]+\s+examples/s\s+[\d.]+ \w+ left", text)
    assert figures, text
    assert "━" in text
    assert "0     1.50 of 2 cores" in text
    left_standing = text[text.rindex("succeeded") :]
    assert "cores" not in left_standing  # the summary has it, for training only


def test_no_color_gets_plain_lines(tmp_path):
    path = sync_run(tmp_path)
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    subprocess.run(
        [sys.executable, "-m", "crosstrain.cli.main", "watch", str(path)], stdout=subprocess.PIPE, stderr=slave, env=environment, check=True
    )
    os.close(slave)
    assert b"\x1b" not in os.read(master, 65536)
    os.close(master)


# What is not a run -----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_invalid_run_is_refused(tmp_path):
    sync_run(tmp_path)
    (tmp_path / "file").write_text("")
    for name, hint in (("on", "one"), ("file", "allowed")):
        done = watching(name, "--out", tmp_path, "--wait", "0")
        output, errors = done.communicate(timeout=30)
        assert (done.returncode, output) == (2, "")
        assert hint in errors
        assert "Traceback" not in errors


# In one process --------------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(tmp_path):
    writer = begin(tmp_path)
    run = WatchedRun(RunReader(writer.path))
    yield writer, run
    run.close()
    writer.close()


def test_resumed_run_reports_nothing_twice(watched):
    writer, run = watched
    run.poll()
    for number in range(6):
        writer.step(group(number))
    writer.evaluation(replace(EVALUATION, step=10, time_seconds=1.0))
    writer.evaluation(replace(EVALUATION, step=30, time_seconds=3.0))
    assert [record.step for record in run.poll()] == [10, 30]
    assert (run.training.step, run.evaluation.step) == (30, 30)
    writer.cut(20, 2.0)
    describe(writer, a_job(writer.path.parent, name="live", epochs=5), 50)
    writer.write_status("running")
    assert run.poll() == []
    assert (run.training.step, run.evaluation.step, run.total_steps) == (20, 10, 50)
    writer.step(group(4))
    writer.event(EventRecord("run_resumed", 2.0, {"checkpoint": "step-20", "step": 20}))
    assert [news_line(record, ()) for record in run.poll()] == ["2.00 s  run resumed: checkpoint step-20, step 20"]
    assert run.training.step == 25


def test_news_name_a_metric_by_its_label():
    metrics = (MetricInfo("word_errors", "words wrong", "lower"),)
    evaluated = news_line(replace(EVALUATION, metrics={"word_errors": 0.25}), metrics)
    translated = news_line(EventRecord("translated", 2.0, {"step": 5, "word_errors": 0.25}), metrics)
    assert evaluated.endswith("test loss 0.7500  words wrong 0.2500")
    assert translated == "2.00 s  translated: step 5, words wrong 0.2500"


def test_earlier_records_count_and_are_no_news(watched):
    writer, run = watched
    writer.evaluation(EVALUATION)
    writer.event(EventRecord("target_reached", 1.5, {}))
    writer.step(group(0))
    assert run.poll() == []
    assert run.evaluation == EVALUATION
    assert figures_line(run) == "step 5/40 (12%)  epoch 1  loss 1.0000  10 steps/s  100 examples/s  4.00 s left"


def test_final_translation_counts_once_measured(watched):
    writer, run = watched
    job = a_job(writer.path.parent, name="live", epochs=4)
    signatures = {"training": "greedy|sentences:10", "end": "beam4|sentences:20"}
    writer.write_job({**job.model_dump(mode="json"), "total_steps": 40, "translation_signatures": signatures})
    writer.write_status("running")
    writer.step(group(0))
    run.poll()
    assert figures_line(run).endswith("  3.50 s left, not counting the final translation")
    assert run.snapshot([])["time_left_translate_seconds"] is None
    writer.event(EventRecord("translated", 0.5, {"seconds": 3.0}))
    run.poll()
    assert figures_line(run).endswith("  6.50 s left")
    assert run.snapshot([])["time_left_translate_seconds"] == 3.0


def test_speed_excludes_profiled_updates():
    training = _Training()
    for first, now, profiled in ((0, 5.0, 5.0), (10, 6.0, None), (20, 7.0, None)):
        training.add(StepRecord(first, 10, 0, now, 1.0, 100, (0.5,) * 10, (0.1,), profiled_seconds=profiled))
        if profiled is not None:
            assert training.speed() is None
        else:
            assert training.speed().examples_per_second == pytest.approx(100)
    assert training.blocks([]) == [Block(10, 1.0)]


def test_speed_is_recent(watched):
    writer, run = watched
    for number in range(40):  # 20 s at 10 updates a second
        writer.step(group(number))
    run.poll()
    assert run.training.speed().steps_per_second == pytest.approx(10)
    for number in range(20):  # 40 s at 2.5
        writer.step(replace(group(40 + number), time_seconds=20 + 2.0 * (number + 1)))
    run.poll()
    assert run.training.speed().steps_per_second == pytest.approx(2.5)
    assert run.training.speed().examples_per_second == pytest.approx(25)


def test_async_groups_arrive_in_any_order(watched):
    writer, run = watched
    for number in (1, 0, 3, 2):
        writer.step(replace(group(number), worker=number % 2))
        run.poll()
    assert run.training.step == 20


def test_run_of_unknown_length_has_no_progress(tmp_path):
    writer = open_run(a_job(tmp_path, name="old"))
    writer.step(group(0))
    run = WatchedRun(RunReader(writer.path))
    run.poll()
    assert (run.total_steps, run.progress, run.time_left) == (None, None, None)
    assert figures_line(run) == "step 5  epoch 1  loss 1.0000  10 steps/s  100 examples/s"
    run.close()
    writer.close()


def test_starting_run_is_never_taken_for_another_folder(tmp_path):
    paths = [tmp_path / str(number) for number in range(100)]
    number, refused = 0, []

    def look():
        while number < len(paths):
            if _is_no_run(path := paths[number]):
                refused.append(path)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for path in paths:
            RunWriter.create(a_job(tmp_path, name=path.name)).close()
            number += 1
    finally:
        number = len(paths)
        looking.join()
    assert not refused
