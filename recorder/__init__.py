"""Records a training script of one's own, in any framework, for `trainer diverge`.

Needs numpy alone, and imports no framework. Without `start`, and without TRAINER_RECORD in the environment, every function does nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from . import keras_models, torch_modules
from .recording import Recording

__all__ = ["adopt", "batch", "gradients", "loss", "start", "state", "step", "stop", "tensor", "watch"]
T = TypeVar("T")
VARIABLE = "TRAINER_RECORD"
ADAPTERS = (keras_models, torch_modules)
_recording: Recording | None = None


def start(folder: str, steps: str = "0-2,4,8,16", *, full: bool = False) -> None:
    """Record the updates `steps`, from 0, into a new folder.

    `full` keeps whole arrays; without it, 8 KB of each. Raises ValueError for other steps, and FileExistsError.
    """
    global _recording
    stop()
    _recording = Recording(folder, steps, full=full)


def stop() -> None:
    """End the recording, and the update that it is at, if there is one.

    An update that ends neither by this nor by `step` is not compared.
    """
    global _recording
    if _recording is not None:
        _recording.close()
    _recording = None


def _current() -> Recording | None:
    """Return the recording, if it is at an update that is wanted."""
    if _recording is None and os.environ.get(VARIABLE):
        start(os.environ[VARIABLE])
    return _recording if _recording is not None and _recording.is_wanted else None


def tensor(name: str, x: T) -> T:
    """Record a value of the forward pass, and its gradient where one arrives; return it."""
    if _recording is None and not os.environ.get(VARIABLE):
        return x
    _current()
    assert _recording is not None
    if not any(adapter.knows(x) for adapter in ADAPTERS):  # an array of numpy, whose gradient does not arrive
        _recording.add("forward", name, _array(x))
        return x
    recorded: T = _adapter(x).tensor(_recording, name, x)
    return recorded


def batch(**columns: Any) -> None:
    """Record the columns of a batch, by name."""
    if (recording := _current()) is not None:
        for name, values in columns.items():
            recording.add("batch", name, _array(values))


def loss(value: Any) -> None:
    """Record the loss of an update."""
    if (recording := _current()) is not None:
        recording.add("loss", "loss", _array(value))


def state(name: str, values: Any, *, after: bool = False) -> None:
    """Record a model, or a mapping of names to arrays, before an update (or after it)."""
    if (recording := _current()) is not None:
        part = "after" if after else "before"
        if isinstance(values, Mapping):
            for key, value in values.items():
                recording.add(part, f"{name}.{key}", _array(value))
        else:
            _adapter(values).state(recording, part, values)


def gradients(values: Mapping[str, Any]) -> None:
    """Record the gradients that an optimiser is given, by the names of weights in `state`."""
    if (recording := _current()) is not None:
        for name, value in values.items():
            recording.add("gradient", name, _array(value))


def step() -> None:
    """End an update. With an optimiser that is watched, its own step does this."""
    if _recording is not None or os.environ.get(VARIABLE):
        _current()
        assert _recording is not None
        _recording.advance()


def watch(model: Any, optimizer: Any = None) -> None:
    """Record a whole nn.Module or Keras model, and with an optimiser its updates.

    Layers, their settings, weights, gradients and buffers are recorded; each step of the optimiser ends an update. Of a compiled Keras
    model the optimiser, the batch and the loss are found.
    """
    if _recording is None and os.environ.get(VARIABLE):
        start(os.environ[VARIABLE])
    if _recording is not None:
        _adapter(model).watch(_recording, model, optimizer)


def adopt(folder: str, model: Any) -> None:
    """Give a model the initial weights of another recording, which was made with `full`.

    Weights go by their names, else by their order and shape, with a warning where several fit. Raises ValueError where shapes differ.
    """
    from .recording import initial_weights

    _adapter(model).adopt(model, initial_weights(folder))


def _adapter(value: Any) -> Any:
    """Return the functions of the framework that a model or tensor is of."""
    for adapter in ADAPTERS:
        if adapter.knows(value):
            return adapter
    raise TypeError(f"recorder: {type(value).__module__}.{type(value).__name__} is no tensor, nn.Module or Keras model that is known.")


def _array(value: Any) -> Any:
    for adapter in ADAPTERS:
        if adapter.knows(value):
            return adapter.array(value)
    numpy = sys.modules["numpy"]
    return numpy.asarray(value)
