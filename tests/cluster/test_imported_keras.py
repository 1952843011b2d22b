"""Keras models as they are, on torch and on TensorFlow."""

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
NETS = TESTS / "imported/keras_nets.py"
NET = Path(__file__).parents[2] / "examples/own_keras/net.py"
ON_IMAGES = ("convolutional", "Subclassed", "ready", "Shuffling")
ON_COLUMNS = {"sequences": "phrases", "attentive": "phrases", "mixed": "rings", "joined": "rings"}
STEPS = {
    "data": "glyphs",
    "global_batch_size": 12,
    "steps": 6,
    "lr": 0.001,
    "deterministic": True,
    "eval_every": "end",
    "tensorboard": False,
}
ASYNC = {name: value for name, value in STEPS.items() if name != "deterministic"}
SMALL = f"{NET}:model"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return {**importable(TESTS / "tables"), "TRAINER_DATA_CACHE": str(tmp_path_factory.mktemp("cache") / "data")}


def both(script, lines, folder, environment):
    """Run a script of passes on torch, then on TensorFlow; return what each printed."""
    command = [sys.executable, TESTS / "imported" / script]
    answers = [
        subprocess.run(
            [*command, framework, folder], input="\n".join(lines), text=True, stdout=subprocess.PIPE, check=True, env=environment
        )
        for framework in ("torch", "tf")
    ]
    return [answer.stdout for answer in answers]


