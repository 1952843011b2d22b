"""Exports of a translating model: their README's code in plain frameworks, and its figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from digit_pairs import lines
from model_checkpoints import save_model

from crosstrain.data.base import DataInfo, TextFeatures
from crosstrain.data.columns import ColumnSpec
from crosstrain.data.sources.translation.tokenizer import train_vocabulary
from crosstrain.records.store.vocabulary import write_vocabulary

pytestmark = pytest.mark.cluster

PIECES = 60
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.5.1|greedy,+50|sentences:500"
FORMATS = {
    "torch": """
translate = lambda rows: program(torch.tensor(rows)).tolist()
assert torch.export.load("program.pt2").graph_signature.user_inputs == ("pieces",)
""",
    "savedmodel": """
translate = lambda rows: model.signatures["serving_default"](pieces=tf.constant(rows, tf.int32))["pieces"].numpy().tolist()
""",
}
BATCH = """
import json, sys
rows = [vocabulary.encode(line, add_eos=True) for line in ("one", "two three four five", "nine nine")]
longest = max(map(len, rows))
together = translate([row + [0] * (longest - len(row)) for row in rows])
alone = [translate([row])[0] for row in rows]
assert not any(name.partition(".")[0] == "crosstrain" for name in sys.modules)
print(json.dumps([together, alone, vocabulary.decode([piece for piece in alone[0] if piece > 2])]))
"""


def trainer(*arguments):
    done = subprocess.run([sys.executable, "-m", "crosstrain.cli.main", *map(str, arguments)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Make what an export needs: two checkpoints of an untrained model, its vocabulary and job."""
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


@pytest.fixture(scope="module")
def translated(run):
    """The output of the README's code for each format.

    Then pieces of a batch, of its sentences alone, and the text of the first.
    """
    with ThreadPoolExecutor() as pool:
        return dict(zip(FORMATS, pool.map(lambda name: _translated(run, name), FORMATS), strict=True))


def _translated(run, name):
    folder = run.parent / f"{run.name}-{name}"
    trainer("export", run, "--format", name, "-o", folder)
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    script = f"{code}\n{FORMATS[name]}\n{BATCH}"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    return printed, *json.loads(last)


def translations(rows):
    return [[piece for piece in row if piece != 0] for row in rows]


@pytest.mark.slow  # both frameworks export a search, half a minute of a core
@pytest.mark.parametrize("name", FORMATS)
def test_text_export_readme_code_translates(translated, name):
    printed, together, alone, text = translated[name]
    assert printed == [text]
    assert all(row for row in translations(alone))
    assert {len(row) for row in together} == {max(map(len, alone))}
    assert translations(together) == translations(alone)


@pytest.mark.slow
def test_text_export_formats_translate_equally(translated):
    assert translations(translated["torch"][2]) == translations(translated["savedmodel"][2])


@pytest.mark.thorough
def test_text_export_figures_are_of_evaluated_weights(run, tmp_path):
    def described(name, *options):
        trainer("export", run, "--format", "safetensors", "-o", tmp_path / name, *options)
        description = json.loads((tmp_path / name / "model.json").read_text())
        assert description["model"] == "transformer:tiny"
        assert (tmp_path / name / "README.md").read_text().startswith("# transformer:tiny as safetensors\n")
        is_documented = "The weights are the mean of 2 checkpoints." in (tmp_path / name / "README.md").read_text()
        return [
            description[key] for key in ("updates", "averaged_checkpoints", "weights", "metrics", "translation_signature")
        ], is_documented

    assert described("one") == ([200, None, "trained", {"loss": 0.5, "accuracy": 0.75}, SIGNATURE], False)
    both = ["step-000000200", "step-000000100"]
    assert described("mean", "--average-checkpoints", "2") == ([200, both, "trained", None, None], True)
