"""Real runs record everything that a comparison asks about."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from crosstrain.conformance.runs import trainer

pytestmark = pytest.mark.cluster

TOY = Path(__file__).parent.parent / "toy"


def test_compare_reads_differences_from_run_directories(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])]))
    for name, nodes, seed in (("first", 1, 0), ("second", 2, 1)):
        settings = ["--nodes", str(nodes), "--seed", str(seed), "--global-batch-size", "40", "--cores-per-node", "1"]
        done = trainer("run", "--backend", "toy", "--steps", "20", *settings, "--name", name, "--out", str(tmp_path))
        assert done.returncode == 0, done.stderr
    done = trainer("compare", "first", "second", "--by", "nodes", "--json", "--out", str(tmp_path))
    document = json.loads(done.stdout)
    comparability = document["comparability"]
    assert [entry["setting"] for entry in comparability["compared"]] == ["nodes", "workers", "batch_size"]
    assert [entry["setting"] for entry in comparability["differences"]] == ["seed"]
    assert list(comparability["not_recorded"]) == []  # the toy declares its packages, as every backend does
    (series,) = document["scaling"]
    speeds = [run["examples_per_second"] for run in document["runs"]]
    assert (series["scaling"], series["points"][1]["speedup"]) == ("strong", speeds[1] / speeds[0])
