"""A number that a run claims about itself bounds no loop and no allocation."""

from __future__ import annotations

import json
import shutil
import time
import tracemalloc

import pytest
from report_runs import make_run

from crosstrain.cli.group import invoke
from crosstrain.records.store.jsonl import MAX_NODES
from crosstrain.report.compare.rows import make_entry
from crosstrain.report.compare.run_tables import one_run, side_by_side_table, to_text
from crosstrain.report.runs.run import Run


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"), "one", steps=40, calibrated=True)


@pytest.fixture
def claim(honest, tmp_path):
    """Return a function that copies the run with other figures in one of its documents."""

    def copy(document, **figures):
        path = tmp_path / "runs" / "claims"
        shutil.copytree(honest, path)
        fields = json.loads((path / document).read_text())
        (path / document).write_text(json.dumps({**fields, **figures}))
        return path

    return copy


CLAIMS = [
    ("summary.json", {"nodes": 1_000_000_000}),
    ("summary.json", {"nodes": MAX_NODES}),
    ("summary.json", {"workers": 1_000_000_000}),
    ("summary.json", {"steps": 2**53, "resumed": 2**53}),
    ("job.json", {"nodes": 1_000_000_000}),
    ("job.json", {"nodes": MAX_NODES, "procs_per_node": MAX_NODES, "ps": MAX_NODES}),
    ("job.json", {"total_steps": 2**53, "epochs": 2**60, "seed": 2**63 - 1}),
    ("calibration.json", {"schema": 1, "batch_size": 2**53, "half_batch_size": 2**52, "payload_bytes": 2**53, "workers": []}),
]
COMMANDS = [["runs", "show"], ["compare"], ["compare", "--layout=rows"], ["watch"], ["explain"], ["predict"], ["runs", "--out"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(("document", "figures"), CLAIMS, ids=str)
def test_claimed_count_costs_nothing(claim, honest, command, document, figures, capfd):
    path = claim(document, **{"schema": 1, **figures}) if document != "calibration.json" else _calibrated(claim, figures)
    began = time.monotonic()
    tracemalloc.start()
    code = invoke([*command, str(path.parent if command[-1] == "--out" else path)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert code in (0, 1, 2), capfd.readouterr().err
    assert len(capfd.readouterr().out) < 20_000
    assert time.monotonic() - began < 10
    assert peak < 50e6


def _calibrated(claim, figures):
    path = claim("summary.json")
    (path / "calibration.json").write_text(json.dumps(figures))
    return path


def test_report_draws_existing_nodes_only(claim, honest, tmp_path):
    path = claim("summary.json", nodes=MAX_NODES)
    assert invoke(["report", str(path), str(honest), "--output", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert text.count("node 1") > 1
    assert text.count("node 2") == 0


def test_tables_have_line_per_node_with_figures(honest):
    summary = {**json.loads((honest / "summary.json").read_text()), "nodes": 1_000_000_000}
    assert sum(line.startswith(("0 ", "1 ", "2 ")) for line in to_text(one_run(summary)).splitlines()) == 2
    text = to_text(side_by_side_table([make_entry([Run.of_documents(summary, {}, path=honest)])], [frozenset()]))
    assert text.count("peak RSS") == 2
