"""``import crosstrain as ct``: what is passed to the command line, and what is read back."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import crosstrain as ct
from crosstrain.api import calls
from crosstrain.api.given_data import data_name
from crosstrain.api.given_models import model_name
from crosstrain.core.job import Job
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.records.store.run_directory import RunReader

X, Y = np.arange(200.0).reshape(50, 4), np.arange(50) % 3


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))


class Net:
    """A class of a file."""


class Pairs:
    """A Dataset as frameworks have them."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, place):
        return self.x[place], self.y[place]


def test_import_loads_neither_numpy_nor_a_framework():
    script = "import sys, crosstrain as ct; print(sorted({'numpy', 'torch', 'tensorflow', 'pydantic'} & set(sys.modules))); ct.run"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert {"run", "sweep", "compare", "load", "table", "UsageError"} <= set(dir(ct))
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        ct.runs  # noqa: B018


def test_each_setting_is_a_keyword():
    for function in (ct.run, ct.sweep):
        assert set(Job.model_fields) <= set(inspect.signature(function).parameters)


def test_arrays_become_a_file_by_their_content():
    first, second = (data_name((X, Y), None) for _ in range(2))
    assert first == second
    assert data_name((X + 1, Y), None) != first
    data = open_dataset(data_name((X, Y, X[:9], Y[:9]), None))
    assert data.info.sizes == {"train": 50, "test": 9}
    lists = open_dataset(data_name([X.tolist(), Y.tolist()], None))
    assert sum(lists.info.sizes.values()) == 50


def test_datasets_become_arrays():
    data = open_dataset(data_name((Pairs(X, Y), Pairs(X[:9], Y[:9])), None))
    assert data.info.sizes == {"train": 50, "test": 9}
    assert sum(open_dataset(data_name(Pairs(X, Y), None)).info.sizes.values()) == 50


class Failing(Pairs):
    """A Dataset whose code fails."""

    def __getitem__(self, place):
        if place == 7:
            raise KeyError("seven")
        return super().__getitem__(place)


def test_random_examples_of_a_dataset_are_noted(capsys):
    class Drawn(Pairs):
        def __getitem__(self, place):
            return np.random.default_rng().normal(size=3), self.y[place]

    data_name(Drawn(X, Y), None)
    assert "every example was drawn once" in capsys.readouterr().err


def test_frames_become_tables():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": X[:, 0], "city": ["Rome", "Bonn"] * 25, "y": Y})
    data = open_dataset(data_name(frame, "y"))
    assert data.info.column("x").shape == (3,)
    assert data.info.features.classes == 3
    missing = frame.assign(age=frame["age"].where(frame["age"] > 8))
    assert sum(open_dataset(ct.table(missing, target="y", missing="drop")).info.sizes.values()) == 47
    assert open_dataset(ct.table(frame, target="y", test=frame[:9])).info.sizes == {"train": 50, "test": 9}
    named = frame["y"].map(["a", "b", "c"].__getitem__)
    assert open_dataset(data_name((frame[["age"]], named), None)).info.features.class_names == ("a", "b", "c")
    assert json.loads(open_dataset(ct.table(frame, target="y", leave_out="city")).attachment("table.json"))["categories"] == {}
    with pytest.raises(ct.UsageError, match="names of text"):
        data_name(pandas.DataFrame(X), 2)


@pytest.mark.parametrize(
    ("data", "target", "text"),
    [
        ((X, Y, X), None, "arrays (x, y)"),
        (X, None, "arrays (x, y)"),
        (3, None, "arrays (x, y)"),
        ((X.astype(object), Y), None, "x is an array of objects"),
        ((X, Y), "y", "of arrays the second is the target"),
        ("csv:a.csv", "y", "csv:a.csv?target=y"),
        ([Pairs(X, Y), Pairs([X, X[0]], Y[:2])], None, "has the shape"),
        ((X, Y[:9]), None, "number of examples"),
        (Failing(X, Y), None, "example 7 of the Dataset cannot be read: KeyError: 'seven'"),
    ],
)
def test_other_data_is_refused_in_one_sentence(data, target, text):
    with pytest.raises(ct.UsageError) as error:
        open_dataset(data_name(data, target))
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_frames_of_objects_are_refused():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [[1], [2]], "y": [0, 1]})
    with pytest.raises(ct.UsageError, match="column 'a' of the DataFrame has objects of list"):
        data_name(frame, "y")
    with pytest.raises(ct.UsageError, match="which column"):
        data_name(frame, None)
    with pytest.raises(ct.UsageError, match="target: got 'z'"):
        data_name(frame, "z")


