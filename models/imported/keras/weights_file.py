"""Weights in the format of Keras."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...base import Array
from ..description import Imported
from ..reference import read_reference
from .library import usable_framework
from .models import carried, trained
from .passes import on_its_own

WEIGHTS_FILE = "model.weights.h5"


def write_weights_file(imported: Imported, parameters: Mapping[str, Array], buffers: Mapping[str, Array], folder: Path) -> None:
    """Write a model's values as `WEIGHTS_FILE`, for ``load_weights`` of the user's own model."""
    model = on_its_own(imported, usable_framework(read_reference(imported.reference))).model
    for names, weights, values in ((imported.parameters, trained(model), parameters), (imported.buffers, carried(model), buffers)):
        for name, weight in zip(names, weights.values(), strict=True):
            weight.assign(values[name])
    model.save_weights(folder / WEIGHTS_FILE)
