"""``trainer models check``, the check before a first run, and records of a model's method."""

import json
import os
from pathlib import Path

import pytest
from own_models import own_cache

from crosstrain.conformance.runs import trainer
from crosstrain.report.runs.run import Run

pytestmark = pytest.mark.cluster
NET = Path(__file__).parents[2] / "examples/own_torch/net.py"
MODEL = f"{NET}:Net?width=4"
TOO_LARGE = """
import importlib.util
import sys


class Finder:
    def find_spec(self, name, path, target=None):
        if name == "crosstrain.models.imported.tf.recurrent":  # the last module that registers operations
            sys.meta_path.remove(self)
            from crosstrain.models.imported.tf.operations import OPERATIONS

            right = OPERATIONS["aten.relu.default"]
            OPERATIONS["aten.relu.default"] = lambda run, self, **arguments: enlarged(right(run, self, **arguments))
        return None


def enlarged(x):
    from crosstrain.models.imported.tf.operations import ChannelsLast

    return ChannelsLast(x.value * (1 + 1e-5)) if isinstance(x, ChannelsLast) else x * (1 + 1e-5)


sys.meta_path.insert(0, Finder())
"""
HOOKED = """
from torch import nn


class Net(nn.Module):
    def __init__(self, channels, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3)
        self.head = nn.Linear(4, num_classes)

    def forward(self, x):
        y = self.conv(x)
        if y.requires_grad:
            y.register_hook(lambda slopes: slopes * 2)
        return self.head(y.tanh().mean((2, 3)))
"""
LEAVING = """
import os
import sys
from torch import nn


class Net(nn.Module):
    def __init__(self, channels, num_classes):
        super().__init__()
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x):
        if ".check." in sys.modules["__main__"].__spec__.name:
            print("words " * 1_000_000)
            os._exit(4)
        return self.head(x.mean((2, 3)))
"""


cache = pytest.fixture(scope="module", autouse=True)(own_cache)


@pytest.fixture(scope="module")
def with_wrong_operation(cache, tmp_path_factory):
    """An environment where TensorFlow's ReLU is too large by a hundred-thousandth."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "sitecustomize.py").write_text(TOO_LARGE)
    return {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


def checked(model, *options, environment=None):
    done = trainer("models", "check", model, "--data", "digits", "--json", *options, environment=environment)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def run(out, *options, environment=None):
    job = ["--data", "digits", "--steps", "2", "--global-batch-size", "8", "--eval-every", "end", "--no-tensorboard"]
    return trainer("run", "--model", MODEL, *job, "--out", str(out), *options, environment=environment)


def test_wrong_operation_is_found_by_layer_and_line(with_wrong_operation):
    code, document = checked(MODEL, environment=with_wrong_operation)
    assert code == 1
    assert not document["sound"]
    worst = {difference["what"]: difference["relative"] for difference in document["differences"] if difference["precision"] == "float64"}
    assert 1e-6 < worst["results in training"] < 1e-4
    line = next(number for number, text in enumerate(NET.read_text().splitlines(), 1) if "self.blocks(self.stem(x))" in text)
    assert document["begins"] == {"layer": "stem.2", "line": f"{NET}, line {line}", "what": "aten.relu.default"}


@pytest.mark.thorough
def test_run_of_a_wrong_translation_ends_before_it_starts(with_wrong_operation, tmp_path):
    done = run(tmp_path, "--backend", "tf", environment=with_wrong_operation)
    assert done.returncode == 2
    assert "differs from that on torch: results in training by" in done.stderr
    assert "It begins at the layer 'stem.2' (aten.relu.default, " in done.stderr
    assert not list(tmp_path.iterdir())
    assert run(tmp_path, "--backend", "torch", environment=with_wrong_operation).returncode == 0


@pytest.fixture(scope="module")
def first_runs(with_wrong_operation, tmp_path_factory):
    """Two runs of a translation: only the first is checked."""
    out = tmp_path_factory.mktemp("runs")
    return out, [run(out, "--backend", "tf", "--name", f"run-{number}") for number in range(2)]


@pytest.mark.thorough
def test_translation_is_checked_before_its_first_run_only(first_runs):
    out, done = first_runs
    assert [part.returncode for part in done] == [0, 0]
    assert ["checking once that" in part.stderr for part in done] == [True, False]
    events = [[event.event for event in Run(out / f"run-{number}").events] for number in range(2)]
    assert ["model_checked" in names for names in events] == [True, False]


def test_records_say_how_a_model_is_carried_out(first_runs):
    out, done = first_runs
    for name in ("job.json", "summary.json"):
        document = json.loads((out / "run-0" / name).read_text())
        assert (document["model_method"], document["adapter_cost"]) == ("translated", None)
    assert "translated" in done[0].stdout


def test_module_is_equal_on_both_frameworks():
    code, document = checked(MODEL)
    assert code == 0, document
    assert document["sound"]
    assert {part["backend"]: part["method"] for part in document["frameworks"]} == {"tf": "translated", "torch": "native"}
    assert {part["backend"]: part["cost"] is None for part in document["frameworks"]} == {"tf": True, "torch": False}
    assert [(difference["precision"], difference["relative"] <= 1e-8) for difference in document["differences"]][:3] == [
        ("float64", True)
    ] * 3


@pytest.mark.thorough
def test_gradient_that_an_export_loses_is_found(tmp_path):
    (tmp_path / "net.py").write_text(HOOKED)
    code, document = checked(f"{tmp_path}/net.py:Net")
    assert code == 1
    wrong = [difference for difference in document["differences"] if difference["relative"] > difference["tolerance"]]
    assert [(difference["what"], difference["second"]) for difference in wrong] == [("gradients", "its export"), ("gradients", "tf")]
    assert document["begins"]["layer"] == "conv"


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["logreg", "cnn"])
def test_built_in_model_is_checked_by_its_forward_functions(model):
    code, document = checked(model)
    assert code == 0, document
    assert {part["method"] for part in document["frameworks"]} == {"native"}
    assert {difference["precision"] for difference in document["differences"]} == {"float32"}


@pytest.mark.thorough
def test_module_that_leaves_its_process_is_reported(tmp_path):
    (tmp_path / "net.py").write_text(LEAVING)
    code, document = checked(f"{tmp_path}/net.py:Net")
    assert code == 1
    problems = {part["backend"]: part["problem"] for part in document["frameworks"]}
    assert "ended with code 4" in problems["torch"]
    assert len(problems["torch"]) < 1_000
    assert problems["tf"] is None


@pytest.mark.parametrize(("model", "data", "problem"), [("resnet19", "digits", "resnet18"), ("logreg", "digts", "digits")])
def test_unknown_names_are_refused(model, data, problem):
    done = trainer("models", "check", model, "--data", data)
    assert done.returncode == 2
    assert problem in done.stderr
