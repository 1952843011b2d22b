"""Whether runs that should train equally do so, from their records."""

import json

import numpy as np
import pytest
from comparison_samples import made, written
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.records.store.jsonl import encode
from crosstrain.records.store.schema import StepRecord
from crosstrain.report.analysis.conclusion import conclude
from crosstrain.report.analysis.quality import loss_agreements
from crosstrain.report.analysis.sentences import render_conclusion
from crosstrain.report.runs.run import Run


def recorded(folder, run, losses):
    """Write a run with these losses."""
    (path,) = written(folder, run)
    record = StepRecord(0, len(losses), 0, 1.0, 1.0, 32 * len(losses), tuple(map(float, losses)), (0.05,))
    (folder / run.name / "steps.jsonl").write_bytes(encode(record))
    return Run(path)


LOSSES = np.linspace(2.3, 0.2, 50, dtype=np.float32).tolist()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, "b and a: bitwise identical over 50 updates."),
        ({7: 1.00003}, "b and a agree within 0.01% over 50 updates (largest difference 3.0e-05)."),
        ({7: 1.00003, 9: 1.01}, "b and a agree within 0.01% until they diverge at update 10 of 50 (1.933429 and 1.914286)."),
        ({0: 1.01}, "b and a differ from the first update on (2.323000 and 2.300000)."),
        ({3: float("nan")}, "b and a agree within 0.01% until they diverge at update 4 of 50 (NaN and 2.171429)."),
    ],
    ids=["identical", "equal", "part", "first", "nan"],
)
def test_agreement_of_losses_is_described(tmp_path, change, sentence):
    other_losses = [value * change.get(index, 1.0) for index, value in enumerate(LOSSES)]
    runs = [recorded(tmp_path, made("a"), LOSSES), recorded(tmp_path, made("b", backend="tf"), other_losses)]
    (agreement,) = loss_agreements(runs)
    assert render_conclusion(conclude(runs)).losses == (sentence,)
    assert json.loads(json.dumps(conclude(runs).to_json()["losses"][0]))["updates"] == agreement.updates == 50


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"lr": 0.2}, {"global_batch_size": 64}, {"mode": "async"}, {"precision": "bf16"}],
    ids=lambda changes: next(iter(changes)),
)
def test_runs_with_different_training_are_not_compared(tmp_path, changes):
    runs = [recorded(tmp_path, made("a"), LOSSES), recorded(tmp_path, made("b", **changes), LOSSES)]
    assert loss_agreements(runs) == []


@pytest.mark.parametrize(
    ("changed", "comparable"),
    [
        ({"nodes": [2, 1], "epochs": [12, 20]}, False),
        ({"nodes": [2, 1], "global_batch_size": [None, None]}, False),
        ({"lr": [0.1, 0.05]}, False),
        ({"mode": ["async", "sync"]}, False),
        ({"backend": ["torch", "tf"], "epochs": [12, 20], "eval_every": ["1epoch", "end"]}, True),
    ],
)
def test_resumed_run_with_other_history_is_not_compared(tmp_path, changed, comparable):
    first, second = recorded(tmp_path, made("a"), LOSSES), recorded(tmp_path, made("b"), LOSSES)
    path = second.path / "job.json"
    segments = [{"step": 0, "run_seconds": 0.0}, {"step": 20, "run_seconds": 0.5, "changed": changed}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "segments": segments}))
    assert bool(loss_agreements([first, Run(second.path)])) is comparable


@pytest.mark.parametrize(
    "changes", [{"nodes": 2, "global_batch_size": 32}, {"steps": 30}, {"compile": "on"}], ids=lambda changes: next(iter(changes))
)
def test_comparable_runs_agree_on_common_updates(tmp_path, changes):
    runs = [recorded(tmp_path, made("a"), LOSSES), recorded(tmp_path, made("b", **changes), LOSSES[:30])]
    (agreement,) = loss_agreements(runs)
    assert (agreement.updates, agreement.identical) == (30, True)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(2**-10, 2**10, width=32), min_size=1, max_size=20), st.integers(0, 19), st.floats(1e-6, 1.0))
def test_losses_part_at_the_first_large_difference(tmp_path_factory, losses, place, change):
    folder = tmp_path_factory.mktemp("runs")
    other_losses = [np.float32(value * (1 + change)) if index >= place else value for index, value in enumerate(losses)]
    (agreement,) = loss_agreements([recorded(folder, made("a"), losses), recorded(folder, made("b"), other_losses)])
    relative = [abs(first - second) / max(first, second) for first, second in zip(losses, map(float, other_losses), strict=True)]
    apart = [index for index, difference in enumerate(relative) if difference > 1e-4]
    assert agreement.parts_at == (apart[0] + 1 if apart else None)
    assert agreement.largest == pytest.approx(max(relative), rel=1e-9)
