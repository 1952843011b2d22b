"""Exports of a model that translates: what is said of their weights."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from digit_pairs import lines
from model_checkpoints import save_model

from crosstrain.data.base import DataInfo, TextFeatures
from crosstrain.data.columns import ColumnSpec
from crosstrain.data.sources.translation.tokenizer import train_vocabulary
from crosstrain.records.store.run_vocabulary import write_vocabulary

pytestmark = pytest.mark.cluster

PIECES = 60
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.5.1|greedy,+50|sentences:500"


def trainer(*arguments):
    done = subprocess.run([sys.executable, "-m", "crosstrain.cli.main", *map(str, arguments)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run leaves that an export needs: two checkpoints of a model as it was drawn, the vocabulary, and its job."""
    folder = tmp_path_factory.mktemp("text-export")
    columns = ColumnSpec("source", "uint16", (None,)), ColumnSpec("target", "uint16", (None,))
    features = TextFeatures({"source": PIECES, "target": PIECES}, ("en", "de"))
    info = DataInfo("digits", {"train": 60, "test": 10}, columns, features)
    for step in (100, 200):
        save_model(folder, "transformer:tiny", info=info, step=step, seed=step)
    write_vocabulary(folder, train_vocabulary([*lines("en"), *lines("de")], PIECES, bytes_too=False))
    signatures = {"training": SIGNATURE, "end": SIGNATURE.replace("greedy", "beam4,penalty0.6")}
    (folder / "job.json").write_text(json.dumps({"schema": 1, "backend": "torch", "translation_signatures": signatures}))
    return folder


def test_figures_are_claimed_of_the_weights_that_were_evaluated(run, tmp_path):
    def described(name, *options):
        trainer("export", run, "--format", "safetensors", "-o", tmp_path / name, *options)
        found = json.loads((tmp_path / name / "model.json").read_text())
        says = "The weights are the mean of 2 checkpoints." in (tmp_path / name / "README.md").read_text()
        return [found[key] for key in ("updates", "averaged_checkpoints", "weights", "metrics", "translation_signature")], says

    assert described("one") == ([200, None, "trained", {"loss": 0.5, "accuracy": 0.75}, SIGNATURE], False)
    both = ["step-000000200", "step-000000100"]
    assert described("mean", "--average-checkpoints", "2") == ([200, both, "trained", None, None], True)
