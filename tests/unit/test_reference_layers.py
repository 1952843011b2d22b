"""The layers in float64: their derivatives against differences of their results."""

from dataclasses import replace

import numpy as np
import pytest

from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.lockstep.losses import loss_of
from crosstrain.models.base import ForwardContext
from crosstrain.models.build import build_model
from crosstrain.models.layers import reference
from crosstrain.models.layers.reference import ReferenceLayers, ReferenceSequenceLayers, Value, record
from crosstrain.models.objectives import CLASSIFICATION, StandardLoss

DRAW = np.random.default_rng(5)


def parameters(shapes):
    return {name: DRAW.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def context(buffers=()):
    kept = DRAW.random(1 << 12) < 0.8
    return ForwardContext(
        True,
        {name: np.abs(DRAW.standard_normal(4)).astype(np.float32) for name in buffers},
        dropout=lambda ones, rate, layer: kept[: ones.size].reshape(ones.shape) / 0.8,
    )


IMAGE_LAYERS = {
    "conv": (lambda layers, x: layers.conv(x, "a", 2, 1), {"a.weight": (4, 4, 3, 3), "a.bias": (4,)}),
    "conv without bias": (lambda layers, x: layers.conv(x, "a", 1, 0), {"a.weight": (5, 4, 3, 2)}),
    "conv_pool": (lambda layers, x: layers.conv_pool(x, "a", 2, 2, 1), {"a.weight": (4, 4, 3, 3), "a.bias": (4,)}),
    "relu": (lambda layers, x: layers.relu(x), {}),
    "max_pool": (lambda layers, x: layers.max_pool(x, 3, 2, 1), {}),
    "average_pool": (lambda layers, x: layers.average_pool(x, 2), {}),
    "enlarge": (lambda layers, x: layers.enlarge(x, 9, 11), {}),
    "flatten": (lambda layers, x: layers.flatten(x), {}),
    "dense": (lambda layers, x: layers.dense(x, "a"), {"a.weight": (3, 168), "a.bias": (3,)}),
    "dropout": (lambda layers, x: layers.dropout(x, 0.2, 0), {}),
    "batch_norm": (lambda layers, x: layers.batch_norm(x, "a"), {"a.weight": (4,), "a.bias": (4,)}),
    "sum": (lambda layers, x: layers.relu(x + layers.max_pool(x, 3, 1, 1)), {}),
}
SEQUENCE_LAYERS = {
    "positions": (lambda layers, x: layers.positions(x), {}),
    "layer_norm": (lambda layers, x: layers.layer_norm(x, "a"), {"a.weight": (8,), "a.bias": (8,)}),
    "linear": (lambda layers, x: layers.linear(x, "a"), {"a.weight": (5, 8)}),
    "dense_relu": (lambda layers, x: layers.dense_relu(x, "a"), {"a.weight": (5, 8), "a.bias": (5,)}),
    "attention": (
        lambda layers, x: layers.attention(*layers.heads(layers.linear(x, "a"), 3, 2), None, 0.2, 0, causal=True),
        {"a.weight": (24, 8)},
    ),
}


def slope_of(layer, values, x, target, name):
    """Return the slope of Σ target · result by a parameter, or by the input, from differences."""
    moved = x if name is None else values[name]
    slope = np.zeros(moved.shape)
    for place in np.ndindex(moved.shape):
        results = []
        for step in (1e-3, -1e-3):
            changed = moved.astype(np.float64).copy()
            changed[place] += step
            arguments = {**values, **({} if name is None else {name: changed})}
            _, result = record(
                lambda tape, arguments=arguments, changed=changed: layer(arguments, tape, Value(changed if name is None else x))
            )
            results.append(float((target * result.array).sum()))
        slope[place] = (results[0] - results[1]) / 2e-3
    return slope


@pytest.mark.parametrize("name", [*IMAGE_LAYERS, *SEQUENCE_LAYERS])
def test_derivatives_are_those_of_the_result(monkeypatch, name):
    monkeypatch.setattr(reference, "rounded", lambda array: array)
    layer, shapes = {**IMAGE_LAYERS, **SEQUENCE_LAYERS}[name]
    kind = ReferenceLayers if name in IMAGE_LAYERS else ReferenceSequenceLayers
    x = DRAW.standard_normal((2, 4, 6, 7) if name in IMAGE_LAYERS else (2, 3, 8)) + np.arange(7 if name in IMAGE_LAYERS else 8)
    values, surroundings = parameters(shapes), context(("a.running_mean", "a.running_var"))

    def carried_out(arguments, tape, value):
        return layer(kind(arguments, surroundings, tape), value)

    value = Value(x)
    tape, result = record(lambda tape: carried_out(values, tape, value))
    target = DRAW.standard_normal(result.shape)
    tape.backward(result, target)
    np.testing.assert_allclose(value.slope, slope_of(carried_out, values, x, target, None), rtol=1e-4, atol=1e-4)
    for parameter in shapes:
        actual = next(call.results[key][0] for call in tape.layers for key in call.results if key == f"gradient of {parameter}")
        np.testing.assert_allclose(actual, slope_of(carried_out, values, x, target, parameter), rtol=1e-3, atol=1e-3)


def cnn(loss):
    features = ImageFeatures((1, 8, 8), 5, (0.5,), (0.2,))
    return build_model("cnn", DataInfo.of_images("drawn", {"train": 6, "test": 6}, features), loss)


@pytest.mark.parametrize(
    "loss",
    [None, "cross_entropy?smoothing=0.1", "cross_entropy?smoothing=0.1&class_weights=1,2,3,4,5", "multi_label", "mse", "mae", "huber"],
)
def test_slopes_of_losses(loss):
    outputs = DRAW.standard_normal((6, 5))
    if loss in ("mse", "mae", "huber"):
        labels = DRAW.standard_normal((6, 5))
        spec = replace(cnn(None), objective=replace(CLASSIFICATION, standard=StandardLoss(loss, 0, outputs=5, delta=0.5)))
    else:
        labels = DRAW.integers(0, 5, 6)
        spec = cnn(loss)
    (total, size), (slope, _) = loss_of(spec, outputs, {"label": labels})
    assert size >= abs(total)
    for place in np.ndindex(outputs.shape):
        parts = []
        for step in (1e-5, -1e-5):
            moved = outputs.copy()
            moved[place] += step
            parts.append(loss_of(spec, moved, {"label": labels})[0][0])
        assert slope[place] == pytest.approx((parts[0] - parts[1]) / 2e-5, abs=1e-6)
