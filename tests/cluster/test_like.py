"""``--like RUN``: a new run with the settings of another, except those typed.

Untrusted files of a run decide no more than they may.
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from crosstrain.conformance.runs import read_run, run_job, trainer
from crosstrain.monitor.host import provenance, work_tree
from crosstrain.records.store.run_directory import RunReader

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]

JOB = {
    "backend": "torch",
    "steps": 60,
    "global_batch_size": 24,
    "lr": 0.03,
    "momentum": 0.5,
    "seed": 7,
    "eval_every": "20steps",
    "calibrate": False,
}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    return run_job(tmp_path_factory.mktemp("like"), name="first", deterministic=True, **JOB)


def like(earlier, *options, run="first"):
    return trainer("run", "--out", str(earlier.path.parent), "--like", run, *options, "--quiet")


def test_like_repeats_the_run(earlier):
    done = like(earlier, "--name", "again")
    assert done.returncode == 0, done.stderr
    again = read_run(earlier.path.parent / "again")
    np.testing.assert_array_equal(again.losses, earlier.losses)
    described = [json.loads((run.path / "job.json").read_text()) for run in (earlier, again)]
    assert {key for key in described[0] if described[0][key] != described[1][key]} <= {"name", "sources", "segments", "command", "cluster"}


def test_a_run_records_the_code_that_made_it(earlier, repository):
    environment = RunReader(earlier.path).environment()
    code = environment["code"]
    assert code == {**provenance(Path.cwd()), "crosstrain": work_tree(repository)}
    assert code["packages"]["torch"] == version("torch")
    assert environment["nodes"][0]["cpu_flags"]


def test_like_with_one_changed_setting(earlier):
    shown = json.loads(like(earlier, "--batch-size", "12", "--print-config", "--json", run=str(earlier.path)).stdout)
    values = {name: (entry["value"], entry["source"]) for name, entry in shown.items()}
    assert values["batch_size"] == (12, "flag")
    assert values["global_batch_size"][0] is None
    assert values["lr"] == (0.03, "run first")
    assert values["momentum"] == (0.5, "run first")
    assert values["name"][1] == "default"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume", "first"], "--like starts a new run and --resume continues one"),
        (["--steps", "+5"], "--steps: got '+5', but nothing is known of first to count from; give the number in all"),
        (["--force"], "--force: belongs to --resume"),
    ],
)
def test_like_meaningless_option_is_refused(earlier, options, message):
    done = like(earlier, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_like_foreign_run_sets_no_address(earlier):
    described = json.loads((earlier.path / "job.json").read_text())
    foreign = earlier.path.parent / "foreign"
    foreign.mkdir()
    for file in ("summary.json", "status.json", "env.json"):
        (foreign / file).write_bytes((earlier.path / file).read_bytes())
    (foreign / "job.json").write_text(json.dumps({**described, "mlflow": "http://127.0.0.1:9"}))
    done = like(earlier, "--print-config", run="foreign")
    assert done.returncode == 2
    assert "send its records to 'http://127.0.0.1:9'" in done.stderr
    assert like(earlier, "--print-config", "--trust-run", run="foreign").returncode == 0
    assert like(earlier, "--print-config", run="none").returncode == 2
