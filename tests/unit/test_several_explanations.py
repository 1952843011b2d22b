"""``trainer explain SWEEP``: a line per run, and what changes along each axis."""

import json

import pytest
from click.testing import CliRunner
from explained_runs import explained_run

from crosstrain.cli.commands.explain import explain
from crosstrain.core.errors import UsageError
from crosstrain.records.text import seconds_text
from crosstrain.report.analysis.conclusion import conclude
from crosstrain.report.analysis.sentences import render_conclusion
from crosstrain.report.runs.run import Run


def worker(compute, communicate):
    return {"data": 0.001, "compute": compute, "peers": 0.0, "communicate": communicate}


@pytest.fixture
def sweep(tmp_path):
    """Two backends at two batches: the larger batch computes more per step, equally in both."""
    for backend in ("tf", "torch"):
        for batch, compute in ((32, 0.01), (64, 0.09)):
            figures = {"examples_per_second": 1000.0 * batch / 32, "batch_size": batch, "global_batch_size": 2 * batch}
            name = f"{backend}-{batch}"
            explained_run(
                tmp_path / "sweep", [worker(compute, 0.03)] * 2, figures=figures, name=name, backend=backend, batch_size=batch, until=None
            )
    return tmp_path


def run(sweep, *options):
    return CliRunner().invoke(explain, ["sweep", "--out", str(sweep), *options], catch_exceptions=True)


def test_sweep_has_a_line_per_run_and_changes_per_axis(sweep):
    text = run(sweep).output
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "tf-32 1,000 communication, 73% of the step time" in lines
    assert "torch-64 2,000 computation, 74% of the step time" in lines
    (change,) = (line for line in lines if "torch" in line and "→" in line and line.startswith("global batch"))
    exchange = "communication 73% → 25% of a step"
    assert change == f"global batch 64 → 128 (torch): computation 24% → 74% of a step, {exchange}, examples/s 1,000 → 2,000."
    assert "backend tf → torch (global batch 64): examples/s 1,000 → 1,000." in lines


def test_document_has_the_figures(sweep):
    document = json.loads(run(sweep, "--json").output)
    assert [entry["run"] for entry in document["runs"]] == ["tf-32", "tf-64", "torch-32", "torch-64"]
    along = [entry for entry in document["changes"] if entry["axis"] == "global batch"]
    assert [entry["within"] for entry in along] == ["tf", "torch"]
    assert along[0]["step_fractions"]["compute"] == pytest.approx([10 / 41, 90 / 121])


def test_plan_needs_a_single_run(sweep):
    wrong = run(sweep, "--planned-steps", "10").exception
    assert isinstance(wrong, UsageError)
    assert "are about one run" in str(wrong)


@pytest.mark.parametrize(("size", "examples"), [(13, 13), (1437, 18)])
def test_time_per_example_is_of_the_largest_update(tmp_path, size, examples):
    """Batch 3 × accumulate 2 × 3 workers are 18 examples, but only 13 exist."""
    runs = []
    for backend, speed in (("tf", 500.0), ("torch", 1000.0)):
        figures = {"examples_per_second": speed, "batch_size": 6, "global_batch_size": 18}
        job = {"name": backend, "backend": backend, "batch_size": 3, "accumulate": 2, "until": None}
        path = explained_run(tmp_path, [worker(0.01, 0.03)] * 3, figures=figures, **job)
        described = json.loads((path / "job.json").read_text())
        (path / "job.json").write_text(json.dumps({**described, "dataset": {"sizes": {"train": size, "test": 4}}}))
        runs.append(Run(path))
    fast, slow = render_conclusion(conclude(runs)).bottlenecks
    assert fast.endswith(f" ({examples} examples take {seconds_text(examples / 1000)}).")
    assert slow.endswith(f" ({examples} examples take {seconds_text(examples / 500)}).")
