"""A task stuck at its start ends the run within --start-timeout, with its activity and line."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
from own_models import importable, write_model

from crosstrain.conformance.runs import trainer

pytestmark = pytest.mark.faults


def seconds_of(run):
    """Seconds from the start of a run to its recorded end.

    The command itself may take longer to start and end.
    """
    status = json.loads((run / "status.json").read_text())
    created, changed = (datetime.fromisoformat(status[name]) for name in ("created_at", "changed_at"))
    return (changed - created).total_seconds()


START_SECONDS = {"torch": 40, "tf": 60}
"""By backend: long enough for its import on a machine that has much else to do."""

CASES = {
    "waiting": "time.sleep(3600)",
    "holding the interpreter's lock": "ctypes.PyDLL(None).sleep(3600)",
}


@pytest.fixture(scope="module", params=["torch", pytest.param("tf", marks=pytest.mark.slow)])
def ended(request, tmp_path_factory):
    """The backend, and by case the output and the run's folder.

    All run together, as each waits for --start-timeout.
    """
    backend = request.param

    def run(case, folder):
        forever = CASES[case]
        prelude = f"import ctypes, time\n\ndef never_ends():\n    {forever}\n"
        model = write_model(folder, "stuck", backend, prelude=prelude, body="never_ends()")
        done = trainer(
            "run", "--backend", backend, "--model", model, "--data", "digits", "--steps", "20",
            "--start-timeout", str(START_SECONDS[backend]), "--out", str(folder), "--name", "run",
            environment=importable(folder), timeout_seconds=200,
        )  # fmt: skip
        return done, folder / "run"

    folders = [tmp_path_factory.mktemp("stuck") for _ in CASES]
    with ThreadPoolExecutor(len(CASES)) as pool:
        return backend, dict(zip(CASES, pool.map(run, CASES, folders), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_endless_warm_up_ends_run_and_is_named(ended, case):
    backend, results = ended
    done, path = results[case]
    assert done.returncode == 1, done.stderr
    assert seconds_of(path) < START_SECONDS[backend] + 15
    assert "task worker-0 on node 0" in done.stderr
    assert "warming up" in done.stderr
    assert "never_ends" in done.stderr
