"""Vocabularies are trained in a separate process, which ends with its parent."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import MarkedRun, wait_until

from crosstrain.core.errors import TrainerError
from crosstrain.data.sources.translation.tokenizer import train_vocabulary
from crosstrain.data.sources.translation.vocabulary_training import trained_model


def long_words(lines):
    """Return text that takes sentencepiece a second, and fifty times its size, per megabyte."""
    draw = random.Random(1)
    return ["".join(draw.choices("abcdefghijklmnop", k=32_000)) for _ in range(lines)]


@pytest.mark.quick_cases("9")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupt_ends_vocabulary_training_immediately(tmp_path, number):
    for name, lines in (("text", long_words(300)), ("text.test", ["a b", "c d"])):
        for language in ("en", "de"):
            (tmp_path / f"{name}.{language}").write_text("\n".join(lines))
    command = ["data", "prepare", f"parallel-text:{tmp_path / 'text'}:en-de"]
    with MarkedRun(command, tmp_path, {"TRAINER_DATA_CACHE": str(tmp_path / "cache")}) as run:
        wait_until(lambda: run.alive("vocabulary_training"), 30, "the process that makes the vocabulary")
        time.sleep(1.5)  # so that it has started
        assert run.process.poll() is None, run.stderr()
        os.kill(run.process.pid, number)
        assert run.wait(4) == (130 if number == signal.SIGINT else -signal.SIGKILL)
        wait_until(lambda: not run.alive(), 4, "the end of every process")
        if number == signal.SIGINT:
            assert run.stderr().splitlines()[-1].startswith("error: interrupted")
            assert "Traceback" not in run.stderr()


LIMITED = """
import resource, sys
from crosstrain.data.sources.translation.tokenizer import train_vocabulary
resource.setrlimit(resource.RLIMIT_AS, (300 << 20, resource.RLIM_INFINITY))
train_vocabulary(open(sys.argv[1]).read().split(), 400, bytes_too=True)
"""


@pytest.mark.thorough
def test_vocabulary_training_reports_out_of_memory(tmp_path):
    path = tmp_path / "words"
    path.write_text("\n".join(long_words(400)))
    done = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "TrainerError: data: the vocabulary of 400 pieces was not made: the process that makes it had not enough memory" in last


def children():
    """Return this process's children; those of other tests may be reaped at any time."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGTERM, "was killed by SIGTERM$"), (signal.SIGKILL, "was killed, as the system does where memory")],
)
def test_killed_process_is_reported(number, how):
    before = children()

    def lines():
        yield "some words"
        for pid in children() - before:
            os.kill(pid, number)
        yield from ["more words"] * 100_000  # more than a pipe holds

    with pytest.raises(TrainerError, match=how):
        train_vocabulary(lines(), 300, bytes_too=True)
    assert children() <= before


def test_unreadable_text_leaves_nothing():
    before = children()

    def lines():
        yield "some words"
        raise LookupError("gone")

    with pytest.raises(LookupError):
        trained_model(lines(), 300, bytes_too=True)
    assert children() <= before
