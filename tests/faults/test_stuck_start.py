"""A task that gets stuck while it starts ends the run within --start-timeout, and says what it was doing and where it stands."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from own_models import importable, write_model

from crosstrain.conformance.runs import trainer

pytestmark = pytest.mark.faults

START_SECONDS = 30

CASES = {
    "waiting": ("tf", "time.sleep(3600)"),
    "holding the interpreter's lock": ("torch", "ctypes.PyDLL(None).sleep(3600)"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """By case: what the command said, and how many seconds it took. All at the same time, as each waits for --start-timeout."""

    def run(case, folder):
        backend, forever = CASES[case]
        prelude = f"import ctypes, time\n\ndef never_ends():\n    {forever}\n"
        model = write_model(folder, "stuck", backend, prelude=prelude, body="never_ends()")
        began = time.monotonic()
        done = trainer(
            "run", "--backend", backend, "--model", model, "--data", "digits", "--steps", "20", "--start-timeout", str(START_SECONDS),
            "--out", str(folder), environment=importable(folder), timeout_seconds=200,
        )  # fmt: skip
        return done, time.monotonic() - began

    folders = [tmp_path_factory.mktemp("stuck") for _ in CASES]
    with ThreadPoolExecutor(len(CASES)) as pool:
        return dict(zip(CASES, pool.map(run, CASES, folders), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_warm_up_that_never_ends_is_ended_and_named(ended, case):
    done, seconds = ended[case]
    assert done.returncode == 1, done.stderr
    assert seconds < START_SECONDS + 15
    assert "task worker-0 on node 0" in done.stderr
    assert "warming up" in done.stderr
    assert "never_ends" in done.stderr
