"""Passes of a Keras model with a run's parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..description import Imported, read_constants
from ..reference import read_reference
from .calls import Call
from .library import Drop, dropping_by, keras_on, using_floats
from .models import built, carried, constant, trained


class Bound:
    """A model that is called with values from elsewhere; its own stay as they are."""

    def __init__(self, keras: Any, call: Call, imported: Imported) -> None:
        self.keras, self.call = keras, call
        # By place, as layers without a name get one from a count of the process.
        self._trained = dict(zip(imported.parameters, trained(call.model).values(), strict=True))
        self._carried = dict(zip(imported.buffers, carried(call.model).values(), strict=True))
        values = read_constants(imported.folder)
        self.names = {id(weight): name for name, weight in (*self._trained.items(), *self._carried.items())}
        self._constants = {id(weight): values[str(place)] for place, weight in enumerate(constant(call.model))}

    def __call__(
        self, parameters: Mapping[str, Any], buffers: Mapping[str, Any], inputs: Sequence[Any], drop: Drop | None, *, training: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Return the result for a batch, and after a training pass new values of buffers by name.

        `drop` carries dropout out, of a tensor and a rate.
        """
        scope = self.keras.StatelessScope(initialize_variables=False)
        scope.state_mapping |= {id(weight): parameters[name] for name, weight in self._trained.items()}
        scope.state_mapping |= {id(weight): buffers[name] for name, weight in self._carried.items()}
        scope.state_mapping |= {key: self.keras.ops.convert_to_tensor(value) for key, value in self._constants.items()}
        with scope, dropping_by(drop):
            result = self.call(*inputs, training=training)
        updated = {name: scope.get_current_value(weight) for name, weight in self._carried.items()} if training else {}
        return result, {name: value for name, value in updated.items() if value is not buffers[name]}


_known: dict[tuple[Path, str], Bound] = {}  # by the folder of the description, and the format of floats


def bound(imported: Imported, framework: str, floats: str = "float32") -> Bound:
    """Return an imported model on this process's framework, without values of its own.

    It is built on first use.
    """
    key = imported.folder, floats
    if key not in _known:
        keras = keras_on(framework)
        with using_floats(keras, floats), keras.StatelessScope(initialize_variables=False):
            call = built(keras, read_reference(imported.reference), imported.request, 0)
        _known[key] = Bound(keras, call, imported)
    return _known[key]


def on_its_own(imported: Imported, framework: str) -> Call:
    """Return an imported model with values of its own."""
    return built(keras_on(framework), read_reference(imported.reference), imported.request, 0)
