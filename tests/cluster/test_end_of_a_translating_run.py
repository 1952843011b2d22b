"""An interrupt while a run translates the test split: the run is complete, with checkpoint."""

import json
import os
import signal

import numpy as np
import pytest
from digit_pairs import DIGITS, lines, text
from processes import MarkedRun, wait_until

from crosstrain.checkpoint import list_checkpoints

pytestmark = pytest.mark.cluster


@pytest.mark.thorough
def test_interrupt_while_translating_leaves_complete_run(tmp_path):
    for language in DIGITS:
        (tmp_path / f"digits.{language}").write_text(text(lines(language, np.arange(1000, 5000))))
    path = tmp_path / "run"
    data = f"parallel-text:{tmp_path}/digits:en-de?vocabulary=320,held-out=2000"
    options = [
        "--backend", "torch", "--model", "transformer:tiny?dropout=0", "--data", data, "--steps", "5", "--batch-size", "32",
        "--eval-every", "end", "--eval-sentences", "5", "--beam", "64", "--no-calibrate", "--no-monitor",
    ]  # fmt: skip
    with MarkedRun(["run", "--name", "run", "--out", str(tmp_path), *options], tmp_path) as process:
        wait_until(lambda: list_checkpoints(path) or process.process.poll() is not None, 90, "a checkpoint")
        assert process.process.poll() is None, process.stderr()
        os.kill(process.process.pid, signal.SIGINT)
        assert process.wait(60) == 0, process.stderr()
        wait_until(lambda: not process.alive(), 10, "the end of every process")
        assert "its test sentences were not all translated (interrupted by the user)" in process.stderr()
        assert "trainer: ending the translation; the run is complete" in process.stderr()
        assert "saving a checkpoint" not in process.stderr()
        assert f"not translated: trainer evaluate {path}" in process.stdout()
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["state"], summary["steps"], summary["translated"]) == ("succeeded", 5, None)
    assert [checkpoint.name for checkpoint in list_checkpoints(path)] == ["step-000000005"]