def relative(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.fixture(scope="module")
def on_images(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    lines = both("passes.py", [f"{NETS}:{name}" for name in ON_IMAGES], folder, environment)
    return folder, [[json.loads(line) for line in part.splitlines()] for part in lines]


@pytest.mark.parametrize("name", ON_IMAGES)
def test_model_on_images_is_the_same_on_both(on_images, name):
    folder, lines = on_images
    number = ON_IMAGES.index(name)
    assert [part[number]["problem"] for part in lines] == ["", ""]
    expected, actual = (np.load(folder / f"{framework}-{number}.npz") for framework in ("torch", "tf"))
    assert relative(actual["evaluated"], expected["evaluated"]) <= 1e-6
    assert relative(actual["trained"], expected["trained"]) <= 1e-6
    names = [key for key in expected.files if key.startswith("gradient ")]
    assert names
    assert relative(*(np.concatenate([arrays[key].ravel() for key in names]) for arrays in (actual, expected))) <= 3e-6
    for key in expected.files:
        if key.startswith(("buffer ", "parameter ")):
            np.testing.assert_allclose(actual[key], expected[key], rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.fixture(scope="module")
def on_columns(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("columns")
    both("column_passes.py", [f"{data} {NETS}:{name}" for name, data in ON_COLUMNS.items()], folder, environment)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", ON_COLUMNS)
def test_model_on_columns_is_the_same_on_both(on_columns, name):
    number = list(ON_COLUMNS).index(name)
    expected, actual = (np.load(on_columns / f"{framework}-{number}.npz") for framework in ("torch", "tf"))
    assert relative(actual["evaluated"], expected["evaluated"]) <= 1e-6
    assert relative(actual["trained"], expected["trained"]) <= 1e-6
    names = [key for key in expected.files if key.startswith("gradient ")]
    assert relative(*(np.concatenate([arrays[key].ravel() for key in names]) for arrays in (actual, expected))) <= 1e-5


@pytest.fixture(scope="module")
def runs(environment, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return {backend: run_job(out, backend=backend, model=SMALL, nodes=2, environment=environment, **STEPS) for backend in ("torch", "tf")}


@pytest.mark.thorough
def test_runs_of_a_keras_model_agree(runs):
    assert relative_difference(runs["tf"].losses, runs["torch"].losses) <= 1e-4
    assert len(set(runs["torch"].losses)) == STEPS["steps"]
    assert {run.summary["model_method"] for run in runs.values()} == {"keras"}


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", "tf"])
def test_keras_model_trains_asynchronously(environment, tmp_path, backend):
    run = run_job(tmp_path, backend=backend, model=SMALL, mode="async", nodes=2, environment=environment, **ASYNC)
    assert run.summary["updates_applied"] == STEPS["steps"]


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"exchange": "direct"}, {"clip_norm": 0.1, "ema_decay": 0.9}], ids=str)
def test_keras_model_trains_with_an_option_on_both(environment, tmp_path, options):
    chosen = {"model": SMALL, "environment": environment, **STEPS, **options}
    made = [run_job(tmp_path, backend=backend, nodes=2, **chosen) for backend in ("torch", "tf")]
    assert relative_difference(made[1].losses, made[0].losses) <= 1e-4


@pytest.mark.thorough
def test_run_of_a_keras_model_resumes_on_the_other_framework(environment, runs):
    for backend, second in (("torch", "tf"), ("tf", "torch")):
        options = ["--model", SMALL, "--backend", second, "--steps", "+2"]
        done = trainer("run", "--resume", str(runs[backend].path), *options, environment=environment)
        assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_exported_weights_load_into_plain_keras(environment, runs, tmp_path, framework):
    target = tmp_path / "exported"
    exported = trainer(
        "export", str(runs["tf"].path), "--format", "keras", "--model", SMALL, "--output", str(target), environment=environment
    )
    assert exported.returncode == 0, exported.stderr
    arrays = tmp_path / "arrays"
    options = ["--format", "safetensors", "--model", SMALL, "--output", str(arrays)]
    assert trainer("export", str(runs["tf"].path), *options, environment=environment).returncode == 0
    script = (
        f"import sys; sys.path.insert(0, {str(NET.parent)!r})\n"
        "import numpy as np\nfrom net import model\nfrom safetensors.numpy import load_file\n"
        f"net = model((32, 32, 3), width=16)\nnet.load_weights({str(target / 'model.weights.h5')!r})\n"
        f"saved = load_file({str(arrays / 'model.safetensors')!r})\n"
        "own = {weight.path: np.asarray(weight) if weight.trainable else weight.numpy() for weight in net.weights}\n"
        "print(sorted(own) == sorted(saved), all(np.array_equal(saved[name], np.asarray(value)) for name, value in own.items()))\n"
    ).replace("np.asarray(weight) if weight.trainable else weight.numpy()", "weight.numpy()")
    command = [sys.executable, "-c", script]
    loaded = subprocess.run(command, text=True, check=True, stdout=subprocess.PIPE, env={**environment, "KERAS_BACKEND": framework}).stdout
    assert loaded == "True True\n"


PROBLEMS = {
    "regularized": "of {nets}:regularized adds a loss of its own, such as a regularizer's",
    "noisy": "draws random numbers by normal of GaussianNoise ('gaussian_noise') while it trains, which a run cannot repeat.",
    "probable": "returns probabilities, and losses take logits. Leave its softmax out.",
    "Probabilities": "returns probabilities, and losses take logits. Leave its softmax out.",
    "bounded": "of {nets}:bounded has a constraint, which a run does not keep. Leave it out.",
    "twice": "ends with softmax of the layer 'dense",
    "rounded": "is uint8, and gets float32. Leave its dtype out.",
    "normed": "a training step of {nets}:normed assigns a value to",
    "Penal": "adds losses by add_loss, which a run does not train with. Leave them out.",
    "Stepping": "{nets}:Stepping has a train_step of its own, which a run does not call. Leave it out.",
    "Shuffling?counts=true": "changes 'shuffling",
    "half": "of {nets}:half computes in bfloat16; float32 is needed.",
    "frozen": "has no parameter to train.",
    "unused": "returns a list of 2; return one tensor of them: logits [batch, classes] are needed.",
    "wrong": "returns 6 logits for data of 5 classes. Set its number of classes.",
    "numbers": "returned list, not a Keras model.",
    "Counting": "a training step changes 'counting/steps' of {nets}:Counting, which is int32. Make it float32.",
    "Subclassed?width=high": "got 'high'; allowed: a whole number.",
    "ready?width=3": "is a model that is built already, and takes no argument 'width'.",
    "layers": "is module, not a Keras model, its class, or a function that returns one.",
    "Subclased": "has no 'Subclased'. Did you mean 'Subclassed'?",
    "sequences": "needs a value for vocabulary_size; write",
}
ASK = """
import json, sys
sys.path[:0] = [{folder!r}]
from passes import DATA
from crosstrain.models.imported.importing import data_facts
from crosstrain.models.imported.requests import Request
from crosstrain.models.imported.keras.process import answer
problems = {{}}
for name, arguments in json.load(sys.stdin).items():
    request = Request("{nets}:" + name.partition("?")[0], arguments, data_facts(DATA), DATA.classes, 0, {out!r}, True, "keras")
    problems[name] = answer(request)
print(json.dumps(problems))
"""


@pytest.fixture(scope="module")
def problems(environment, tmp_path_factory):
    requests = {name: dict(part.split("=") for part in name.partition("?")[2].split("&") if part) for name in PROBLEMS}
    script = ASK.format(folder=str(TESTS / "imported"), nets=NETS, out=str(tmp_path_factory.mktemp("described")))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=json.dumps(requests), text=True, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", PROBLEMS)
def test_unusable_keras_model_is_explained_in_a_sentence(problems, name):
    assert problems[name].startswith("model: ")
    assert PROBLEMS[name].format(nets=NETS) in problems[name]
    assert "\n" not in problems[name]


INITIAL = """
import sys
from pathlib import Path
import numpy as np
sys.path[:0] = [{folder!r}]
from passes import DATA
from crosstrain.models.imported.importing import data_facts
from crosstrain.models.imported.keras import process
from crosstrain.models.imported.requests import Request
process.usable_framework = lambda reference: {framework!r}
out = {out!r}
request = Request({reference!r}, {{}}, data_facts(DATA), DATA.classes, 7, out, True, "keras")
assert process.answer(request) is None
other = "tensorflow" if {framework!r} == "torch" else "torch"
assert other not in sys.modules, other
"""


@pytest.mark.thorough
def test_initial_values_do_not_depend_on_the_framework(environment, tmp_path):
    for framework in ("torch", "tf"):
        (tmp_path / framework).mkdir()
        names = {"folder": str(TESTS / "imported"), "framework": framework, "out": str(tmp_path / framework)}
        script = INITIAL.format(reference=f"{NETS}:Subclassed", **names)
        subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    torch, tf = (np.load(tmp_path / framework / "initial-7.npz") for framework in ("torch", "tf"))
    assert torch.files == tf.files
    for name in torch.files:
        np.testing.assert_allclose(torch[name], tf[name], rtol=1e-5, atol=1e-6, err_msg=name)  # an orthogonal one is computed
    descriptions = [json.loads((tmp_path / framework / "description.json").read_text()) for framework in ("torch", "tf")]
    assert [{**description, "sources": {}} for description in descriptions] == [{**descriptions[0], "sources": {}}] * 2


@pytest.mark.thorough
def test_source_that_imports_tensorflow_trains_there_alone(environment, tmp_path):
    (tmp_path / "own.py").write_text(
        NET.read_text().replace(
            "import keras\nfrom keras import layers", "from tensorflow import keras\nfrom tensorflow.keras import layers"
        )
    )
    options = ["--model", f"{tmp_path}/own.py:model", "--data", "glyphs", "--steps", "2", "--global-batch-size", "8"]
    done = trainer("run", *options, "--eval-every", "end", "--backend", "tf", "--out", str(tmp_path), environment=environment)
    assert done.returncode == 0, done.stderr
    refused = trainer("run", *options, "--backend", "torch", "--out", str(tmp_path), environment=environment)
    assert refused.returncode == 2
    assert "imports tensorflow; write `import keras`, which runs on both frameworks. It trains with --backend tf." in refused.stderr


@pytest.mark.thorough
def test_check_compares_keras_in_float64(environment, tmp_path):
    done = trainer("models", "check", SMALL, "--data", "glyphs", "--json", environment=environment)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [part["graph_problem"] for part in document["frameworks"]] == [None, None]
    exact = {part["what"]: part["relative"] for part in document["differences"] if part["precision"] == "float64"}
    assert set(exact) == {"results in training", "results in evaluation", "gradients"}
    assert max(exact.values()) <= 1e-8
