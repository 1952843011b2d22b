"""Equal layers of Keras and torch have equal recordings, whatever their layouts and gates."""

import json

import pytest
from test_recordings import findings_of, run

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]
DATA = """
import numpy as np
draw = np.random.default_rng(5)
KINDS = {"sequence": (12, 4), "image": (8, 8, 3), "volume": (6, 6, 6, 2), "words": (7,)}
OF = {"gru": "sequence", "lstm": "sequence", "lstm_biases": "sequence", "both_ways": "sequence", "conv1d": "sequence", "conv3d": "volume",
      "transposed": "image", "depthwise": "image", "embedding": "words"}

def batches(model):
    shape = (16, *KINDS[OF[model]])
    make = (lambda: draw.integers(0, 20, shape)) if OF[model] == "words" else (lambda: draw.standard_normal(shape).astype("f4"))
    return [(make(), draw.integers(0, 5, 16)) for _ in range(4)]
"""
TORCH = """
import sys, torch
from torch import nn
from crosstrain import recorder
from data import OF, batches
folder, kind, clip = sys.argv[1], sys.argv[2], sys.argv[3]
torch.manual_seed(0)

class Last(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        states = self.layer(x)[1]
        states = states[0] if isinstance(states, tuple) else states
        return torch.cat(list(states), 1)

class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)

model = {
    "gru": lambda: [Last(nn.GRU(4, 9, batch_first=True)), nn.Linear(9, 5)],
    "lstm": lambda: [Last(nn.LSTM(4, 9, batch_first=True, bias=False)), nn.Linear(9, 5)],
    "lstm_biases": lambda: [Last(nn.LSTM(4, 9, batch_first=True)), nn.Linear(9, 5)],
    "both_ways": lambda: [Last(nn.GRU(4, 9, batch_first=True, bidirectional=True)), nn.Linear(18, 5)],
    "conv1d": lambda: [nn.Conv1d(4, 6, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(36, 5)],
    "conv3d": lambda: [nn.Conv3d(2, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1296, 5)],
    "transposed": lambda: [nn.ConvTranspose2d(3, 6, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1536, 5)],
    "depthwise": lambda: [nn.Conv2d(3, 6, 3, padding=1, groups=3), nn.ReLU(), nn.Flatten(), nn.Linear(384, 5)],
    "embedding": lambda: [nn.Embedding(20, 6), Mean(), nn.Linear(6, 5)],
}[kind]()
model = nn.Sequential(*model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
recorder.start(folder, full=True)
recorder.watch(model, optimizer)
for x, y in batches(kind):
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    if OF[kind] in ("image", "volume") or kind == "conv1d":
        x = x.movedim(-1, 1).contiguous()
    recorder.batch(x=x, y=y)
    loss = nn.functional.cross_entropy(model(x), y)
    recorder.loss(loss)
    optimizer.zero_grad()
    loss.backward()
    if clip == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
"""
KERAS = """
import json, os, sys
os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
from keras import layers
from crosstrain import recorder
from data import KINDS, OF, batches
folder, source, kind, clip, way = sys.argv[1:]
model = {
    "gru": lambda: [layers.GRU(9)],
    "lstm": lambda: [layers.LSTM(9, use_bias=False)],
    "lstm_biases": lambda: [layers.LSTM(9)],
    "both_ways": lambda: [layers.Bidirectional(layers.GRU(9))],
    "conv1d": lambda: [layers.Conv1D(6, 3, padding="same"), layers.ReLU(), layers.MaxPooling1D(2), layers.Flatten()],
    "conv3d": lambda: [layers.Conv3D(6, 3, padding="same"), layers.ReLU(), layers.Flatten()],
    "transposed": lambda: [layers.Conv2DTranspose(6, 2, strides=2), layers.ReLU(), layers.Flatten()],
    "depthwise": lambda: [layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2), layers.ReLU(), layers.Flatten()],
    "embedding": lambda: [layers.Embedding(20, 6), layers.GlobalAveragePooling1D()],
}[kind]()
model = keras.Sequential([keras.Input(KINDS[OF[kind]]), *model, layers.Dense(5)])
recorder.adopt(source, model)
optimizer = keras.optimizers.SGD(0.1, **json.loads(clip))
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss_of)
recorder.start(folder, full=True)
recorder.watch(model)
for x, y in batches(kind):
    if way == "fit":
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        continue
    import tensorflow
    recorder.batch(x=x, y=y)
    with tensorflow.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    recorder.loss(loss)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
"""
LAYERS = ["gru", "lstm", "both_ways", "conv1d", "conv3d", "transposed", "depthwise", "embedding"]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Return a function that records a model in both frameworks."""
    folder = tmp_path_factory.mktemp("layers")
    for name, text in (("torch_script.py", TORCH), ("keras_script.py", KERAS), ("data.py", DATA)):
        (folder / name).write_text(text)

    def record(kind, clip="", settings=None, way="fit"):
        names = folder / f"torch-{kind}-{clip}", folder / f"keras-{kind}-{way}-{'-'.join(settings or {})}"
        if not names[0].exists():
            run(folder, "torch_script.py", str(names[0]), kind, clip)
        run(folder, "keras_script.py", str(names[1]), str(names[0]), kind, json.dumps(settings or {}), way)
        return names

    return record


@pytest.mark.parametrize("kind", LAYERS)
def test_equal_layers_do_not_part(recordings, kind):
    assert findings_of(*recordings(kind)) == []


def test_rows_of_an_embedding_are_recorded_in_a_loop(recordings):
    assert findings_of(*recordings("embedding", way="loop")) == []


def test_one_bias_in_place_of_two_is_named(recordings):
    (finding,) = findings_of(*recordings("lstm_biases"))[:1]
    assert (finding["update"], finding["part"]) == (0, "optimiser")
    assert "has one bias on one side, and two that are added on the other: it moves 0.5 times as far" in finding["cause"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"global_clipnorm": 0.1}, ""),
        ({"clipnorm": 0.05}, "clipped by tensor, to the norm 0.05"),
        ({"clipvalue": 0.001}, "clipped by value, at 0.001"),
    ],
)
def test_clipping_of_an_optimizer_is_compared(recordings, settings, words):
    findings = findings_of(*recordings("conv1d", "norm", settings))
    assert [finding["part"] for finding in findings[:1]] == (["clipping"] if words else [])
    assert not words or words in findings[0]["cause"]
