"""nn.Modules as they are: on torch, and translated to TensorFlow."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from imported_coverage.plan import MODULES
from imported_coverage.trial import compared, computed
from own_models import own_cache

from crosstrain.conformance.runs import relative_difference, run_job, trainer
from crosstrain.models.imported.translated import TRANSLATED as TRANSLATED_OPERATIONS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(960)]  # one test computes all modules: a minute, several beside others
FOLDER = Path(__file__).parent.parent / "imported"
NETS = FOLDER / "nets.py"
NET = Path(__file__).parents[2] / "examples/own_torch/net.py"
TRANSLATED = ("Recurrent", "Attentive", "Convolutional", "Quantised", "InPlace")
DRAWN = [f"module {seed}" for seed in (1, 2, 3, 4, 5, 7, 8, 9, 11, 13)]  # `make translations` runs all 200
REFERENCES = {name: f"{NETS}:{name}" for name in (*TRANSLATED, "Eigen")} | {name: MODULES[name] for name in DRAWN}
SMALL_STEPS = {"data": "glyphs", "global_batch_size": 12, "steps": 8, "lr": 0.001, "deterministic": True, "eval_every": "end"}

ASYNC = {name: value for name, value in SMALL_STEPS.items() if name != "deterministic"}


cache = pytest.fixture(scope="module", autouse=True)(own_cache)


@pytest.fixture(scope="module")
def passes(cache, tmp_path_factory):
    """The folder of all modules' passes on both frameworks, and their lines of results."""
    folder = tmp_path_factory.mktemp("passes")
    return folder, {framework: computed(framework, list(REFERENCES.values()), folder) for framework in ("torch", "tf")}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*TRANSLATED, *DRAWN])
def test_translation_equals_module(passes, name):
    folder, lines = passes
    number = list(REFERENCES).index(name)
    assert [lines[framework][number]["problem"] for framework in lines] == ["", ""]
    assert compared(folder, number) == ""


@pytest.mark.thorough
def test_operation_without_a_form_is_named_with_its_line(passes):
    line = passes[1]["tf"][list(REFERENCES).index("Eigen")]
    number = next(place for place, text in enumerate(NETS.read_text().splitlines(), 1) if "linalg.eigh" in text)
    assert f"the operation aten._linalg_eigh.default has no form on TensorFlow ({NETS}, line {number})" in line["problem"]
    assert passes[1]["torch"][list(REFERENCES).index("Eigen")]["problem"] == ""


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    """Results and gradients of single operations on torch and on TensorFlow."""
    folder = tmp_path_factory.mktemp("operations")
    for framework in ("torch", "tf"):
        subprocess.run([sys.executable, FOLDER / "operations.py", framework, folder / f"{framework}.npz"], check=True)
    return [dict(np.load(folder / f"{framework}.npz")) for framework in ("torch", "tf")]


def test_operations_equal_those_of_torch(operations):
    expected, actual = operations
    assert [str(value) for arrays in operations for name, value in arrays.items() if name.endswith(" failed")] == []
    assert len([name for name in expected if name.endswith(" result 0")]) == len([name for name in actual if name.endswith(" result 0")])
    for name, value in expected.items():
        if name in actual:
            np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=1e-4 * np.abs(value).max(initial=1e-6), err_msg=name)
        elif " gradient " in name:
            assert not np.any(value), name
        else:
            assert not name.endswith(" result 0"), name  # TensorFlow computes no second results that models do not use


def test_translated_operations_are_those_of_tensorflow():
    script = (
        "import crosstrain.models.imported.tf.forward, json\n"
        "from crosstrain.models.imported.tf.operations import OPERATIONS\nprint(json.dumps(list(OPERATIONS)))"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, check=True, stdout=subprocess.PIPE)
    assert set(json.loads(done.stdout)) == TRANSLATED_OPERATIONS


