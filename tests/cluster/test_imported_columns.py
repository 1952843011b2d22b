"""nn.Modules on tables and texts, with losses of their own: on torch, and translated."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from own_models import importable

from crosstrain.conformance.runs import relative_difference, run_job, trainer

pytestmark = pytest.mark.cluster
TESTS = Path(__file__).parent.parent
NETS = TESTS / "imported/column_nets.py"
ENVIRONMENT = importable(TESTS / "tables")
FEW = {"Attentive": "phrases", "LossEach": "rings"}
MORE = {"TwoInputs": "rings", "Joined": "rings", "Recurrent": "phrases", "LossMean": "phrases"}
TRANSLATED = [(FEW, name) for name in FEW] + [pytest.param(MORE, name, marks=pytest.mark.thorough) for name in MORE]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return {**ENVIRONMENT, "TRAINER_DATA_CACHE": str(tmp_path_factory.mktemp("cache") / "data")}


@pytest.fixture(scope="module")
def passes(environment, tmp_path_factory):
    """Return a function that gives a module's passes, on torch and translated.

    Those of all modules of a group are made together.
    """
    made = {}

    def passes_of(group, name):
        if name not in made:
            folder = tmp_path_factory.mktemp("passes")
            lines = "\n".join(f"{group[net]} {NETS}:{net}" for net in group)
            for framework in ("torch", "tf"):
                command = [sys.executable, TESTS / "imported/column_passes.py", framework, folder]
                subprocess.run(command, input=lines, text=True, check=True, env=environment)
            for number, net in enumerate(group):
                made[net] = [np.load(folder / f"{framework}-{number}.npz") for framework in ("torch", "tf")]
        return made[name]

    return passes_of


def difference(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.thorough
@pytest.mark.parametrize(("group", "name"), TRANSLATED)
def test_translation_equals_module_on_columns(passes, group, name):
    expected, actual = passes(group, name)
    assert sorted(actual.files) == sorted(expected.files)
    assert actual["evaluated"].shape == expected["evaluated"].shape
    assert difference(actual["evaluated"], expected["evaluated"]) <= 1e-6
    assert difference(actual["trained"], expected["trained"]) <= 1e-6
    gradients = [key for key in expected.files if key.startswith("gradient ")]
    flat = [np.concatenate([arrays[key].ravel() for key in gradients]) for arrays in (actual, expected)]
    assert difference(*flat) <= 1e-5
    for key in expected.files:
        if key.startswith("buffer "):
            np.testing.assert_allclose(actual[key], expected[key], rtol=1e-5, atol=1e-6)


STEPS = {"global_batch_size": 7, "steps": 58, "lr": 0.05, "deterministic": True, "eval_every": "end", "tensorboard": False}


@pytest.mark.thorough
def test_mean_loss_is_the_same_on_any_number_of_workers(environment, tmp_path):
    """400 examples in steps of 7 on 3 workers: slices are uneven, and the last step's are empty."""
    options = {"model": f"{NETS}:LossMean", "data": "phrases", "environment": environment, **STEPS}
    several = run_job(tmp_path, backend="torch", nodes=3, **options)
    alone = run_job(tmp_path, backend="tf", **options)
    assert relative_difference(several.losses, alone.losses) <= 1e-4
    assert several.evals[-1].loss == pytest.approx(alone.evals[-1].loss, rel=1e-4)
    assert several.evals[-1].metrics == {}


@pytest.mark.thorough
def test_own_loss_has_the_accuracy_of_its_logits(environment, tmp_path):
    options = {"model": f"{NETS}:LossEach", "data": "rings", "environment": environment, **STEPS, "steps": 200, "lr": 0.3}
    runs = [
        run_job(tmp_path, backend="torch", **options),
        run_job(tmp_path, backend="tf", mode="async", nodes=2, **{**options, "deterministic": False}),
    ]
    for run in runs:
        assert run.evals[-1].metrics["accuracy"] > 0.5
        evaluated = trainer("evaluate", str(run.path), "--model", f"{NETS}:LossEach", "--json", environment=environment)
        assert json.loads(evaluated.stdout)["accuracy"] == pytest.approx(run.evals[-1].metrics["accuracy"])
    model, target = ["--model", f"{NETS}:LossEach"], tmp_path / "exported"
    arguments = ["--format", "safetensors", *model, "--output", str(target)]
    exported = trainer("export", str(runs[0].path), *arguments, environment=environment)
    assert exported.returncode == 0, exported.stderr
    written = json.loads((target / "model.json").read_text())
    assert (written["target"], written["classes"], sorted(written["mean"])) == ("ring", 3, ["x", "y"])


PROBLEMS = {
    "rings Misnamed": "got 'z'; allowed: x, y, or a single parameter of any name",
    "rings Unnamed": "got 'right'; allowed: x, y, or a single parameter of any name",
    "rings Pair": "returns a tuple of 2; return one tensor of them: logits [batch, classes] are needed.",
    "rings WrongLoss": "its method loss returned a tensor of shape (4, 3); one loss per example, [batch], or their mean is needed.",
    "rings WholeLoss": "is torch.int64 [4] for 4 examples; float32 [batch] or a mean is needed.",
    "rings Recurrent": "needs a value for vocab_size; write",
    "phrases Joined": "needs a value for in_features; write",
    "mixed Joined": "columns tokens (uint16), x (float32), which cannot be joined; name its parameters after them.",
    "wide Joined": "an example of 'x' has more than 67,108,864 numbers",
    "bare Recurrent": "the data has no column that is to be predicted; give the module a method loss(self, columns)",
    "digits Joined": "fails on images of 1×8×8 (channels, height, width)",
}
ASK = """
import json, sys
from dataclasses import replace
from crosstrain_tables import PHRASES, RINGS
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.data.columns import ColumnSpec
from crosstrain.models.imported.importing import data_facts, outputs
from crosstrain.models.imported.requests import Request
from crosstrain.models.imported.torch.process import answer
infos = {{made.name: DataInfo(made.name, {{}}, made.columns, made.load(None).features) for made in (PHRASES, RINGS)}}
infos["digits"] = DataInfo.of_images("digits", {{}}, ImageFeatures((1, 8, 8), 10, (0.0,), (1.0,)))
infos["mixed"] = replace(infos["phrases"], columns=(*PHRASES.columns, RINGS.columns[0]))
infos["bare"] = replace(infos["phrases"], features=replace(infos["phrases"].features, target="", classes=0))
infos["wide"] = replace(infos["rings"], columns=(ColumnSpec("x", "float32", (1 << 20, 1 << 20)), *RINGS.columns[1:]))
problems = {{}}
for line in json.load(sys.stdin):
    data, name = line.split()
    arguments = {{"in_features": "3"}} if data in ("mixed", "wide", "digits") else {{}}
    info = infos[data]
    problems[line] = answer(Request("{nets}:" + name, arguments, data_facts(info), outputs(info), 0, {out!r}, True))
print(json.dumps(problems))
"""


@pytest.fixture(scope="module")
def problems(environment, tmp_path_factory):
    script = ASK.format(nets=NETS, out=str(tmp_path_factory.mktemp("described")))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=json.dumps(list(PROBLEMS)), text=True, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", PROBLEMS)
def test_module_that_fits_no_columns_is_explained(problems, case):
    assert PROBLEMS[case] in problems[case]
    assert "\n" not in problems[case]
