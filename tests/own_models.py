"""Custom models for tests: a package with the network as a function of `layers` and `x`."""

import os
from pathlib import Path
from textwrap import dedent, indent

import pytest

SPEC = """
import math

from crosstrain.models.base import ModelSpec
from crosstrain.models.layers import LayerSpecs


def build(data):
    specs = LayerSpecs()
    specs.dense("a", math.prod(data.input_shape), 64)
    specs.dense("b", 64, 64)
    specs.dense("c", 64, data.classes)
    return ModelSpec("own", tuple(specs.parameters), data.input_shape, data.classes, multiply_adds=specs.multiply_adds)
"""

FORWARD = """
from crosstrain.models.layers.{backend} import Layers

{prelude}


def forward(parameters, x, context):
    layers = Layers(parameters, context)
{body}
    hidden = layers.relu(layers.dense(layers.flatten(layers.images(x)), "a"))
    return layers.logits(layers.dense(layers.relu(layers.dense(hidden, "b")), "c"))
"""


def write_model(folder: Path, name: str, backend: str, *, prelude: str = "", body: str = "") -> str:
    """Write a model of three dense layers with `body` first; return the name for ``--model``."""
    package = folder / "own_models" / name
    package.mkdir(parents=True, exist_ok=True)
    (folder / "own_models" / "__init__.py").touch()
    (package / "__init__.py").write_text(SPEC)
    text = FORWARD.format(backend=backend, prelude=dedent(prelude), body=indent(dedent(body), "    "))
    (package / f"{backend}.py").write_text(text)
    return f"own_models.{name}"


def importable(*folders: Path) -> dict[str, str]:
    """Return this process's environment with the folders on the path of Python's imports."""
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def own_cache(tmp_path_factory):
    """Give a test file a data cache of its own, so that it describes its models itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINER_DATA_CACHE", str(tmp_path_factory.mktemp("cache") / "data"))
        yield