@pytest.fixture(scope="module")
def runs(cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return {
        backend: run_job(out, backend=backend, model=f"{NET}:Net", nodes=2, tensorboard=False, **SMALL_STEPS) for backend in ("torch", "tf")
    }


def test_runs_of_a_module_agree_on_both_frameworks(runs):
    assert relative_difference(runs["tf"].losses, runs["torch"].losses) <= 1e-4
    assert len(set(runs["torch"].losses)) == SMALL_STEPS["steps"]


def test_run_records_the_absolute_path_of_its_module(runs):
    for run in runs.values():
        assert json.loads((run.path / "job.json").read_text())["model"] == f"{NET.resolve()}:Net"


@pytest.mark.thorough
def test_rows_of_a_csv_file_train_alike(cache, tmp_path):
    data = f"csv:{NET.parent / 'table.csv'}?target=y,task=regression"
    changed = {**SMALL_STEPS, "data": data, "steps": 300, "lr": 0.02, "momentum": 0.9, "nodes": 2, "tensorboard": False}
    runs = [run_job(tmp_path, backend=backend, model=f"{NET}:Table", **changed) for backend in ("torch", "tf")]
    assert relative_difference(runs[1].losses[:100], runs[0].losses[:100]) <= 1e-3
    assert all(run.summary["eval"]["r2"] > 0.9 for run in runs)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", "tf"])
def test_module_trains_asynchronously(cache, tmp_path, backend):
    run = run_job(tmp_path, backend=backend, model=f"{NET}:Net?width=8", mode="async", nodes=2, tensorboard=False, **ASYNC)
    assert run.summary["updates_applied"] == SMALL_STEPS["steps"]


@pytest.mark.thorough
def test_run_of_a_module_resumes_on_the_other_framework(runs):
    done = trainer("run", "--resume", str(runs["torch"].path), "--model", f"{NET}:Net", "--backend", "tf", "--steps", "+2")
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_changed_source_is_refused(cache, tmp_path):
    net = tmp_path / "net.py"
    shutil.copy(NET, net)
    run = run_job(tmp_path, backend="torch", model=f"{net}:Net?width=4", tensorboard=False, **SMALL_STEPS)
    net.write_text(net.read_text().replace("F.relu(self.norm2", "F.leaky_relu(self.norm2"))
    model = ["--model", f"{net}:Net?width=4"]
    evaluated = trainer("evaluate", str(run.path), *model)
    exported = trainer("export", str(run.path), "--format", "safetensors", *model)
    resumed = trainer("run", "--resume", str(run.path), *model, "--steps", "+2")
    for done in (evaluated, exported, resumed):
        assert done.returncode == 2
        assert "has changed since the checkpoint was saved" in done.stderr
    assert trainer("run", "--resume", str(run.path), *model, "--steps", "+2", "--force").returncode == 0


@pytest.mark.thorough
def test_exported_weights_load_into_the_module(cache, runs, tmp_path):
    target = tmp_path / "exported"
    done = trainer("export", str(runs["tf"].path), "--format", "safetensors", "--model", f"{NET}:Net", "--output", str(target))
    assert done.returncode == 0, done.stderr
    script = (
        f"import sys; sys.path.insert(0, {str(NET.parent)!r})\n"
        "from net import Net\nfrom safetensors.torch import load_file\n"
        f"weights = load_file({str(target / 'model.safetensors')!r})\n"
        "print(Net(channels=3).load_state_dict(weights, strict=False))\n"
    )
    loaded = subprocess.run([sys.executable, "-c", script], text=True, check=True, stdout=subprocess.PIPE).stdout
    assert loaded == "<All keys matched successfully>\n"
    refused = trainer(
        "export", str(runs["torch"].path), "--format", "torch", "--model", f"{NET}:Net", "--output", str(tmp_path / "program")
    )
    assert refused.returncode == 2
    assert "Only its weights can be exported: --format safetensors" in refused.stderr


@pytest.mark.parametrize(("option", "value"), [("--precision", "bf16"), ("--compile", "on")])
def test_unsupported_option_is_refused_by_name(cache, tmp_path, option, value):
    done = trainer("run", "--model", f"{NET}:Net", "--backend", "torch", "--data", "glyphs", option, value, "--out", str(tmp_path))
    assert done.returncode == 2
    assert f"got {value!r}; " in done.stderr
    assert "is an imported model" in done.stderr


@pytest.mark.thorough
def test_changed_data_file_of_a_constructor_is_read_again(cache, tmp_path):
    """A pretrained model's weights are a file that its constructor opens."""
    (tmp_path / "own.py").write_text(PRETRAINED.format(file=str(tmp_path / "bias.txt")))
    script = BUILT.format(folder=str(FOLDER), reference=f"{tmp_path}/own.py:Net", array="head.bias")
    for value in ("1.5", "2.5"):
        (tmp_path / "bias.txt").write_text(value)
        done = subprocess.run([sys.executable, "-c", script], text=True, check=True, stdout=subprocess.PIPE)
        assert float(done.stdout.split()[1]) == float(value)


@pytest.mark.thorough
def test_damaged_description_is_written_again(cache):
    script = BUILT.format(folder=str(FOLDER), reference=f"{NETS}:Demanding?depth=1", array="head.bias")

    def describe():
        return subprocess.run([sys.executable, "-c", script], text=True, check=True, stdout=subprocess.PIPE).stdout.split()

    folder, value = describe()
    for name, content in {"initial-0.npz": b"", "description.json": b"[" * 5000}.items():
        Path(folder, name).write_bytes(content)
        assert describe() == [folder, value]


@pytest.mark.thorough
def test_background_process_of_a_module_is_ended(cache, tmp_path):
    mark = tmp_path / "pid"
    start = f"import subprocess\nopen({str(mark)!r}, 'w').write(str(subprocess.Popen(['sleep', '300']).pid))\n"
    (tmp_path / "own.py").write_text(start + "def net():\n    raise ValueError('no width')\n")
    done = trainer("run", "--model", f"{tmp_path}/own.py:net", "--backend", "torch", "--data", "glyphs", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "ValueError: no width" in done.stderr
    with suppress(psutil.NoSuchProcess):  # nobody may have waited for it yet
        assert psutil.Process(int(mark.read_text())).status() == psutil.STATUS_ZOMBIE


BUILT = """
import sys

sys.path.insert(0, {folder!r})
from passes import DATA

from crosstrain.models.imported.importing import IMPORTER

spec = IMPORTER({reference!r}, DATA)
print(spec.settings.folder, float(spec.initial(0)[{array!r}][0]))
"""
PRETRAINED = """
from torch import nn


class Net(nn.Module):
    def __init__(self, channels, num_classes):
        super().__init__()
        self.head = nn.Linear(channels, num_classes)
        with open({file!r}) as file:
            nn.init.constant_(self.head.bias, float(file.read()))

    def forward(self, x):
        return self.head(x.mean((2, 3)))
"""
PROBLEMS = {
    "Unused": "its result does not depend on spare.weight, spare.bias of",
    "Stateless": "has no parameter to train",
    "NotFinite": "the initial values of 'head.bias' of",
    "Demanding": "needs a value for depth; write",
    "Demanding?depth=2&rat=1": "got 'rat'; allowed: channels=…, num_classes=…, depth=…, rate=…. Did you mean 'rate'?",
    "Demanding?depth=2&rate=high": "got 'high'; allowed: a number.",
    "Images": "returns a tensor of shape (4, 4, 16, 16) for 4 examples; logits [batch, classes] are needed.",
    "Images?channels=1": "fails on images of 3×18×18 (channels, height, width): RuntimeError",
    "OnlyColours?num_classes=7": "returns 7 logits for data of 5 classes",
    "TABLE": "is dict, not an nn.Module class or a function that returns one.",
    "broken": "fails: ValueError: no such width",
    "a_list": "returned list, not an nn.Module.",
    "Noisy": "draws random numbers by aten.randn_like.default (",
    "Averaged": "'norm' of {nets}:Averaged has momentum=None, a mean of all batches.",
    "Counting": "a training step changes 'steps' of {nets}:Counting, which is torch.int64. Make it float32.",
    "Stepping": "a training step changes 'step' of {nets}:Stepping, which is torch.int64. Make it float32.",
    "Listed": "does not depend on head.weight of {nets}:Listed. It may read them from a list; nn.ParameterList is known to a run.",
    "Hooked": "the parameter 'head.weight' of {nets}:Hooked has a hook, which a run does not call. Remove it.",
    "Sharing": "the parameters 'head.weight' and 'other.weight' of {nets}:Sharing share their memory.",
    "Wide": "the buffer 'shift' of {nets}:Wide is torch.float64; float32 is needed.",
    "Chance": "draws random numbers by Python's random, which a run cannot repeat.",
    "Rebuilt": "{nets}:Rebuilt is another one each time it is built: its constructor draws random numbers that --seed does not decide",
    "Dropping": "gives other results each time it is evaluated: it drops or draws there too.",
    "Probable": "returns probabilities, and losses take logits. Leave its softmax out.",
    "Recurent": "has no 'Recurent'. Did you mean 'Recurrent'?",
}
ASK = """
import json, sys
sys.path[:0] = [{folder!r}]
from passes import DATA
from crosstrain.models.imported.importing import data_facts
from crosstrain.models.imported.requests import Request
from crosstrain.models.imported.torch.process import answer
problems = {{}}
for name, arguments in json.load(sys.stdin).items():
    request = Request("{nets}:" + name.partition("?")[0], arguments, data_facts(DATA), DATA.classes, 0, {out!r}, True)
    problems[name] = answer(request)
print(json.dumps(problems))
"""


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    requests = {name: dict(part.split("=") for part in name.partition("?")[2].split("&") if part) for name in PROBLEMS}
    script = ASK.format(folder=str(FOLDER), nets=NETS, out=str(tmp_path_factory.mktemp("described")))
    done = subprocess.run([sys.executable, "-c", script], input=json.dumps(requests), text=True, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", PROBLEMS)
def test_unusable_module_is_explained_in_a_sentence(problems, name):
    assert problems[name].startswith("model: ")
    assert PROBLEMS[name].format(nets=NETS) in problems[name]
    assert "\n" not in problems[name]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Branching", "depends on the values of a tensor"),
        ("Rounding", "the backward of Rounded, a torch.autograd.Function, is left out of exports ("),
        pytest.param("FixedBatch", "Use x.shape[0] instead of len(x)", marks=pytest.mark.thorough),
        pytest.param("AloneOrNot", "a condition on the number of examples", marks=pytest.mark.thorough),
    ],
)
def test_untranslatable_module_trains_on_torch_alone(cache, tmp_path, name, problem):
    options = ["--data", "glyphs", "--steps", "2", "--global-batch-size", "8", "--eval-every", "end", "--out", str(tmp_path)]
    model = ["--model", f"{NETS}:{name}"]
    assert trainer("run", *model, "--backend", "torch", *options).returncode == 0
    refused = trainer("run", *model, "--backend", "tf", *options)
    assert refused.returncode == 2
    assert problem in refused.stderr


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import sys\nsys.exit(3)", "SystemExit"),
        pytest.param("raise RuntimeError('no data')", "RuntimeError: no data", marks=pytest.mark.thorough),
        pytest.param("import not_installed", "there is no module 'not_installed'", marks=pytest.mark.thorough),
        ("import os\nos._exit(4)", "ended with code 4"),
    ],
)
def test_module_that_fails_at_import_is_refused(cache, tmp_path, source, expected):
    (tmp_path / "own.py").write_text(source)
    done = trainer("run", "--model", f"{tmp_path}/own.py:Net", "--backend", "torch", "--data", "glyphs", "--out", str(tmp_path))
    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1
