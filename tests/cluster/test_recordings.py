"""Recordings of scripts in two frameworks are compared, and faults in them named."""

import json
import os
import re
import subprocess
import sys

import pytest

from crosstrain.conformance.runs import trainer

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]
TORCH = """
import json, sys
import numpy as np, torch
from torch import nn
from crosstrain import recorder
from data import X, Y
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(128, 24), nn.ReLU(), nn.Linear(24, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
if len(sys.argv) > 1:
    recorder.start(sys.argv[1], full=True)
recorder.watch(model, optimizer)
loss_of = nn.CrossEntropyLoss()
for x, y in zip(X, Y):
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    recorder.batch(x=x, y=y)
    loss = loss_of(model(x), y)
    recorder.loss(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(json.dumps([repr(loss.item()), float(sum(p.double().abs().sum() for p in model.parameters()))]))
"""
KERAS = """
import json, sys
import numpy as np, keras
from keras import layers
from crosstrain import recorder
from data import X, Y
settings = {"epsilon": 1e-5, "momentum": 0.9, "lr": 0.05, "from_logits": True, "activation": "relu", "scale": 1.0}
settings.update(json.loads(sys.argv[3]))
model = keras.Sequential([
    keras.Input((8, 8, 3)), layers.Conv2D(8, 3, padding="same"),
    layers.BatchNormalization(epsilon=settings["epsilon"], momentum=settings["momentum"]), layers.Activation("relu"),
    layers.MaxPooling2D(2), layers.Flatten(), layers.Dense(24, settings["activation"]), layers.Dense(10),
])
recorder.adopt(sys.argv[1], model)
model.compile(
    keras.optimizers.SGD(settings["lr"], momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=settings["from_logits"])
)
recorder.start(sys.argv[2])
recorder.watch(model)
x = np.concatenate(X).transpose(0, 2, 3, 1) * np.float32(settings["scale"])
model.fit(x, np.concatenate(Y), batch_size=len(Y[0]), shuffle=False, verbose=0)
"""
DATA = """
import numpy as np
draw = np.random.default_rng(5)
X = [draw.standard_normal((16, 3, 8, 8)).astype("f4") for _ in range(4)]
Y = [draw.integers(0, 10, 16) for _ in range(4)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in (("torch_script.py", TORCH), ("keras_script.py", KERAS), ("data.py", DATA)):
        (folder / name).write_text(text)
    run(folder, "torch_script.py", "of-torch")
    return folder


def run(folder, script, *arguments, **variables):
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def compared(folder, name, **settings):
    run(folder, "keras_script.py", "of-torch", name, json.dumps(settings))
    done = trainer("diverge", str(folder / "of-torch"), str(folder / name), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_equal_scripts_do_not_part(folder, backend, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    result = compared(folder, f"equal-{backend}")
    assert result["findings"] == []
    assert result["tensors"] > 80
    assert [row["layer"] for row in result["layers"] if row["update"] == 0] == [str(number) for number in range(8)]


@pytest.mark.parametrize(
    ("settings", "part", "layer", "cause"),
    [
        ({"epsilon": 1e-3}, "forward", "1", "its epsilon is 1e-05 on of-torch and 0.001 on"),
        ({"momentum": 0.1}, "buffers", "1", "its momentum is 0.1 on of-torch and 0.9 on"),
        ({"lr": 0.0501}, "optimiser", "", "the learning rate is 0.05 on of-torch and 0.0501 on"),
        ({"from_logits": False}, "loss", "", "a cross entropy that takes logits for probabilities on"),
        ({"activation": "relu6"}, None, "", ""),
        ({"activation": "gelu"}, "forward", "6", "its kind is relu on of-torch and gelu on"),
        ({"scale": 1.01}, "data", "", "values are 1.01 times as large"),
    ],
)
def test_fault_of_a_script_is_named(folder, settings, part, layer, cause):
    result = compared(folder, f"fault-{'-'.join(settings)}-{next(iter(settings.values()))}", **settings)
    if part is None:  # no value above 6: the fault changes nothing here, and the settings say so
        assert result["findings"] == []
        assert any((row["first"], row["second"]) == ("relu", "relu6") for row in result["settings"])
        return
    first = result["findings"][0]
    assert (first["update"], first["part"], first["layer"]) == (0, part, layer)
    assert cause in first["cause"]


def test_code_of_the_page_records(folder, repository):
    (code,) = re.findall(r"```python\n(.*?)```", (repository / "docs/divergence.md").read_text(), re.DOTALL)
    (folder / "page.py").write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 3))\noptimizer = torch.optim.Adam(model.parameters())\n"
        "images, labels = torch.ones(2, 4), torch.tensor([0, 1])\nloss = torch.nn.functional.cross_entropy(model(images), labels)\n"
        f"{code}\nloss.backward()\noptimizer.step()\n"
    )
    run(folder, "page.py")
    assert (folder / "runs/mine-torch/recording.jsonl").read_text().count('"after"') == 2


def test_recording_changes_no_bit(folder):
    assert (
        run(folder, "torch_script.py") == run(folder, "torch_script.py", "again") == run(folder, "torch_script.py", TRAINER_RECORD="third")
    )


def test_damaged_recordings_are_refused(folder, tmp_path):
    def refused(text, values=b""):
        place = tmp_path / "damaged"
        place.mkdir(exist_ok=True)
        (place / "recording.jsonl").write_text(text)
        (place / "values.bin").write_bytes(values)
        done = trainer("diverge", str(folder / "of-torch"), str(place))
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        return done.stderr

    lines = (folder / "of-torch/recording.jsonl").read_text()
    assert "ends before byte" in refused(lines)
    assert "has no update" in refused(lines.splitlines()[0])
    assert "cannot be read" in refused(lines[:200])
    assert "cannot be read" in refused(lines.replace('"<f4"', '"|O"'), (folder / "of-torch/values.bin").read_bytes())
    assert "cannot be read" in refused(
        lines.replace('"shape": [8, 3, 3, 3]', '"shape": [8, 3, 3, 4]'), (folder / "of-torch/values.bin").read_bytes()
    )
    done = trainer("diverge", str(folder / "of-torch"), "--with", "backend=tf")
    assert done.returncode == 2
    assert "a recording is compared with another recording" in done.stderr


CAUSES = {  # of examples/two_scripts: the script that has it, the optimiser, update, part, and words of the cause
    "bn_momentum": ("torch", "sgd", 0, "buffers", "its momentum is 0.9 on"),
    "double_softmax": ("torch", "sgd", 0, "loss", "softmax of probabilities, so twice on"),
    "loss_sum": ("torch", "sgd", 0, "loss", "the sum of the cross entropy over the batch"),
    "coupled_decay": ("torch", "adamw", 0, "optimiser", "its kind of weight decay is coupled"),
    "normalisation": ("torch", "sgd", 0, "data", "other constants of normalisation"),
    "label_smoothing": ("torch", "sgd", 0, "loss", "a cross entropy with label smoothing 0.1 on"),
    "bn_epsilon": ("keras", "sgd", 0, "forward", "its epsilon is 1e-05 on"),
    "same_padding": ("keras", "sgd", 0, "forward", "its padding is [[1, 1], [1, 1]] on"),
    "adam_epsilon": ("keras", "adam", 0, "optimiser", "and 0.001 on"),
    "late_schedule": ("keras", "sgd", 2, "optimiser", "schedule is 1 update"),
    "bgr": ("keras", "sgd", 0, "data", "the channels are reversed"),
    "relu6": ("keras", "sgd", 0, "forward", "its kind is relu on"),
}


@pytest.fixture(scope="module")
def recordings(repository, tmp_path_factory):
    """Return a function that records one of the two example scripts, once for each choice."""
    out, known = tmp_path_factory.mktemp("two-scripts"), {}

    def record(script, cause, optimizer):
        name = f"{script}-{optimizer}-{cause or 'sound'}"
        if name not in known:
            options = ["--cause", cause] if cause else []
            if script == "keras":
                options += ["--weights-of", str(record("torch", None, optimizer))]
            run(repository / "examples/two_scripts", f"train_{script}.py", "--optimizer", optimizer, "--record", str(out / name), *options)
            known[name] = out / name
        return known[name]

    return record


def findings_of(first, second):
    done = trainer("diverge", str(first), str(second), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["findings"]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_example_scripts_do_not_part(recordings, optimizer):
    assert findings_of(recordings("torch", None, optimizer), recordings("keras", None, optimizer)) == []


@pytest.mark.parametrize("cause", CAUSES)
def test_first_sentence_explains_the_cause_of_an_example(recordings, cause):
    script, optimizer, update, part, words = CAUSES[cause]
    first, second = (recordings(name, cause if name == script else None, optimizer) for name in ("torch", "keras"))
    finding = findings_of(first, second)[0]
    assert (finding["update"], finding["part"]) == (update, part)
    assert words in finding["cause"]
