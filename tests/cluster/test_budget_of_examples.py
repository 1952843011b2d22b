"""``--examples N``: the same budget in either mode, also of a resumed run.

A sweep explains a budget in updates.
"""

import pytest

from crosstrain.conformance.runs import options_of, read_run, run_job, trainer

pytestmark = pytest.mark.cluster

JOB = {"backend": "torch", "nodes": 3, "batch_size": 10, "eval_every": "end", "calibrate": False}


@pytest.mark.thorough
@pytest.mark.parametrize(("mode", "update"), [("sync", 30), ("async", 10)])
def test_budget_of_examples_ends_with_completing_update(mode, update, tmp_path):
    run = run_job(tmp_path, mode=mode, examples=1000, **JOB)
    assert 1000 <= run.summary["examples"] < 1000 + update
    done = trainer("run", "--resume", str(run.path), "--examples", "+500", "--quiet")
    assert done.returncode == 0, done.stderr
    resumed = read_run(run.path).summary["examples"]
    assert run.summary["examples"] + 500 <= resumed < run.summary["examples"] + 500 + update
    again = trainer("run", "--resume", str(run.path), "--quiet")
    assert again.returncode == 2
    assert "--examples +5000" in again.stderr


def test_two_budgets_of_a_run_are_refused():
    done = trainer("run", "--examples", "10", "--epochs", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--epochs and --examples: got '1' and '10'; give one of the two" in done.stderr


@pytest.mark.thorough
def test_sweep_over_modes_explains_budget_in_updates(tmp_path):
    job = options_of({name: value for name, value in JOB.items() if name != "calibrate"})
    grid = ["--grid", "mode=sync,async", "--dry-run", "--out", str(tmp_path)]
    message = trainer("sweep", *grid, *job, "--steps", "100").stderr
    assert "so many updates are 3,000 examples in sync mode, as each is of all workers' batches, and 1,000 in async mode" in message
    assert "--examples 3000 gives every point as many" in message
    assert "so many updates" not in trainer("sweep", *grid, *job, "--examples", "3000").stderr
    assert "so many updates" not in trainer("sweep", *grid, *job, "--epochs", "1").stderr
