"""A hanging task is reported with its line, in Python or native code, and all stacks."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from own_models import importable, write_model

from crosstrain.conformance.runs import trainer

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

TOY = Path(__file__).parent.parent / "toy"
STALL_SECONDS = 3

FORWARD = """
import ctypes
import os
import time

from crosstrain_toy.logreg import backward, forward as usual

calls = 0


def sleeps():
    while True:
        time.sleep(1)


def locks():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # with the interpreter's lock


def forward(parameters, x_bchw):
    global calls
    calls += 1
    if calls == 200:
        try:
            os.mkdir(os.environ["ONLY_ONE"])
        except FileExistsError:
            pass
        else:
            {hangs}()
    return usual(parameters, x_bchw)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder and output by place of the hang.

    Both run together, as each waits for --stall-timeout.
    """

    def run(hangs, folder):
        package = folder / "own_models" / "stuck"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").write_text("from crosstrain.models.logreg import build\n")
        (package / "toy.py").write_text(FORWARD.format(hangs=hangs))
        return folder, trainer(
            *("run", "--backend", "toy", "--model", "own_models.stuck", "--nodes", "3", "--network", "host", "--epochs", "1000"),
            *("--eval-every", "end", "--stall-timeout", str(STALL_SECONDS), "--out", str(folder), "--name", "run", "--no-monitor"),
            environment={**importable(folder, TOY), "ONLY_ONE": str(folder / "one")}, timeout_seconds=100,
        )  # fmt: skip

    cases = ["sleeps", "locks"]
    folders = [tmp_path_factory.mktemp("hangs") for _ in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        return dict(zip(cases, pool.map(run, cases, folders), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("hangs", ["sleeps", "locks"])
def test_hanging_task_is_named_with_its_line(ended, hangs):
    folder, done = ended[hangs]
    assert done.returncode == 1, done.stderr
    message = done.stderr.splitlines()[-1]
    stuck = folder / "own_models/stuck/toy.py"
    match = re.search(rf"stalled: .*; (worker-\d) stands at {re.escape(str(stuck))}:(\d+) \({hangs}\); ", message)
    assert match, done.stderr
    task, line = match.groups()
    assert ("sleep(1)" in stuck.read_text().splitlines()[int(line) - 1]) == (hangs == "sleeps")
    assert re.search(r"worker-\d, worker-\d stand at \S*exchange/(all_reduce|mesh|peer_links)\.py:\d+ \(", message)
    status = json.loads((folder / "run/status.json").read_text())
    assert (status["task"], status["exit_code"]) == (task, 1)
    stacks = (folder / "run/logs/stacks.txt").read_text()
    assert [f"== worker-{number}\n" in stacks for number in range(3)] == [True] * 3
    (event,) = [line for line in map(json.loads, (folder / "run/events.jsonl").read_text().splitlines()) if line["event"] == "stacks_found"]
    assert event["detail"]["tasks"][task] == f"{stuck}:{line} ({hangs})"


@pytest.mark.slow
def test_hanging_async_worker_is_named_with_its_line(tmp_path):
    """While the others train, or after their work: the chief or the driver notices it."""
    prelude = """
    import os
    import time

    calls = 0

    def sleeps():
        global calls
        calls += 1
        if calls == 200 and not os.path.exists(os.environ["ONLY_ONE"]):
            os.mkdir(os.environ["ONLY_ONE"])
            time.sleep(3600)
    """
    model = write_model(tmp_path, "stuck", "torch", prelude=prelude, body="sleeps()")
    done = trainer(
        *("run", "--backend", "torch", "--mode", "async", "--model", model, "--nodes", "2", "--network", "host", "--epochs", "60"),
        *("--eval-every", "end", "--stall-timeout", str(STALL_SECONDS), "--out", str(tmp_path), "--name", "run", "--no-monitor"),
        environment={**importable(tmp_path), "ONLY_ONE": str(tmp_path / "one")}, timeout_seconds=200,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    stuck = tmp_path / "own_models/stuck/torch.py"
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "stalled" in message
    assert re.search(rf"worker-\d stands at {re.escape(str(stuck))}:\d+ \(sleeps\); ", message), done.stderr