def test_classes_are_named_by_file_module_or_pickle():
    assert model_name("cnn") == "cnn"
    assert model_name(Net) == f"{Path(__file__).resolve()}:Net"
    assert model_name(Path) == "pathlib:Path" or model_name(Path).endswith("pathlib.py:Path")

    class Local(Net):
        value = 7

    name = model_name(Local)
    path, _, attribute = name.rpartition(":")
    script = f"import runpy; print(runpy.run_path({path!r})[{attribute!r}].value)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.stdout == "7\n", done.stderr
    with pytest.raises(ct.UsageError, match="got an object of Net; give its class"):
        model_name(Net())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"step": 3}, "Did you mean 'steps'?"),
        ({"steps": -1}, "--steps: got '-1'"),
        ({"model": "nonsense"}, "--model: got 'nonsense'"),
        ({"target": "y"}, "names a column"),
        ({"data": "npz:/none.npz"}, "there is no file '/none.npz'"),
    ],
)
def test_wrong_requests_have_the_texts_of_the_command_line(settings, text, tmp_path):
    with pytest.raises(ct.UsageError) as error:
        ct.run(**{"out": tmp_path, "progress": False, **settings})
    assert text in str(error.value)


def test_grids_are_lists():
    assert calls._axis("lr", [0.1, 1]) == "0.1,1"
    assert calls._axis("cores_per_node", [[1, 1], [1, 0.5]]) == "1,1;1,0.5"
    with pytest.raises(ct.UsageError, match="grid: lr needs a list"):
        ct.sweep(grid={"lr": 0.1})


@pytest.mark.thorough
def test_runs_sweeps_and_comparisons(tmp_path):
    lines = []
    result = ct.run(model="logreg", data=(X, Y), backend="torch", steps=30, out=tmp_path, eval_every="10steps", progress=lines.append)
    assert result.summary["steps"] == 30
    assert any("steps" in line for line in lines)
    assert len(result.steps["loss"]) == 30
    assert list(result.evaluations["step"]) == [10, 20, 30]
    assert result.weights()["dense.weight"].shape == (3, 4)
    assert ct.load(result.name, tmp_path).summary == result.summary
    points = ct.sweep(grid={"backend": ["torch", "tf"]}, model="logreg", data=(X, Y), steps=30, out=tmp_path, progress=False)
    compared = ct.compare(*points)
    assert [point.job["backend"] for point in points] == ["torch", "tf"]
    assert len(compared.to_json()["runs"]) == 2
    assert result.name in result._repr_html_()
    assert compared.plot("loss")._repr_png_().startswith(b"\x89PNG")


NOTEBOOK = """
import helper, torch, crosstrain as ct
x = torch.randn(60, 4).requires_grad_()
data = torch.utils.data.TensorDataset(x, (x.detach()[:, 0] > 0).long())
def of_helper():
    return helper.layer(4, 2)
def of_keras():
    import keras
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
for model, backend in ((of_helper, "torch"), (of_keras, "tf")):
    print(ct.run(model=model, data=data, backend=backend, steps=4, progress=False).summary["steps"])
"""


@pytest.mark.thorough
def test_functions_of_a_notebook_use_keras_or_modules_beside_it(tmp_path):
    (tmp_path / "helper.py").write_text("import torch\n\ndef layer(*sizes):\n    return torch.nn.Linear(*sizes)\n")
    (tmp_path / "cells.py").write_text(NOTEBOOK)
    done = subprocess.run([sys.executable, "cells.py"], capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.stdout == "4\n4\n", done.stderr


@pytest.mark.thorough
def test_an_interrupted_run_ends_in_order(tmp_path):
    script = (
        "import crosstrain as ct\n"
        "try:\n"
        f"    ct.run(model='logreg', data='digits', backend='torch', steps=10_000_000, out={str(tmp_path)!r}, name='long')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "loss" in line:
                break
        process.send_signal(2)
        output, rest = process.communicate(timeout=60)
    assert output == "interrupted\n", rest
    status = RunReader(tmp_path / "long").status()
    assert (status["state"], status["exit_code"]) == ("interrupted", 130), status
