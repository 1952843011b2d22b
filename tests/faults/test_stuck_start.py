"""A task that gets stuck while it starts ends the run within --start-timeout, and says what it was doing and where it stands."""

import time

import pytest
from own_models import importable, write_model

from crosstrain.conformance.runs import trainer

pytestmark = pytest.mark.faults

START_SECONDS = 30

CASES = {
    "waiting": ("tf", "time.sleep(3600)"),
    "holding the interpreter's lock": ("torch", "ctypes.PyDLL(None).sleep(3600)"),
}


@pytest.mark.parametrize(("backend", "forever"), CASES.values(), ids=CASES.keys())
def test_a_warm_up_that_never_ends_is_ended_and_named(backend, forever, tmp_path):
    prelude = f"import ctypes, time\n\ndef never_ends():\n    {forever}\n"
    model = write_model(tmp_path, "stuck", backend, prelude=prelude, body="never_ends()")
    began = time.monotonic()
    done = trainer(
        "run", "--backend", backend, "--model", model, "--data", "digits", "--steps", "20", "--start-timeout", str(START_SECONDS),
        "--out", str(tmp_path), environment=importable(tmp_path), timeout_seconds=200,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert time.monotonic() - began < START_SECONDS + 15
    assert "task worker-0 on node 0" in done.stderr
    assert "warming up" in done.stderr
    assert "never_ends" in done.stderr
