"""The benchmark of predictions (`python -m benchmarks.prediction`): fits and judgements."""

from __future__ import annotations

import tomllib

import pytest
from predict_samples import COMPUTE, PAYLOAD, RING, calibrated_run

from benchmarks.prediction import table as render_predictions
from benchmarks.prediction.__main__ import BANDWIDTHS, BATCH_SIZE, FITTED, SCENES, Wanted, main, wanted_runs
from benchmarks.prediction.table import BEGIN, END, judge, markdown, toml_text
from crosstrain.report.analysis.cost_model import Link, ring_step
from crosstrain.report.analysis.predictions import Validation, read_validation

SCENE = SCENES[0]


def make(folder, wanted):
    """Make a run of the known model where the benchmark looks for it."""
    return calibrated_run(
        folder, name=wanted.name, backend=wanted.scene.backend, nodes=wanted.nodes, bandwidth=mbit(wanted), batch_size=wanted.batch_size
    )


def mbit(wanted):
    return f"{wanted.bits_per_second / 1e6:g}mbit"


@pytest.fixture
def measured(tmp_path):
    for wanted in wanted_runs(SCENE):
        make(tmp_path, wanted)
    return tmp_path


def test_fitted_runs_are_not_judged(measured):
    for chosen in FITTED.values():
        judged = judge(measured, list(wanted_runs(SCENE)), chosen, "w")
        assert len(judged.points) == 3 * len(BANDWIDTHS) + 1 - len(chosen)
        seen = {(point.nodes, point.bandwidth_bits_per_second, point.batch_size) for point in judged.points}
        assert not {(nodes, Wanted(SCENE, nodes, bandwidth).bits_per_second, BATCH_SIZE) for nodes, bandwidth in chosen} & seen


def test_correct_model_has_no_error(measured):
    judged = judge(measured, list(wanted_runs(SCENE)), FITTED[2], "w")
    assert judged.largest_error < 1e-6
    point = next(point for point in judged.points if (point.nodes, point.batch_size) == (4, BATCH_SIZE // 2))
    step = ring_step(COMPUTE.seconds(BATCH_SIZE // 2), PAYLOAD, 4, 4, RING, Link(point.bandwidth_bits_per_second / 8))
    assert point.measured_examples_per_second == pytest.approx(2 * BATCH_SIZE / step.seconds)


def test_written_validation_is_read_back(measured, tmp_path):
    judged = tuple(judge(measured, list(wanted_runs(SCENE)), chosen, "w") for chosen in FITTED.values())
    path = tmp_path / "table.toml"
    path.write_text(toml_text(Validation("2025-01-01", 'a "machine"', judged)), encoding="utf-8")
    assert read_validation(path) == Validation("2025-01-01", 'a "machine"', judged)
    assert tomllib.loads(path.read_text())["judged"][0]["fitted_on"] == ["2 nodes, 300mbit"]


def test_document_has_all_points(measured):
    judged = tuple(judge(measured, list(wanted_runs(SCENE)), chosen, "w") for chosen in FITTED.values())
    lines = markdown(Validation("2025-01-01", "m", judged)).splitlines()
    assert len([line for line in lines if line.startswith(f"| {SCENE.backend} | sync | ")]) == 2 + 3 * len(BANDWIDTHS) + 1
    assert sum(" – " in line for line in lines) == 3


def test_writing_replaces_the_text_between_the_marks(measured, tmp_path, monkeypatch):
    document, table = tmp_path / "scaling.md", tmp_path / "table.toml"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(render_predictions, "DOCUMENT", document)
    monkeypatch.setattr(render_predictions, "VALIDATION_FILE", table)
    assert main(["write", "--out", str(measured), "--only", SCENE.name]) == 0
    text = document.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert len(read_validation(table).judged) == 2
