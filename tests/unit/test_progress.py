"""Progress of a run: drawn on a (pseudo) terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import itertools
import math
import os
import pty
import re
import threading
import time
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_samples import EVALUATION, a_job, sample

from crosstrain.engine import progress as plain
from crosstrain.engine.progress import PlainProgress, QuietProgress, make_progress, terminal
from crosstrain.engine.terminal_progress import RichProgress
from crosstrain.metrics.base import MetricInfo
from crosstrain.models.objectives import CLASSIFICATION
from crosstrain.records.text import TrainingState, evaluation_text, number_text

JOB = a_job("runs", mode="async", nodes=2, data="digits")


def play(progress):
    progress.message("starting 2 nodes")
    progress.start(JOB, CLASSIFICATION.infos, 4500)
    progress.node(sample(1, 0.5, cpu_cores_used=None, network_sent_bytes=None))
    progress.node(sample(0, 0.5, network_sent_bytes=0, network_received_bytes=0))
    progress.node(sample(0, 1.0, network_sent_bytes=600_000, network_received_bytes=1_000_000_000))
    progress.update(1200, 0.41234, 5120.4, 3.21, 2)
    progress.evaluation(EVALUATION)
    progress.update(4500, 0.25, 5200.0, 0.0, 4)
    progress.close()
    progress.close()


def plain_output():
    stream = io.StringIO()
    play(PlainProgress(stream))
    return stream.getvalue()


def test_plain_lines():
    assert plain_output() == (
        "starting 2 nodes\n"
        "training logreg on digits, tf async, 2 nodes, 2 workers, 4,500 steps\n"
        "evaluated after step 10  epoch 1  test loss 0.7500  accuracy 0.8750\n"
        "step 4,500/4,500  epoch 5  last loss 0.2500  5,200 steps/s\n"
    )


@given(loss=st.floats(), accuracy=st.floats(0, 1))
def test_loss_has_few_characters(loss, accuracy):
    """In lines of evaluations and updates and in tables, with its first digits right."""
    line = evaluation_text(replace(EVALUATION, loss=loss, metrics={"accuracy": accuracy}), CLASSIFICATION.infos)
    text = re.fullmatch(r"evaluated after step 10  epoch 1  test loss (\S+)  accuracy (\S+)", line)[1]
    state = TrainingState()
    state.update(0, loss, None, None, 0)
    assert state.line() == f"step 0  epoch 1  last loss {text}"
    assert number_text(loss) == text
    assert len(text) <= len("-9,999,999.0000")
    shown = Decimal(text.replace(",", ""))  # rounding up the largest floats overflows
    if math.isnan(loss):
        assert shown.is_nan()
    elif 0.001 <= abs(loss) < 1e7:  # four decimals
        assert abs(shown - Decimal(loss)) <= Decimal("0.00005")
    else:  # three digits
        assert shown == Decimal(loss) or abs(shown / Decimal(loss) - 1) <= Decimal("0.005")


def test_metric_has_its_label():
    stream = io.StringIO()
    progress = PlainProgress(stream)
    metrics = (MetricInfo("top5", "top-5 accuracy", "higher"), MetricInfo("tag_accuracy", "tags found", "higher"))
    progress.start(JOB, metrics, None)
    progress.evaluation(replace(EVALUATION, metrics={"tag_accuracy": 0.25, "top5": 0.5, "unheard_of": 1.0}))
    assert stream.getvalue().splitlines()[-1].endswith("test loss 0.7500  tags found 0.2500  top-5 accuracy 0.5000  unheard_of 1.0000")


def test_plain_lines_have_their_interval(monkeypatch):
    stream = io.StringIO()
    progress = PlainProgress(stream)
    now = time.monotonic()
    progress.node(sample(0, -20.0))
    progress.start(JOB, (), None)
    for tick in range(100):  # 25 s
        monkeypatch.setattr(plain.time, "monotonic", lambda tick=tick: now + 0.25 * tick)
        progress.update(tick, 0.5, None, None, 0)
        progress.node(sample(0, 0.25 * tick, network_sent_bytes=100_000 * tick, network_received_bytes=None))
    lines = stream.getvalue().splitlines()
    steps = [int(line.split()[1]) for line in lines if line.startswith("step")]
    assert len(steps) == 12
    assert all(8 <= later - earlier <= 9 for earlier, later in itertools.pairwise(steps))
    assert lines[0] == "training logreg on digits, tf async, 2 nodes, 2 workers"
    assert lines[1] == f"step {steps[0]}  epoch 1  last loss 0.5000"
    nodes = [line for line in lines if line.startswith("node")]
    assert nodes == [
        f"node 0  CPU 1.50 of 2 cores  memory 200 MB  sent 400 kB/s  received -  over {over} s of training" for over in (10.2, 10.0)
    ]


@given(st.lists(st.tuples(st.integers(0, 10**9), st.booleans(), st.floats(0, 0.9)), min_size=1, max_size=40), st.integers(0, 10**12))
def test_rates_cover_training_since_the_previous_line(sent, before_training):
    """Without evaluations, and without traffic from before training."""
    lines, total = io.StringIO(), before_training
    progress = PlainProgress(lines)
    progress.node(sample(0, -5.0, network_sent_bytes=0, network_received_bytes=0))
    progress.start(JOB, (), None)
    lines.truncate(lines.seek(0))
    with pytest.MonkeyPatch.context() as patched:
        progress.node(sample(0, 0.0, network_sent_bytes=before_training, network_received_bytes=0))
        expected, since, trained = [], before_training, 0.0
        for second, (more, is_due, evaluating) in enumerate(sent, 1):
            total += more
            trained += 1.0 - evaluating
            patched.setattr(plain, "NODES_SECONDS", 0.0 if is_due else math.inf)
            progress.evaluation(replace(EVALUATION, time_seconds=second - 0.05, seconds=evaluating))
            progress.node(sample(0, float(second), network_sent_bytes=total, network_received_bytes=0))
            if is_due:
                expected.append(((total - since) / trained, trained))
                since, trained = total, 0.0
    shown = [line for line in lines.getvalue().splitlines() if line.startswith("node")]
    assert len(shown) == len(expected)
    for line, (rate, seconds) in zip(shown, expected, strict=True):
        match = re.search(r"sent (\S+) (.?)B/s  received 0 B/s  over (\S+) s of training$", line)
        assert float(match[1]) * 1000.0 ** " kMG".index(match[2] or " ") == pytest.approx(rate, rel=0.06, abs=0.6)
        assert float(match[3]) == pytest.approx(seconds, abs=0.06)


@given(st.lists(st.tuples(st.sampled_from(["train", "evaluate"]), st.integers(1, 30)), max_size=12), st.integers(0, 40))
def test_training_time_excludes_other_phases(phases, translating):
    """Neither an unfinished evaluation nor a translation, which has no record, counts."""
    lines, clock = io.StringIO(), 100.0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plain.time, "monotonic", lambda: clock)
        progress = PlainProgress(lines)
        progress.start(JOB, (), None)
        progress.node(sample(0, 0.0, network_sent_bytes=0, network_received_bytes=0))
        sent, shown_trained, trained = 0, 0.0, 0.0
        for what, seconds in [*phases, ("translate", translating)]:
            for _ in range(seconds):
                clock += 1.0
                if what == "train":
                    trained, sent = trained + 1.0, sent + 1_000_000
                    progress.update(1, 0.5, None, None, 0)
                else:
                    progress.doing(what)
                progress.node(sample(0, clock - 100.0, network_sent_bytes=sent, network_received_bytes=0))
            if what == "evaluate":
                progress.evaluation(replace(EVALUATION, time_seconds=clock - 100.0, seconds=float(seconds)))
                progress.doing(what)  # leading tasks answer one after another
    for line in (line for line in lines.getvalue().splitlines() if line.startswith("node")):
        rate, over = re.search(r"sent (.*?)  received .*  over (.*)$", line).groups()
        assert (rate, over) == ("-", "-") or (rate == "1.0 MB/s" and over.endswith(" s of training"))
        shown_trained += 0.0 if over == "-" else float(over.split()[0])
    assert trained - 10.0 <= shown_trained <= trained


@pytest.mark.parametrize("kind", [PlainProgress, RichProgress])
def test_ended_run_has_no_time_left(kind, screen):
    progress = kind(screen.stream)
    progress.start(JOB, (), 200)
    progress.update(160, 0.5, 35.0, 1.15, 2)
    progress.close()
    screen.close()
    assert "step 160/200" in screen.text
    assert "left" not in screen.text.rpartition("step 160/200")[2]


def test_long_phases_are_reported_at_intervals(monkeypatch):
    stream = io.StringIO()
    progress = PlainProgress(stream)
    now = time.monotonic()
    progress.start(JOB, (), None)
    for tick in range(200):  # 50 s
        monkeypatch.setattr(plain.time, "monotonic", lambda tick=tick: now + 0.25 * tick)
        progress.doing(f"translating: {tick} done" if tick < 100 else "translating: 99 done" if tick < 180 else None)
    lines = stream.getvalue().splitlines()[1:]
    moving = [int(line.split()[1]) for line in lines if line != "translating: 99 done"]
    assert [later - earlier for earlier, later in itertools.pairwise(moving)] == [8] * 11
    assert len(lines) - len(moving) in (2, 3)  # 20 s of the same
    progress.doing("translating: 0 done")
    assert stream.getvalue().endswith("translating: 0 done\n")


def test_terminal_shows_phases_until_they_end(screen):
    progress = RichProgress(screen.stream)
    progress.start(JOB, (), 10)
    time.sleep(0.3)
    progress.doing("evaluating after step 5")
    time.sleep(0.3)
    progress.doing(None)
    progress.close()
    screen.close()
    assert "evaluating after step 5" in screen.text
    assert "evaluating" not in screen.text.rpartition("logreg on digits")[2]


class Terminal:
    """A pseudo terminal; `text` is its output without control sequences."""

    def __init__(self):
        self.master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self.raw = b""
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        while True:
            try:
                chunk = os.read(self.master, 65536)
            except OSError:  # the other side was closed
                return
            self.raw += chunk

    def close(self):
        self.stream.close()
        self.reader.join(10)
        os.close(self.master)

    @property
    def text(self):
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw.decode()).replace("\r\n", "\n").replace("\r", "\n")


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    yield screen
    if not screen.stream.closed:
        screen.close()


def test_terminal_is_drawn_on(screen):
    progress = make_progress(screen.stream, quiet=False)
    assert isinstance(progress, RichProgress)
    play(progress)
    screen.close()
    lines = [line.rstrip() for line in screen.text.splitlines() if line]
    assert lines[0] == "starting 2 nodes"
    assert "evaluated after step 10  epoch 1  test loss 0.7500  accuracy 0.8750" in lines
    assert lines[-5:] == [
        "logreg on digits, tf async, 2 nodes, 2 workers",
        "step 4,500/4,500  epoch 5  last loss 0.2500  5,200 steps/s",
        "node              CPU  memory      sent  received    over",
        "0     1.50 of 2 cores  200 MB  1.2 MB/s  2.0 GB/s  0.50 s",
        "1                   -  200 MB         -         -       -",
    ]


def test_terminal_is_drawn_at_most_four_times_a_second(screen):
    progress = RichProgress(screen.stream)
    progress.start(JOB, (), 10**6)
    end = time.monotonic() + 1.0
    updates, cost = 0, time.process_time()
    while time.monotonic() < end:
        progress.update(updates, 0.5, 1000.0, 10.0, 0)
        updates += 1
        time.sleep(0.001)
    cost = time.process_time() - cost
    progress.close()
    screen.close()
    assert 2 <= screen.text.count("logreg on digits") <= 7  # the first, at most five within the second, the last
    assert cost < 0.25


def test_brackets_are_no_markup(screen):
    progress = RichProgress(screen.stream)
    progress.message("lost [red]worker-1[/red]")
    progress.close()
    screen.close()
    assert "lost [red]worker-1[/red]" in screen.text


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}, {}])
def test_unusable_terminal_gets_plain_lines(screen, environment):
    assert terminal(screen.stream, {"TERM": "xterm"})
    assert not terminal(screen.stream, environment)
    assert not terminal(io.StringIO(), {"TERM": "xterm"})


def test_pipe_gets_plain_lines_and_quiet_nothing():
    assert isinstance(make_progress(io.StringIO(), quiet=False), PlainProgress)
    stream = io.StringIO()
    quiet = make_progress(stream, quiet=True)
    assert isinstance(quiet, QuietProgress)
    play(quiet)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("kind", [PlainProgress, RichProgress])
def test_call_is_cheap(kind):
    progress = kind(io.StringIO())
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for step in range(2000):
            progress.update(step, 0.5, 1000.0, 10.0, 0)
        best = min(best, time.process_time() - start)
    assert best / 2000 < 10e-6
