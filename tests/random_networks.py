"""Networks drawn at random from the models' layers, equal on every framework.

A package for one seed (`write_package`) is a model as docs/adding-a-model.md has it. Shapes are worked out as the layers are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.models.base import ModelSpec
from crosstrain.models.layers import LayerSpecs, convolved

MAX_LAYERS = 8


@dataclass
class Drawn:
    """A network: `calls` of `Layers` methods with arguments, and the `specs` they need."""

    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    specs: LayerSpecs = field(default_factory=LayerSpecs)
    dropouts: int = 0

    def add(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, arguments))


def draw(seed: int, input_shape: tuple[int, ...], classes: int) -> Drawn:
    """Draw one to eight layers before the logits: first on images, then on features."""
    random = np.random.default_rng([17, seed])
    drawn, count = Drawn(), int(random.integers(1, MAX_LAYERS + 1))
    on_images = int(random.integers(0, count + 1))
    channels, height, width = input_shape
    for number in range(on_images):
        channels, height, width = _image_layer(drawn, random, f"l{number}", channels, height, width)
    features = channels * height * width
    if random.random() < 0.5:
        drawn.add("flatten")
    else:
        features = _dense(drawn, "to-features", features, int(random.integers(4, 65)))
    for number in range(on_images, count):
        features = _feature_layer(drawn, random, f"l{number}", features)
    _dense(drawn, "logits", features, classes)
    return drawn


def _image_layer(drawn: Drawn, random: np.random.Generator, name: str, channels: int, height: int, width: int) -> tuple[int, int, int]:
    kind = random.choice(["conv", "conv", "conv_pool", "max_pool", "average_pool", "batch_norm", "residual"])
    outputs, least = int(random.integers(1, 13)), min(height, width)
    if kind == "conv":
        kernel = int(random.choice([side for side in (1, 3, 5) if side <= least]))
        stride, padding = int(random.integers(1, 3)), int(random.integers(0, kernel // 2 + 1))
        height, width = (convolved(side, kernel, stride, padding) for side in (height, width))
        drawn.specs.conv(name, (channels, outputs), kernel, height * width)
        drawn.add("conv", name, stride, padding)
        drawn.add("relu")
        return outputs, height, width
    if kind == "conv_pool" and least >= 4:
        drawn.specs.conv(name, (channels, outputs), 3, (height - 2) * (width - 2))
        drawn.add("conv_pool", name, 2, 2)
        return outputs, (height - 2) // 2, (width - 2) // 2
    if kind == "max_pool" and least >= 3:
        kernel, stride, padding = ((2, 2, 0), (3, 2, 1), (3, 1, 0))[int(random.integers(3))]
        drawn.add("max_pool", kernel, stride, padding)
        return channels, convolved(height, kernel, stride, padding), convolved(width, kernel, stride, padding)
    if kind == "average_pool":
        side = int(random.integers(1, least + 1))
        drawn.add("average_pool", side)
        return channels, side, side
    if kind == "batch_norm":
        drawn.specs.batch_norm(name, channels)
        drawn.add("batch_norm", name)
        return channels, height, width
    drawn.specs.conv(name, (channels, channels), 3, height * width)
    drawn.add("residual_conv", name)
    return channels, height, width


def _feature_layer(drawn: Drawn, random: np.random.Generator, name: str, features: int) -> int:
    kind = random.choice(["dense", "dense", "dropout", "residual"])
    if kind == "dropout":
        drawn.add("dropout", float(random.choice([0.1, 0.5])), drawn.dropouts)
        drawn.dropouts += 1
        return features
    if kind == "residual":
        _dense(drawn, name, features, features, method="residual_dense")
        return features
    features = _dense(drawn, name, features, int(random.integers(4, 65)))
    drawn.add("relu")
    return features


def _dense(drawn: Drawn, name: str, inputs: int, outputs: int, method: str = "dense") -> int:
    drawn.specs.dense(name, inputs, outputs)
    drawn.add(method, name)
    return outputs


def build(seed: int, data: Any) -> ModelSpec:
    """Return the spec of a seed's network."""
    drawn = draw(seed, data.input_shape, data.classes)
    specs = drawn.specs
    return ModelSpec(
        f"random-{seed}",
        tuple(specs.parameters),
        data.input_shape,
        data.classes,
        multiply_adds=specs.multiply_adds,
        buffers=tuple(specs.buffers),
        dropout=drawn.dropouts > 0,
    )


def network(seed: int, layers: Any, x_bchw: Any, classes: int) -> Any:
    """Return logits_bk of a seed's network, on the layers of any framework."""
    x = layers.images(x_bchw)
    for method, arguments in draw(seed, tuple(int(side) for side in x_bchw.shape[1:]), classes).calls:
        if method == "residual_conv":
            x = x + layers.relu(layers.conv(x, *arguments, padding=1))
        elif method == "residual_dense":
            x = x + layers.relu(layers.dense(x, *arguments))
        else:
            x = getattr(layers, method)(x, *arguments)
    return layers.logits(x)


def write_package(folder: Path, seed: int, classes: int) -> str:
    """Write the network of a seed as a package below `folder`; return the name for ``--model``."""
    package = folder / "drawn" / f"network_{seed}"
    package.mkdir(parents=True)
    (folder / "drawn" / "__init__.py").touch()
    (package / "__init__.py").write_text(
        f"from functools import partial\n\nimport random_networks\n\nbuild = partial(random_networks.build, {seed})\n"
    )
    for backend in ("tf", "torch"):
        (package / f"{backend}.py").write_text(
            f"from random_networks import network\n\nfrom crosstrain.models.layers.{backend} import Layers\n\n\n"
            f"def forward(parameters, x_bchw, context):\n"
            f"    return network({seed}, Layers(parameters, context), x_bchw, {classes})\n"
        )
    return f"drawn.network_{seed}"
